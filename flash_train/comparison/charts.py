"""The charts of a comparison, as matplotlib figures: peak memory, speed, and losses with their differences."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from flash_train.chart_style import STYLE, UNTRACKED, stack_bars
from flash_train.comparison.agreement import LOSS_LIMIT
from flash_train.comparison.filling import Filling
from flash_train.comparison.plan import REFERENCE, REORDERED
from flash_train.comparison.results import Cell, Row
from flash_train.comparison.text import human_bytes, human_count

_GREY = "#555555"
_DASHES = (0, (6, 3))


class Look(NamedTuple):
    """How an arm is drawn: later ones thinner and smaller, so that equal curves stay visible on top of each other."""

    colour: str
    marker: str
    dash: str
    width: float
    size: float

    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dash, "linewidth": self.width}

    def points(self) -> dict[str, Any]:
        return {"marker": self.marker, "markersize": self.size, "markeredgecolor": "white", "markeredgewidth": 0.8}


# Okabe and Ito's palette, which stays apart for every kind of colour vision; markers and dashes say it twice.
_LOOKS = {
    "naive": Look("#D55E00", "o", "-", 3.2, 10),
    "sdpa": Look("#0072B2", "s", "--", 2.4, 10),
    "flash": Look("#009E73", "^", "-", 1.6, 7.5),
    REORDERED: Look("#8A8A8A", "v", ":", 1.6, 7),
}
_MORE_LOOKS = (
    Look("#CC79A7", "D", "-.", 1.6, 7),
    Look("#E69F00", "P", "--", 1.6, 8),
    Look("#56B4E9", "X", "-.", 1.6, 8),
    Look("#000000", "*", ":", 1.6, 9),
)


def memory_chart(
    cells: Sequence[Cell],
    *,
    setting: str,
    device_memory: int | None,
    exponents: Mapping[str, float | None],
    profiled: bool = False,
) -> Figure:
    """Peak allocated memory against T on log axes, what was predicted as a dotted line; a cross at the device's memory
    where an arm ran out of it.

    `profiled`: the peaks are those of one profiled step, and the axis says so.
    """
    peaks = [cell.peak_allocated_bytes for cell in cells if cell.peak_allocated_bytes]
    limit = device_memory or 2 * max(peaks, default=1)
    with _figure(f"Peak memory of training, by sequence length\n{setting}") as (figure, axes):
        for arm, look in _looks(cells).items():
            points = [(cell.length, cell.peak_allocated_bytes) for cell in cells if cell.arm == arm]
            drawn = [(length, peak) for length, peak in points if peak]
            axes.plot(*_columns(drawn), **look.line(), **look.points(), label=_grown(arm, exponents.get(arm)))
            predicted = [(cell.length, cell.predicted_peak_bytes) for cell in cells if cell.arm == arm]
            foreseen = [(length, peak) for length, peak in predicted if peak]
            axes.plot(*_columns(foreseen), color=look.colour, linestyle=":", linewidth=1.2)
            lost = [(cell.length, limit) for cell in cells if cell.arm == arm and cell.status == "oom"]
            axes.plot(*_columns(lost), "x", color=look.colour, markersize=12, markeredgewidth=3)
        exhausted = any(cell.status == "oom" for cell in cells)
        if any(cell.predicted_peak_bytes for cell in cells):
            axes.plot([], [], ":", color=_GREY, linewidth=1.2, label="predicted before the run")
        if exhausted:
            axes.plot([], [], "x", color=_GREY, markersize=9, markeredgewidth=2.5, label="ran out of memory")
        if device_memory and (exhausted or max(peaks, default=0) > limit / 8):
            axes.axhline(limit, color=_GREY, linewidth=1, linestyle=_DASHES)
            where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (0, 4)}
            axes.annotate(f"memory of the device: {human_bytes(limit)}", (0.01, limit), **where, color=_GREY)
        axes.set_yscale("log", base=2)
        heights = [*peaks, *([limit] if exhausted else [])]
        if heights and max(heights) < 4 * min(heights):  # so that no axis goes without two labels
            axes.set_ylim(min(heights) / 2, max(heights) * 2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value, digits=0)))
        axes.set_ylabel("peak of live tensors in one profiled step" if profiled else "peak of allocated memory")
        _length_axis(axes, cells)
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def speed_chart(cells: Sequence[Cell], *, setting: str) -> Figure:
    """Training tokens per second against T: the median of the repeats, with their range as a bar."""
    with _figure(f"Training speed, by sequence length\n{setting}") as (figure, axes):
        for arm, look in _looks(cells).items():
            own = [cell for cell in cells if cell.arm == arm and cell.tokens_per_second is not None]
            points = [(cell.length, cell.tokens_per_second or 0) for cell in own]
            axes.plot(*_columns(points), **look.line(), **look.points(), label=arm)
            for cell in own:
                axes.vlines(cell.length, cell.slowest or 0, cell.fastest or 0, color=look.colour, lw=5, alpha=0.4)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
        axes.set_ylabel("tokens per second")
        _length_axis(axes, cells)
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def loss_chart(
    rows: Sequence[Row], *, setting: str, lengths: Sequence[int], floors: Mapping[int, float | None]
) -> Figure:
    """The loss curves at each of the `lengths`, and below them how far each arm is from the reference."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.6, 4.2 * len(lengths)), 5.8), layout="constrained")
        figure.suptitle(f"Training loss, and its distance from {REFERENCE}\n{setting}", x=0.01, ha="left", fontsize=11)
        grid = figure.subplots(2, len(lengths), sharex="col", squeeze=False, gridspec_kw={"height_ratios": (3, 2)})
        for column, length in enumerate(lengths):
            group = [row for row in rows if row.length == length and row.status == "ok" and row.loss_curve]
            runs = {row.arm: row for row in group if row.repeat == 1}
            _draw_losses(grid[0][column], runs)
            _draw_differences(grid[1][column], runs, floors.get(length))
            grid[0][column].set_title(f"T = {length:,}")
        grid[0][0].set_ylabel("loss (nats per token)")
        grid[1][0].set_ylabel("distance (nats)")
        found = {
            label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=5)
    return figure


def filling_chart(found: Sequence[Filling], *, setting: str) -> Figure:
    """For each arm, each phase's peak by category, what no tensor explains on top; a line where it was measured."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.6, 3.0 * len(found) + 2), 4.6), layout="constrained")
        source = "as probed" if all(one.probed for one in found) else "as predicted; lines are measured"
        title = f"What fills the memory at T={found[0].length:,}, {source}"
        figure.suptitle(f"{title}\n{setting}", x=0.01, ha="left", fontsize=11)
        panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        names = list(dict.fromkeys(name for one in found for phase in one.phases.values() for name in phase.categories))
        size, unit = _unit(max(phase.measured for one in found for phase in one.phases.values()))
        for axes, one in zip(panels, found, strict=True):
            phases = one.phases.values()
            parts = {name: [phase.categories.get(name, 0) / size for phase in phases] for name in names}
            stack_bars(axes, list(one.phases), parts | {UNTRACKED: [phase.untracked / size for phase in phases]})
            if one.status == "ok":
                heights = [phase.measured / size for phase in phases]
                axes.hlines(heights, [x - 0.4 for x in range(len(heights))], [x + 0.4 for x in range(len(heights))],
                            color="black", linewidth=1.6)  # fmt: skip
            axes.set_title(one.title)
        panels[0].set_ylabel(unit)
        # Of all panels: a category that one arm lacks may be another's.
        handles = {
            label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        ordered = [name for name in (*names, UNTRACKED) if name in handles][::-1]
        panels[-1].legend([handles[name] for name in ordered], ordered, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _unit(size: int) -> tuple[int, str]:
    """One for all numbers of a chart, so that they can be compared by eye."""
    return next((number, name) for number, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
                if size >= number or number == 1)  # fmt: skip


def save_charts(folder: Path, charts: Mapping[str, Figure]) -> None:
    """Write each figure as `folder`/<name>.svg and .png."""
    with matplotlib.rc_context(STYLE):
        for name, figure in charts.items():
            figure.savefig(folder / f"{name}.png", dpi=160)
            # Without these entries equal figures are equal files, and an inlined one names no address.
            figure.savefig(folder / f"{name}.svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def _draw_losses(axes: Axes, runs: Mapping[str, Row]) -> None:
    for arm, look in _looks(runs.values()).items():
        if arm != REORDERED:
            axes.plot(*_columns(runs[arm].loss_curve), **look.line(), label=arm)


def _draw_differences(axes: Axes, runs: Mapping[str, Row], floor: float | None) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    reference = runs.get(REFERENCE)
    if reference is None:
        axes.text(0.5, 0.5, f"no valid run of {REFERENCE}", transform=axes.transAxes, ha="center")
        return
    expected = dict(reference.loss_curve)
    for arm, look in _looks(runs.values()).items():
        points = [(step, abs(loss - expected[step])) for step, loss in runs[arm].loss_curve if step in expected]
        if arm != REFERENCE:
            label = f"{REFERENCE}, keys in reverse order" if arm == REORDERED else arm
            axes.plot(*_columns(points), **look.line(), label=label)
    if floor is not None and math.isfinite(floor):
        limit = LOSS_LIMIT * floor
        axes.axhline(limit, color=_GREY, linewidth=1, linestyle=_DASHES, label=f"{LOSS_LIMIT:g} x noise floor")
        # Straight below a power of ten, whose label then stands clear of the zero's.
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(floor / 5)))
    axes.set_ylim(bottom=0)


@contextmanager
def _figure(title: str) -> Iterator[tuple[Figure, Axes]]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 5.0), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        yield figure, figure.subplots()


def _length_axis(axes: Axes, cells: Iterable[Cell]) -> None:
    ticks = sorted({cell.length for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequence length T (tokens)")
    axes.margins(x=0.08, y=0.1)


def _looks(items: Iterable[Cell | Row]) -> dict[str, Look]:
    arms = list(dict.fromkeys(item.arm for item in items))
    spare = iter(_MORE_LOOKS * len(arms))
    return {arm: _LOOKS.get(arm) or next(spare) for arm in arms}


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _grown(arm: str, exponent: float | None) -> str:
    return arm if exponent is None else f"{arm}, ~ T$^{{{exponent:.1f}}}$"
