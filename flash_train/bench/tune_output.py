"""What a search for launches found: tables in the terminal, tune.json, and a launch table as the package reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Lines

from flash_train.bench.output import human_time
from flash_train.bench.search import STATISTIC, Search, Trial
from flash_train.bench.settings import Tuning
from flash_train.bench.tune import tuned
from flash_train.comparison.results import write_json
from flash_train.comparison.text import human_bytes
from flash_train.ops.kernels.tables import VARIABLE, Launch, Provenance, write_table

TABLE_FILE, TIMES_FILE = "launch_table.json", "tune.json"


def print_search(search: Search, console: Console) -> None:
    """The launches that were timed, the fastest first; the others by what became of them; and what follows."""
    lines = Lines(title=f"{search.place}: {_problems(search)}", title_justify="left", box=box.SIMPLE_HEAD,
                  pad_edge=False)  # fmt: skip
    for heading in ("launch", "time", "spread", "best / time", "registers", "spills", "shared memory"):
        lines.add_column(heading, justify="left" if heading == "launch" else "right", no_wrap=True)
    lines.add_column("", no_wrap=True)
    timed = sorted((trial for trial in search.trials if trial.timed), key=lambda trial: trial.seconds)
    for trial in timed:
        lines.add_row(*_cells(trial, timed[0].seconds), _mark(trial, search))
    lines.width = console.measure(lines, options=console.options.update(width=10_000)).maximum
    console.print(lines, crop=False)
    for case, why in search.left_out.items():
        console.print(f"{case} took no part: {why}", markup=False)
    for status in ("wrong", "failed"):
        for trial in search.trials:
            if trial.status == status:
                present = " (present)" if trial.launch == search.present else ""
                console.print(f"{name(trial.launch)}{present}: {status}: {trial.why}", markup=False)
    for status in ("too large", "spills"):
        named = [name(trial.launch) for trial in search.trials if trial.status == status]
        if named:
            console.print(f"{status}: {', '.join(named)}", markup=False)
    console.print(_verdict(search), markup=False)
    console.print()


def name(launch: Launch) -> str:
    return f"{launch.block_t}x{launch.block_s} warps {launch.warps} stages {launch.stages}"


def _problems(search: Search) -> str:
    return ", ".join(map(str, search.cases)) + (", with a bias" if search.dense else "")


def _cells(trial: Trial, best: float) -> list[str]:
    built = trial.built
    return [
        name(trial.launch),
        human_time(trial.seconds),
        f"{100 * trial.spread:.1f} %" if trial.status == "ok" else "one round",
        f"{100 * best / trial.seconds:.1f} %",
        *("-" if x is None else str(x) for x in (built.registers, built.spills)),
        "-" if built.shared is None else human_bytes(built.shared),
    ]


def _mark(trial: Trial, search: Search) -> str:
    marks = ["present"] if trial.launch == search.present else []
    return " ".join(marks + ["new"] if trial.launch == search.replacement else marks)


def _verdict(search: Search) -> str:
    gain = search.gain
    if search.replacement is not None:
        saved = "" if gain is None else f", which saves {100 * gain:.1f} % of the present one's time"
        return f"{search.place}: now {name(search.replacement)}{saved}"
    if gain is None:
        return f"{search.place}: stays as it is, for nothing was timed"
    if search.fastest is search.trial(search.present):
        return f"{search.place}: stays as it is, the fastest"
    return f"{search.place}: stays as it is; a gain of {100 * gain:.1f} % is within what is uncertain"


def write_tuning(folder: Path, searches: Sequence[Search], settings: Tuning, *, facts: Mapping[str, Any]) -> list[Path]:
    """Write what is known so far into `folder`; the files."""
    environment = facts["environment"]

    def provenance(search: Search) -> Provenance:
        dtype = str(settings.dtype).removeprefix("torch.")
        return Provenance(
            how=f"by time, each checked against float64: {dtype}, {_problems(search)}",
            device=environment["device_name"],
            torch=environment["torch"],
            triton=environment["triton"],
            date=facts["date"],
            command=facts["command"],
        )

    files = [folder / TIMES_FILE, folder / TABLE_FILE]
    write_json(files[0], {**facts, "statistic": STATISTIC, "rows": [_line(search) for search in searches]})
    write_table(files[1], tuned(searches, provenance))
    return files


def how_to_adopt(file: Path) -> str:
    return f"to use it: {VARIABLE}={file}, or copy it over flash_train/ops/kernels/{TABLE_FILE}"


def _line(search: Search) -> dict[str, Any]:
    return {
        **search.place._asdict(),
        "dense": search.dense,
        "cases": [str(case) for case in search.cases],
        "left_out": search.left_out,
        "present": None if search.present is None else asdict(search.present),
        "replacement": None if search.replacement is None else asdict(search.replacement),
        "gain": search.gain,
        "launches": [
            {
                **asdict(trial.launch),
                "status": trial.status,
                "why": trial.why,
                "seconds": trial.seconds if trial.timed else None,
                "spread": trial.spread if trial.timed else None,
                "registers": trial.built.registers,
                "spills": trial.built.spills,
                "shared_bytes": trial.built.shared,
                "rounds": trial.samples,
            }
            for trial in search.trials
        ],
    }
