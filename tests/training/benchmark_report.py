"""What the benchmark of training steps found: the figures of each arm, which required ratios hold, tables, files."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from flash_train.comparison.table import print_lines
from flash_train.diagnostics.peak_flops import peak_flops
from flash_train.memory.cards import GIB

REFERENCE = "nanogpt"


@dataclass(frozen=True)
class Outcome:
    """What became of one run of an arm."""

    arm: str
    length: int
    round: int
    status: str
    """ "measured", "not run" (a library is missing) or "failed"."""
    message: str = ""
    seconds: float = 0.0
    """Of the whole process."""
    step_ms: Sequence[float] = ()
    peak_bytes: int | None = None
    first_step_seconds: float | None = None
    loss_curve: Sequence[Sequence[float]] = ()
    """[[step, nats per token], ...]."""
    speed: Mapping[str, Any] | None = None
    """What SpeedMonitor says of it."""


@dataclass(frozen=True)
class Row:
    """An arm at a length: the median over the rounds of each round's figure."""

    arm: str
    length: int
    problems: tuple[str, ...]
    """Of the rounds that gave no figures."""
    step_ms: float | None = None
    """Of each round the median of the timed steps."""
    spread_percent: float | None = None
    """(Slowest round - fastest) / `step_ms`."""
    mean_ms: float | None = None
    """Of each round the mean: with the steps that wait for the losses to be read."""
    tokens_per_second: float | None = None
    mfu_percent: float | None = None
    peak_bytes: float | None = None
    first_step_seconds: list[float] = field(default_factory=list)
    """Of each round: the first compiles, unless there is a cache from before."""
    last_loss: float | None = None
    loss_apart: float | None = None
    """The largest distance of a loss, in any step of any round, to the reference's first round. Its own is noise."""


@dataclass(frozen=True)
class Requirement:
    """`arm`'s speed is at least, or its peak at most, `bound` times that of `than`, at T = `length`."""

    arm: str
    length: int
    figure: str
    bound: float
    than: str = REFERENCE

    def ratio(self, rows: Sequence[Row]) -> float | None:
        """None where either was not measured."""
        name = "tokens_per_second" if self.figure == "speed" else "peak_bytes"
        found = {row.arm: getattr(row, name) for row in rows if row.length == self.length}
        own, other = found.get(self.arm), found.get(self.than)
        return own / other if own and other else None

    def holds(self, rows: Sequence[Row]) -> bool | None:
        ratio = self.ratio(rows)
        return None if ratio is None else (ratio >= self.bound if self.figure == "speed" else ratio <= self.bound)

    def describe(self, rows: Sequence[Row]) -> str:
        ratio, side = self.ratio(rows), "at least" if self.figure == "speed" else "at most"
        what = f"{self.arm}, {self.figure} at T={self.length:,}: {side} {self.bound:g} times {self.than}'s"
        if ratio is None:
            return f"{what}: not measured"
        return f"{what}: it is {ratio:.3f}: {'holds' if self.holds(rows) else 'DOES NOT HOLD'}"


REQUIRED = (
    Requirement("ours_bf16", 1024, "speed", 1.08),
    Requirement("ours_bf16", 8192, "speed", 1.10),
    Requirement("ours_bf16", 8192, "speed", 1.35, than="nanogpt_flash"),
    Requirement("ours_bf16", 1024, "peak", 0.5),
    Requirement("ours_bf16", 8192, "peak", 0.5),
    Requirement("ours", 1024, "speed", 1.04),
    Requirement("ours", 8192, "speed", 1.06),
)


def summarise(
    outcomes: Sequence[Outcome], *, tokens: int, flops: Mapping[int, float], device_name: str | None
) -> list[Row]:
    """A row for each length and arm, in the order in which they came.

    `flops` are those of a token at each length, the same for every arm; without the device's peak there is no MFU.
    """
    peak = peak_flops(device_name, "bf16") if device_name else None
    rows = []
    for length, arm in dict.fromkeys((each.length, each.arm) for each in outcomes):
        of_arm = [each for each in outcomes if (each.length, each.arm) == (length, arm)]
        problems = tuple(dict.fromkeys(f"{each.status}: {each.message}" for each in of_arm if each.message))
        measured = [each for each in of_arm if each.status == "measured"]
        if not measured:
            rows.append(Row(arm, length, problems))
            continue
        times = [median(each.step_ms) for each in measured]
        rate = 1e3 * tokens / median(times)
        peaks = [each.peak_bytes for each in measured if each.peak_bytes is not None]
        rows.append(
            Row(
                arm,
                length,
                problems,
                step_ms=median(times),
                spread_percent=100 * (max(times) - min(times)) / median(times),
                mean_ms=median(fmean(each.step_ms) for each in measured),
                tokens_per_second=rate,
                mfu_percent=100 * rate * flops[length] / peak if peak else None,
                peak_bytes=median(peaks) if peaks else None,
                first_step_seconds=[each.first_step_seconds or 0.0 for each in measured],
                last_loss=median(each.loss_curve[-1][1] for each in measured),
                loss_apart=_apart(measured, [x for x in outcomes if (x.length, x.arm) == (length, REFERENCE)]),
            )  # fmt: skip
        )
    return rows


def _apart(measured: Sequence[Outcome], references: Sequence[Outcome]) -> float | None:
    curve = next((each.loss_curve for each in references if each.status == "measured"), None)
    if curve is None:
        return None
    first = {step: loss for step, loss in curve}
    return max(abs(loss - first[step]) for each in measured for step, loss in each.loss_curve if step in first)


# Tables and files

HEADINGS = ["T", "arm", "step ms", "spread", "tokens/s", "MFU", "peak GiB", f"speed / {REFERENCE}",
            f"peak / {REFERENCE}", "first step s", "last loss", "apart"]  # fmt: skip


def lines(rows: Sequence[Row]) -> list[list[str]]:
    return [_line(row, rows) for row in rows]


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    if row.step_ms is None:
        return [f"{row.length:,}", row.arm, row.problems[0].partition(":")[0], *["-"] * (len(HEADINGS) - 3)]
    speed, peak = (Requirement(row.arm, row.length, figure, 1.0).ratio(rows) for figure in ("speed", "peak"))
    return [
        f"{row.length:,}", row.arm, f"{row.step_ms:.2f}", f"{row.spread_percent:.1f} %",
        f"{row.tokens_per_second:,.0f}", _number(row.mfu_percent, ".1f", " %"),
        _number(None if row.peak_bytes is None else row.peak_bytes / GIB, ".2f"), _number(speed, ".3f"),
        _number(peak, ".3f"), ", ".join(f"{x:.1f}" for x in row.first_step_seconds), _number(row.last_loss, ".4f"),
        _number(row.loss_apart, ".4f"),
    ]  # fmt: skip


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def remarks(rows: Sequence[Row]) -> list[str]:
    """What gave no figures, and a line for each required ratio."""
    problems = [f"{row.arm} at T={row.length:,}: {problem}" for row in rows for problem in row.problems]
    return [*problems, *(each.describe(rows) for each in REQUIRED)]


def verdict(rows: Sequence[Row]) -> bool:
    """Whether every required ratio that was measured holds, and no run failed."""
    failed = any(problem.startswith("failed") for row in rows for problem in row.problems)
    return not failed and all(each.holds(rows) is not False for each in REQUIRED)


def print_report(rows: Sequence[Row]) -> None:
    console = Console()
    print_lines(HEADINGS, lines(rows), console, title="Training steps")
    for line in remarks(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_files(folder: Path, rows: Sequence[Row], outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> None:
    """results.json with every figure, results.md with the table; either whole or as it was."""
    required = [asdict(each) | {"ratio": each.ratio(rows), "holds": each.holds(rows)} for each in REQUIRED]
    content = {**facts, "rows": [asdict(row) for row in rows], "required": required,
               "runs": [asdict(outcome) for outcome in outcomes]}  # fmt: skip
    table = [HEADINGS, ["---"] * len(HEADINGS), *lines(rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in table) + "\n" + "".join(f"- {x}\n" for x in remarks(rows))
    for name, written in (("results.json", json.dumps(content, indent=1) + "\n"), ("results.md", text)):
        unfinished = folder / f".{name}"
        unfinished.write_text(written)
        os.replace(unfinished, folder / name)
