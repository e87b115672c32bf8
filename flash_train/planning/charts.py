"""The chart of a plan: what is needed by T, and what it is needed for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from flash_train.chart_style import STYLE, legend_beside, stack_bars
from flash_train.comparison.text import human_bytes
from flash_train.planning.measured import Measured
from flash_train.planning.plan import ArmPlan, ladder
from flash_train.planning.settings import Settings

# Okabe and Ito's palette, which stays apart for every kind of colour vision; markers say it twice.
_COLOURS = {"naive": "#D55E00", "sdpa": "#0072B2", "flash": "#009E73"}
_MORE_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A", "#F0E442", "#5D3A9B")
_MARKERS = {"naive": "o", "sdpa": "s", "flash": "^"}


def draw_plan(
    path: Path,
    plans: Sequence[ArmPlan],
    settings: Settings,
    *,
    setting: str,
    parts: Mapping[str, Mapping[str, int]],
    measured: Sequence[Measured] = (),
) -> None:
    """Left: bytes by T on log axes, points predicted, lines between; `measured` peaks of as many rows as rings, with
    the same allowance and context. Right: what they are for at each longest T."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.4, 5.2), dpi=150, layout="constrained")
        title = f"Predicted memory of a training step, by sequence length\n{setting}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
        _draw_needs(left, plans, settings, [x for x in measured if x.rows == settings.rows])
        _draw_parts(right, plans, parts)
        figure.savefig(path)


def _draw_needs(axes: Axes, plans: Sequence[ArmPlan], settings: Settings, measured: Sequence[Measured]) -> None:
    spare = iter(_MORE_COLOURS * (1 + len(plans)))
    ring = {"marker": "o", "linestyle": "none", "markersize": 13, "markeredgewidth": 1.8, "markerfacecolor": "none"}
    sizes = ladder(plans, settings, "length")
    for index, plan in enumerate(plans):
        colour = _COLOURS.get(plan.arm) or next(spare)
        points = [point for point in plan.points("length", sizes) if sizes[0] <= point.length <= sizes[-1]]
        # Later ones thinner, so that equal curves stay visible on top of each other.
        width = 3.2 - 2 * index / max(1, len(plans) - 1)
        label = f"{plan.arm}: T = {plan.longest:,}" if plan.longest else f"{plan.arm}: nothing fits"
        axes.plot([x.length for x in points], [x.needed for x in points], color=colour, linewidth=width)
        asked = [x for x in points if x.prediction is not None]
        axes.plot([x.length for x in asked], [x.needed for x in asked], linestyle="none", color=colour, label=label,
                  marker=_MARKERS.get(plan.arm, "D"), markersize=7, markeredgecolor="white")  # fmt: skip
        own = [x for x in measured if x.arm == plan.arm]
        axes.plot([x.length for x in own], [x.peak * (1 + settings.allowance) + settings.card.context for x in own],
                  **ring, color=colour)  # fmt: skip
    if measured:
        axes.plot([], [], **ring, color="#555555", label="measured, allowance and context added")
    budget = settings.card.memory
    axes.axhline(budget, color="#555555", linewidth=1, linestyle="--")
    where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (0, -14)}
    axes.annotate(f"{settings.card.name or 'budget'}: {human_bytes(budget)}", (0.99, budget), **where, ha="right")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda T, _: f"{T:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: human_bytes(size, digits=0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    rows = "1 row" if settings.rows == 1 else f"{settings.rows:,} rows"
    axes.set_xlabel(f"sequence length T (tokens), {rows} in a micro-batch")
    axes.set_ylabel("needed, allowance and context included")
    axes.legend(loc="upper left", title="longest T (points are predicted)", alignment="left")


def _draw_parts(axes: Axes, plans: Sequence[ArmPlan], parts: Mapping[str, Mapping[str, int]]) -> None:
    names = list(dict.fromkeys(name for own in parts.values() for name in own))
    labels = [f"{plan.arm}\nT = {plan.longest:,}" if plan.longest else f"{plan.arm}\nnothing fits" for plan in plans]
    stack_bars(axes, labels, {name: [own.get(name, 0) / 2**30 for own in parts.values()] for name in names}, width=0.7)
    axes.set_ylabel("GiB")
    axes.set_title("at the longest T that fits")
    legend_beside(axes)
