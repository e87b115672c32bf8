"""What was measured, as a table in the terminal, results.json, results.csv and speed.png."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flash_train.bench.charts import draw
from flash_train.bench.measure import Entry
from flash_train.bench.settings import Settings
from flash_train.comparison.results import write_json
from flash_train.comparison.text import human_bytes

STATISTIC = (
    "time: the median over the rounds of each round's median, seconds a call; spread: (slowest round - fastest) / that"
)
_COLUMNS = (
    "name", "contestant", "ran", "status", "why", "direction", "seconds", "spread", "flops", "flops_per_second",
    "matmul_share", "times_as_slow_as_reference", "peak_bytes",
)  # fmt: skip


def print_case(
    entries: Sequence[Entry], settings: Settings, matmul: Sequence[float], console: Console, *, said: set[str]
) -> None:
    """The table of one problem, and a line for each contestant that has no speed, unless it is one that was `said`."""
    table = Table(title=str(entries[0].case), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("time", "spread", "TFLOP/s", "of matmul", f"time / {settings.reference}", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for direction in settings.directions:
        for entry in entries:
            if entry.status == "ok":
                table.add_row(*_line(entry, direction, _reference(entries, settings), matmul))
            elif entry.status == "wrong":
                table.add_row(entry.contestant, direction, "wrong")
        table.add_section()
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)
    again = []
    for entry in entries:
        line = f"{entry.contestant}: {entry.status}: {entry.why}"
        if line in said:
            again.append(entry.contestant)
        elif entry.status != "ok":
            console.print(line, markup=False)
            said.add(line)
    if again:
        console.print(f"as before: {', '.join(again)}")
    console.print()


def _line(entry: Entry, direction: str, reference: Entry | None, matmul: Sequence[float]) -> list[str]:
    speed = entry.flops_per_second(direction)
    ran = f" ({entry.ran})" if entry.ran not in (None, entry.contestant, f"{entry.contestant}_flash") else ""
    return [
        entry.contestant + ran,
        direction,
        human_time(entry.seconds(direction)),
        f"{100 * entry.spread(direction):.1f} %",
        f"{speed / 1e12:.3g}",
        f"{100 * speed / median(matmul):.3g} %",
        f"{entry.times_as_slow(reference, direction):.3g}" if reference else "-",
        human_bytes(entry.peak_bytes[direction]),
    ]


def write_files(
    folder: Path, entries: Sequence[Entry], settings: Settings, *, matmul: Sequence[float], facts: Mapping[str, Any]
) -> list[Path]:
    """Write what is known so far into `folder`; numbers first, so that no chart can lose them. The files."""
    files = [folder / name for name in ("results.json", "results.csv", "speed.png")]
    lines = list(_lines(entries, settings, matmul))
    write_json(
        files[0],
        {
            **facts,
            "statistic": STATISTIC,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "device": settings.device.type,
            "matmul_flops_per_second": {"median": median(matmul), "rounds": list(matmul)},
            "rows": lines,
        },
    )
    with files[1].open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([line.get(column) for column in _COLUMNS] for line in lines)
    what = f"{facts['environment']['device_name']}, {str(settings.dtype).removeprefix('torch.')}"
    draw(files[2], entries, settings, matmul=median(matmul), setting=what)
    return files


def _lines(entries: Sequence[Entry], settings: Settings, matmul: Sequence[float]) -> Iterator[dict[str, Any]]:
    """One for each contestant and direction; where there is no speed, one for the contestant."""
    for entry in entries:
        line: dict[str, Any] = {
            "name": str(entry.case),
            "case": asdict(entry.case),
            "contestant": entry.contestant,
            "ran": entry.ran,
            "status": entry.status,
            "why": entry.why,
            "errors": None if entry.errors is None else entry.errors._asdict(),
        }
        if entry.status != "ok":
            yield line
            continue
        reference = _reference([other for other in entries if other.case is entry.case], settings)
        for direction in settings.directions:
            speed = entry.flops_per_second(direction)
            yield line | {
                "direction": direction,
                "seconds": entry.seconds(direction),
                "spread": entry.spread(direction),
                "rounds": entry.rounds[direction],
                "flops": entry.case.flops(direction),
                "flops_per_second": speed,
                "matmul_share": speed / median(matmul),
                "times_as_slow_as_reference": entry.times_as_slow(reference, direction) if reference else None,
                "peak_bytes": entry.peak_bytes[direction],
            }


def _reference(entries: Sequence[Entry], settings: Settings) -> Entry | None:
    found = [entry for entry in entries if entry.contestant == settings.reference and entry.status == "ok"]
    return found[0] if found else None


def human_time(seconds: float) -> str:
    unit, factor = next(((u, f) for u, f in (("s", 1), ("ms", 1e3)) if seconds * f >= 1), ("us", 1e6))
    digits = max(0, 2 - math.floor(math.log10(seconds * factor)))
    return f"{seconds * factor:.{digits}f} {unit}"
