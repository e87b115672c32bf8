"""The charts: speed, a row for each problem and a point for each contestant; and bytes, by sequence length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from flash_train.bench.contestants import CONTESTANTS, OURS
from flash_train.bench.measure import Entry
from flash_train.bench.settings import Settings
from flash_train.bench.traffic import Traffic
from flash_train.chart_style import STYLE
from flash_train.comparison.text import human_bytes

# Okabe and Ito's palette, which stays apart for every kind of colour vision; the marker says it twice.
_COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^vDPX"


class _Look(NamedTuple):
    color: str
    marker: str
    fillstyle: Any


def _look(contestant: str) -> _Look:
    """Ours are the filled points."""
    place = list(CONTESTANTS).index(contestant)
    marker = _MARKERS[(place + place // len(_COLOURS)) % len(_MARKERS)]
    return _Look(_COLOURS[place % len(_COLOURS)], marker, "full" if contestant in OURS else "none")


def draw(path: Path, entries: Sequence[Entry], settings: Settings, *, matmul: float, setting: str) -> None:
    """TFLOP/s by problem, one panel a direction, the matrix product's rate as a line; ours are the filled points."""
    names = list(dict.fromkeys(str(entry.case) for entry in entries))
    timed = [entry for entry in entries if entry.status == "ok"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(3.2 + 3.6 * len(settings.directions), 2.2 + 0.42 * len(names)), dpi=150, layout="constrained"
        )
        figure.suptitle(f"Attention, TFLOP/s\n{setting}", x=0.01, ha="left", fontsize=11)
        panels = figure.subplots(1, len(settings.directions), sharey=True, squeeze=False)[0]
        for axes, direction in zip(panels, settings.directions, strict=True):
            for contestant in dict.fromkeys(entry.contestant for entry in timed):
                own = [entry for entry in timed if entry.contestant == contestant]
                axes.plot(
                    [entry.flops_per_second(direction) / 1e12 for entry in own],
                    [names.index(str(entry.case)) for entry in own],
                    linestyle="none",
                    label=contestant,
                    **_look(contestant)._asdict(),
                )
            axes.axvline(matmul / 1e12, color="#555555", linewidth=1, linestyle="--", label="matrix product")
            axes.set_title(direction, loc="left", fontsize=10)
            axes.set_xlim(left=0)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.savefig(path)


def draw_traffic(path: Path, rows: Sequence[Traffic], directions: Sequence[str], *, setting: str) -> None:
    """Bytes by T, both on log axes, one panel a direction: points are counted, lines are formulas."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 4.2 * len(directions), 4.6), dpi=150, layout="constrained")
        figure.suptitle(f"Attention, bytes of GPU memory read and written by one call\n{setting}", x=0.01, ha="left",
                        fontsize=11)  # fmt: skip
        panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
        for axes, direction in zip(panels, directions, strict=True):
            here = sorted((row for row in rows if row.direction == direction), key=lambda row: row.case.T)
            for contestant in dict.fromkeys(row.contestant for row in here):
                look, own = _look(contestant), [row for row in here if row.contestant == contestant]
                counted = [(row.case.T, row.total) for row in own if row.total is not None]
                formula = [(row.case.T, row.formula) for row in own if row.formula is not None]
                axes.plot(*_columns(counted), linestyle="none", label=contestant, **look._asdict())
                if formula:
                    axes.plot(*_columns(formula), color=look.color, linewidth=1, label=f"{contestant}, formula")
            least = dict((row.case.T, row.least) for row in here)
            axes.plot(*_columns(list(least.items())), color="#555555", linewidth=1, linestyle="--",
                      label="each tensor once")  # fmt: skip
            axes.set_title(direction, loc="left", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(list(least), [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in least])
            axes.set_xlabel("T")
            axes.yaxis.set_major_locator(LogLocator(base=4))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: human_bytes(size, digits=0)))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_locator(NullLocator())
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.savefig(path)


def _columns(points: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [x for x, _ in points], [y for _, y in points]
