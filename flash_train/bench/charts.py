"""The chart of a run: a row for each problem, a point for each contestant."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from flash_train.bench.contestants import CONTESTANTS, OURS
from flash_train.bench.measure import Entry
from flash_train.bench.settings import Settings

_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
# Okabe and Ito's palette, which stays apart for every kind of colour vision; the marker says it twice.
_COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^vDPX"


def draw(path: Path, entries: Sequence[Entry], settings: Settings, *, matmul: float, setting: str) -> None:
    """TFLOP/s by problem, one panel a direction, the matrix product's rate as a line; ours are the filled points."""
    names = list(dict.fromkeys(str(entry.case) for entry in entries))
    timed = [entry for entry in entries if entry.status == "ok"]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(
            figsize=(3.2 + 3.6 * len(settings.directions), 2.2 + 0.42 * len(names)), dpi=150, layout="constrained"
        )
        figure.suptitle(f"Attention, TFLOP/s\n{setting}", x=0.01, ha="left", fontsize=11)
        panels = figure.subplots(1, len(settings.directions), sharey=True, squeeze=False)[0]
        for axes, direction in zip(panels, settings.directions, strict=True):
            for contestant in dict.fromkeys(entry.contestant for entry in timed):
                own = [entry for entry in timed if entry.contestant == contestant]
                place = list(CONTESTANTS).index(contestant)
                colour = _COLOURS[place % len(_COLOURS)]
                axes.plot(
                    [entry.flops_per_second(direction) / 1e12 for entry in own],
                    [names.index(str(entry.case)) for entry in own],
                    _MARKERS[(place + place // len(_COLOURS)) % len(_MARKERS)],
                    color=colour,
                    fillstyle="full" if contestant in OURS else "none",
                    label=contestant,
                )
            axes.axvline(matmul / 1e12, color="#555555", linewidth=1, linestyle="--", label="matrix product")
            axes.set_title(direction, loc="left", fontsize=10)
            axes.set_xlim(left=0)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.savefig(path)
