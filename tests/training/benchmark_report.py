"""What the benchmark of training steps found: the figures of each arm, which required ratios hold, tables, files."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from flash_train.comparison.table import print_lines
from flash_train.diagnostics.peak_flops import peak_flops
from flash_train.memory.cards import GIB

REFERENCE = "nanogpt"
SUSTAINED, BURST = "sustained", "burst"


@dataclass(frozen=True)
class Turn:
    """So many steps of an arm, while the others hold still."""

    regime: str
    """ "sustained" or "burst"."""
    round: int
    step_ms: Sequence[float]
    began: float
    ended: float
    """By the clock that all processes share, in seconds; the untimed steps lie between these too."""
    peak_bytes: int | None = None
    joules_per_step: float | None = None
    watts: float | None = None
    megahertz: float | None = None


@dataclass
class Outcome:
    """What became of an arm's run at a length, as far as it is known."""

    arm: str
    length: int
    status: str = "unfinished"
    """Or "measured", "not run" (a library is missing), "failed"."""
    message: str = ""
    seconds: float = 0.0
    """Of the whole process."""
    first_step_seconds: float | None = None
    """Compilation included, unless there is a cache from before."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    loss_curve: Sequence[Sequence[float]] = ()
    """[[step, nats per token], ...]."""
    speed: Mapping[str, Any] | None = None
    """What SpeedMonitor says of it."""


@dataclass(frozen=True)
class Row:
    """An arm at a length in a regime: the median over the rounds of each round's figure."""

    arm: str
    length: int
    regime: str
    problem: str = ""
    """Why some or all of the rounds gave no figures."""
    round_ms: Mapping[int, float] = field(default_factory=dict)
    """Of each round the median of the timed steps."""
    round_peak_bytes: Mapping[int, float] = field(default_factory=dict)
    step_ms: float | None = None
    spread_percent: float | None = None
    """(Slowest round - fastest) / `step_ms`."""
    mean_ms: float | None = None
    """Of each round the mean: with the steps that wait for the losses to be read."""
    tokens_per_second: float | None = None
    mfu_percent: float | None = None
    joules_per_step: float | None = None
    watts: float | None = None
    megahertz: float | None = None
    peak_bytes: float | None = None
    first_step_seconds: float | None = None
    last_loss: float | None = None
    loss_apart: float | None = None
    """The largest distance of a loss, in any step, to the reference's."""


@dataclass(frozen=True)
class Requirement:
    """`arm`'s speed is at least, or its peak at most, `bound` times that of `than`, at T = `length`.

    The ratio is the median of those of the rounds that both have, and sustained turns decide."""

    arm: str
    length: int
    figure: str
    bound: float
    than: str = REFERENCE

    def ratio(self, rows: Sequence[Row], regime: str = SUSTAINED) -> float | None:
        """None where there is no round that has both."""
        found = {row.arm: row for row in rows if (row.length, row.regime) == (self.length, regime)}
        own, other = found.get(self.arm), found.get(self.than)
        if own is None or other is None:
            return None
        over, under = (
            (other.round_ms, own.round_ms) if self.figure == "speed" else (own.round_peak_bytes, other.round_peak_bytes)
        )
        ratios = [over[number] / under[number] for number in over if number in under]
        return median(ratios) if ratios else None

    def holds(self, rows: Sequence[Row]) -> bool | None:
        ratio = self.ratio(rows)
        return None if ratio is None else (ratio >= self.bound if self.figure == "speed" else ratio <= self.bound)

    def describe(self, rows: Sequence[Row]) -> str:
        ratio, burst = self.ratio(rows), self.ratio(rows, BURST)
        side = "at least" if self.figure == "speed" else "at most"
        what = f"{self.arm}, {self.figure} at T={self.length:,}: {side} {self.bound:g} times {self.than}'s"
        beside = "" if burst is None else f" (burst: {burst:.3f})"
        if ratio is None:
            return f"{what}: not measured{beside}"
        return f"{what}: it is {ratio:.3f}{beside}: {'holds' if self.holds(rows) else 'DOES NOT HOLD'}"


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
    """A row for each length, regime and arm, in the order in which they came.

    `flops` are those of a token at each length, the same for every arm; without the device's peak there is no MFU.
    """
    peak = peak_flops(device_name, "bf16") if device_name else None
    regimes = dict.fromkeys(turn.regime for outcome in outcomes for turn in outcome.turns) or [SUSTAINED]
    rows = []
    for length in dict.fromkeys(outcome.length for outcome in outcomes):
        there = [outcome for outcome in outcomes if outcome.length == length]
        reference = next((outcome for outcome in there if outcome.arm == REFERENCE), None)
        best = peak / flops[length] if peak else None
        rows += [_row(outcome, regime, reference, tokens, best) for regime in regimes for outcome in there]
    return [row for row in rows if row.step_ms is not None or row.problem]


def _row(outcome: Outcome, regime: str, reference: Outcome | None, tokens: int, best: float | None) -> Row:
    """`best`: tokens/s at the device's peak."""
    curve = {step: loss for step, loss in reference.loss_curve} if reference else {}
    row = Row(
        outcome.arm,
        outcome.length,
        regime,
        problem=f"{outcome.status}: {outcome.message}" if outcome.message else "",
        first_step_seconds=outcome.first_step_seconds,
        last_loss=outcome.loss_curve[-1][1] if outcome.loss_curve else None,
        loss_apart=max((abs(loss - curve[step]) for step, loss in outcome.loss_curve if step in curve), default=None),
    )
    turns = [turn for turn in outcome.turns if turn.regime == regime]
    if not turns:
        return row
    times = {turn.round: median(turn.step_ms) for turn in turns}
    peaks = {turn.round: turn.peak_bytes for turn in turns if turn.peak_bytes is not None}
    step_ms = median(times.values())
    rate = 1e3 * tokens / step_ms
    return replace(
        row,
        round_ms=times,
        round_peak_bytes=peaks,
        step_ms=step_ms,
        spread_percent=100 * (max(times.values()) - min(times.values())) / step_ms,
        mean_ms=median(fmean(turn.step_ms) for turn in turns),
        tokens_per_second=rate,
        mfu_percent=100 * rate / best if best else None,
        joules_per_step=_median(turn.joules_per_step for turn in turns),
        watts=_median(turn.watts for turn in turns),
        megahertz=_median(turn.megahertz for turn in turns),
        peak_bytes=_median(peaks.values()),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# Tables and files

HEADINGS = ["T", "turns", "arm", "step ms", "spread", "tokens/s", "MFU", "J/step", "W", "MHz", "peak GiB",
            f"speed / {REFERENCE}", f"peak / {REFERENCE}", "first step s", "last loss", "apart"]  # fmt: skip


def lines(rows: Sequence[Row]) -> list[list[str]]:
    return [_line(row, rows) for row in rows]


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    head = [f"{row.length:,}", row.regime, row.arm]
    if row.step_ms is None:
        return [*head, row.problem.partition(":")[0], *["-"] * (len(HEADINGS) - 4)]
    speed, peak = (
        Requirement(row.arm, row.length, figure, 1.0).ratio(rows, row.regime) for figure in ("speed", "peak")
    )
    return [
        *head, _number(row.step_ms, ".2f"), _number(row.spread_percent, ".1f", " %"),
        _number(row.tokens_per_second, ",.0f"), _number(row.mfu_percent, ".1f", " %"),
        _number(row.joules_per_step, ".1f"), _number(row.watts, ".0f"), _number(row.megahertz, ".0f"),
        _number(None if row.peak_bytes is None else row.peak_bytes / GIB, ".2f"), _number(speed, ".3f"),
        _number(peak, ".3f"), _number(row.first_step_seconds, ".1f"), _number(row.last_loss, ".4f"),
        _number(row.loss_apart, ".4f"),
    ]  # fmt: skip


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def remarks(rows: Sequence[Row]) -> list[str]:
    """What gave no figures, and a line for each required ratio."""
    problems = dict.fromkeys(f"{row.arm} at T={row.length:,}: {row.problem}" for row in rows if row.problem)
    return [*problems, *(each.describe(rows) for each in REQUIRED)]


def verdict(rows: Sequence[Row]) -> bool:
    """Whether every required ratio that was measured holds, and no run failed."""
    failed = any(row.problem.startswith("failed") for row in rows)
    return not failed and all(each.holds(rows) is not False for each in REQUIRED)


def print_report(rows: Sequence[Row]) -> None:
    console = Console()
    print_lines(HEADINGS, lines(rows), console, title="Training steps")
    for line in remarks(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_files(folder: Path, rows: Sequence[Row], outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> None:
    """results.json with every figure, results.md with the table; either whole or as it was."""
    required = [
        asdict(each) | {"ratio": each.ratio(rows), "burst_ratio": each.ratio(rows, BURST), "holds": each.holds(rows)}
        for each in REQUIRED
    ]
    content = {**facts, "rows": [asdict(row) for row in rows], "required": required,
               "runs": [asdict(outcome) for outcome in outcomes]}  # fmt: skip
    table = [HEADINGS, ["---"] * len(HEADINGS), *lines(rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in table) + "\n" + "".join(f"- {x}\n" for x in remarks(rows))
    for name, written in (("results.json", json.dumps(content, indent=1) + "\n"), ("results.md", text)):
        unfinished = folder / f".{name}"
        unfinished.write_text(written)
        os.replace(unfinished, folder / name)
