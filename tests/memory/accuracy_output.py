"""What the accuracy program found: a verdict, tables for the terminal and the README, files for machines."""

import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from flash_train.comparison.table import print_lines
from flash_train.memory.cards import GIB
from flash_train.memory.sizes import error_percent, human_error
from tests.memory.points import Point

EAGER = (-2.0, 2.0)
"""Per cent that a prediction of an eager step may be off."""
COMPILED = (-5.0, 100.0)
"""Of a compiled one, which is predicted as an eager one: it needs no more, and the compiler may make it need less."""


@dataclass(frozen=True)
class Outcome:
    """What became of a point. Sizes in bytes."""

    point: Point
    status: str
    """ "not run" (a library is missing), "predicted" (and not measured yet), "measured", "out of memory", "failed"."""
    predicted: int | None = None
    measured: int | None = None
    reserved: int | None = None
    predicted_phases: dict[str, int] = field(default_factory=dict)
    measured_phases: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    message: str = ""

    @property
    def error(self) -> float | None:
        """In per cent of what was measured."""
        known = self.predicted is not None and self.measured
        return error_percent(self.predicted or 0, self.measured or 1) if known else None

    @property
    def bound(self) -> tuple[float, float]:
        return COMPILED if self.point.compile else EAGER


def is_off(outcome: Outcome, *, least: int) -> bool:
    """Whether it is measured, at `least` bytes or more, and its error is out of bounds."""
    low, high = outcome.bound
    return outcome.error is not None and (outcome.measured or 0) >= least and not low <= outcome.error <= high


def verdict(outcomes: Iterable[Outcome], *, least: int) -> bool:
    """Whether all that could be run was measured, and within its bounds."""
    return all(
        outcome.status == "not run" or (outcome.status == "measured" and not is_off(outcome, least=least))
        for outcome in outcomes
    )


# Tables: a title, headings, lines of text


def tables(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str], list[list[str]]]]:
    found = [
        ("By length", *_grid([x for x in outcomes if x.point.factor == "length"], lambda x: f"{x.point.length:,}"))
    ]
    grid = [x for x in outcomes if x.point.factor not in ("length", "random", "foreign")]
    found.append(("By factor", *_grid(grid, lambda x: f"{x.point.factor}, {x.point.length:,}")))
    others = [x for x in outcomes if x.point.factor in ("random", "foreign")]
    headings = ["step", "predicted GiB", "measured GiB", "error"]
    lines = [[str(x.point), _gib(x.predicted), _gib(x.measured), _error(x)] for x in others]
    found.append(("Combinations, and others' models", headings, lines))
    found.append(("Errors", ["factor", "measured", "lowest", "highest", "largest at"], _errors(outcomes)))
    return [table for table in found if table[2]]


def _grid(outcomes: Sequence[Outcome], name: Any) -> tuple[list[str], list[list[str]]]:
    """A line for each name, for each kind of attention what was measured and the error."""
    kinds = list(dict.fromkeys(_kind(x) for x in outcomes))
    lines = []
    for line in dict.fromkeys(name(x) for x in outcomes):
        of_line = {_kind(x): x for x in outcomes if name(x) == line}
        cells = [(_gib(x.measured) + _remark(x), _error(x)) if (x := of_line.get(kind)) else ("", "") for kind in kinds]
        lines.append([line, *(text for cell in cells for text in cell)])
    return ["", *(text for kind in kinds for text in (f"{kind}, GiB", "error"))], lines


def _kind(outcome: Outcome) -> str:
    return outcome.point.attention.partition("_")[0]


def _remark(outcome: Outcome) -> str:
    point = outcome.point
    depth = "" if point.depth is None else f" ({point.depth} layers)"
    return depth or ("" if _kind(outcome) == point.attention else f" ({point.attention})")


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _error(outcome: Outcome) -> str:
    return outcome.status if outcome.error is None else human_error(outcome.error)


def _errors(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """By factor: how many were measured, the lowest and the highest error, and where the largest is."""
    lines = []
    for factor in dict.fromkeys(x.point.factor for x in outcomes):
        of_factor = [x for x in outcomes if x.point.factor == factor]
        known = [(x.error, x) for x in of_factor if x.error is not None]
        count = f"{len(known)} of {len(of_factor)}"
        if not known:
            lines.append([factor, count, "-", "-", "-"])
            continue
        errors = [error for error, _ in known]
        worst = max(known, key=lambda pair: abs(pair[0]))[1]
        lines.append([factor, count, human_error(min(errors)), human_error(max(errors)), str(worst.point)])
    return lines


def print_report(outcomes: Sequence[Outcome], *, least: int) -> None:
    console = Console(highlight=False)
    for title, headings, lines in tables(outcomes):
        print_lines(headings, lines, console, title=title)
    for outcome in outcomes:
        if outcome.status != "measured":
            print(f"{outcome.status}: {outcome.point}: {outcome.message}\n    --point '{outcome.point.to_json()}'")
        elif is_off(outcome, least=least):
            print(f"off by {human_error(outcome.error or 0.0)}: {outcome.point}\n    {_phases(outcome)}")
    print("all within bounds" if verdict(outcomes, least=least) else "NOT all within bounds", end="")
    print(f": {_bounds(EAGER)} eager, {_bounds(COMPILED)} compiled, from {least / GIB:g} GiB on", flush=True)


def _bounds(bound: tuple[float, float]) -> str:
    return f"{bound[0]:+g} to {bound[1]:+g} %"


def _phases(outcome: Outcome) -> str:
    return ", ".join(
        f"{phase} {_gib(outcome.predicted_phases.get(phase))} predicted, {_gib(size)} measured"
        for phase, size in outcome.measured_phases.items()
    )


# Files


def write_files(folder: Path, outcomes: Sequence[Outcome], facts: dict[str, Any], *, least: int) -> None:
    """results.json, results.csv and table.md, each whole or as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    points = [asdict(x) | {"error_percent": x.error, "name": str(x.point)} for x in outcomes]
    content = facts | {"bounds_percent": {"eager": EAGER, "compiled": COMPILED}, "least_bytes": least, "points": points}
    _replace(folder / "results.json", json.dumps(content, indent=1) + "\n")
    rows = [
        {**asdict(x.point), "status": x.status, "predicted_bytes": x.predicted, "measured_bytes": x.measured,
         "reserved_bytes": x.reserved, "error_percent": x.error}
        for x in outcomes
    ]  # fmt: skip
    with (folder / ".results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(folder / ".results.csv", folder / "results.csv")
    _replace(folder / "table.md", "\n".join(_markdown(*table) for table in tables(outcomes)))


def _markdown(title: str, headings: list[str], lines: list[list[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return f"{title}:\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    os.replace(unfinished, path)
