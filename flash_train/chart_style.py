"""How all charts look."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNTRACKED = "untracked"

STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.hashsalt": "flash_train",  # the same chart gives the same file
}
"""For `matplotlib.rc_context`."""

# Okabe and Ito's palette, which stays apart for every kind of colour vision.
PART_COLOURS = (
    "#0072B2", "#56B4E9", "#5D3A9B", "#D55E00", "#F0E442", "#CC79A7", "#E69F00", "#009E73", "#BBBBBB", "#777777",
    "#333333",
)  # fmt: skip


def stack_bars(
    axes: "Axes", labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, width: float = 0.6
) -> None:
    """A bar for each label, made of `parts` (a size for each label), the first at the bottom; each part keeps its
    colour, also where it is nothing. `UNTRACKED` is hatched; below 0 it hangs from the top."""
    bottom = [0.0] * len(labels)
    colours, untracked = iter(PART_COLOURS), {"color": "white", "edgecolor": "#555555", "hatch": "///"}
    for name, sizes in parts.items():
        look: dict[str, Any] = untracked if name == UNTRACKED else {"color": next(colours)}
        if any(sizes) or name == UNTRACKED:
            axes.bar(labels, sizes, bottom=bottom, label=name, width=width, **look)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    axes.grid(axis="x", visible=False)


def legend_beside(axes: "Axes") -> None:
    """The legend of stacked bars, in their order from the top."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
