"""The bytes that were counted, as a table in the terminal, results.json, results.csv and traffic.png."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flash_train.bench.charts import draw_traffic
from flash_train.bench.settings import Contest
from flash_train.bench.traffic import STATISTIC, Traffic
from flash_train.comparison.results import write_json
from flash_train.comparison.text import human_bytes, human_ratio

_COLUMNS = (
    "name", "contestant", "ran", "status", "why", "direction", "read_bytes", "written_bytes", "total_bytes",
    "formula_bytes", "least_bytes",
)  # fmt: skip


def print_traffic(rows: Sequence[Traffic], contest: Contest, console: Console) -> None:
    """A section for each direction, and a line for each contestant of which nothing was counted."""
    table = Table(title="GPU memory, bytes a call", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "", ""):
        table.add_column(heading, no_wrap=True)
    for heading in ("read", "written", "both", "formula", "both / formula", "each tensor once", "both / once"):
        table.add_column(heading, justify="right", no_wrap=True)
    for direction in contest.directions:
        for row in rows:
            if row.direction == direction:
                table.add_row(str(row.case), row.contestant, direction, *_cells(row))
        table.add_section()
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)
    for row in rows:
        if row.status != "ok" and row.direction == contest.directions[0]:
            console.print(f"{row.case}: {row.contestant}: {row.status}: {row.why}", markup=False)


def _cells(row: Traffic) -> list[str]:
    sizes = [row.read, row.written, row.total, row.formula]
    read, written, total, formula = ("-" if size is None else human_bytes(size) for size in sizes)
    by_formula, by_least = (
        human_ratio(row.total / size) if row.total is not None and size else "-" for size in (row.formula, row.least)
    )
    return [row.status if row.total is None else read, written, total, formula, by_formula, human_bytes(row.least),
            by_least]  # fmt: skip


def write_traffic(
    folder: Path, rows: Sequence[Traffic], contest: Contest, *, passes: int, facts: Mapping[str, Any]
) -> list[Path]:
    """Write all files into `folder`; numbers first, so that no chart can lose them. The files."""
    files = [folder / name for name in ("results.json", "results.csv", "traffic.png")]
    dtype = str(contest.dtype).removeprefix("torch.")
    lines = [_line(row) for row in rows]
    write_json(files[0], {**facts, "statistic": STATISTIC, "dtype": dtype, "passes": passes, "rows": lines})
    with files[1].open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([line[column] for column in _COLUMNS] for line in lines)
    draw_traffic(files[2], rows, contest.directions, setting=f"{facts['environment']['device_name']}, {dtype}")
    return files


def _line(row: Traffic) -> dict[str, Any]:
    return {
        "name": str(row.case),
        "case": asdict(row.case),
        "contestant": row.contestant,
        "ran": row.ran,
        "status": row.status,
        "why": row.why,
        "direction": row.direction,
        "read_bytes": row.read,
        "written_bytes": row.written,
        "total_bytes": row.total,
        "formula_bytes": row.formula,
        "least_bytes": row.least,
        "kernels": list(row.kernels),
    }
