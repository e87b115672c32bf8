"""A probed step as tables in the terminal, memory_probe.json and memory_probe.png."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box, get_console
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flash_train.chart_style import STYLE, UNTRACKED, legend_beside, stack_bars
from flash_train.memory.attribution import Breakdown
from flash_train.memory.live import CATEGORIES
from flash_train.memory.logits import CHUNK_ROWS
from flash_train.memory.trace import LOGITS, SCORES, TensorBytes

_MEASURED = {
    "allocator": "the allocator's own peaks",
    "profiler": "peaks of the CPU allocator's events",
    "tracker": "the tracker's own count, measured by nobody else",
    "prediction": "the step on fake tensors",
}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class _Unit:
    """One unit for all numbers of a breakdown, so that they can be compared by eye."""

    def __init__(self, breakdown: Breakdown) -> None:
        largest = max(phase.measured for phase in breakdown.phases.values())
        self.size, self.name = next((size, name) for size, name in _UNITS if largest >= size or size == 1)

    def __call__(self, size: int) -> str:
        return f"{size / self.size:,.2f}" if self.size > 1 else f"{size:,}"


def print_breakdown(breakdown: Breakdown, console: Console | None = None, *, most: int = 8) -> None:
    """Each phase's peak by category; by module, and the `most` largest tensors, at the highest; scores and SDPA."""
    console = console or get_console()
    unit = _Unit(breakdown)
    phase = breakdown.phase
    for title, table in (
        (
            f"Step {breakdown.step} by category, {unit.name}: {_MEASURED[breakdown.source]}",
            _categories(breakdown, unit),
        ),
        (f"By module at the peak, in the {phase}", _modules(breakdown, unit, most)),
        ("Largest tensors there", _tensors(breakdown, unit, most)),
    ):
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
        console.print(table, crop=False)
    for line in findings(breakdown):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _categories(breakdown: Breakdown, unit: _Unit) -> Table:
    table = _table("at the peak of", *breakdown.phases)
    phases = breakdown.phases.values()
    for name in CATEGORIES:
        if any(phase.categories[name] for phase in phases):
            table.add_row(name, *(unit(phase.categories[name]) for phase in phases))
    table.add_row("untracked", *(unit(phase.untracked) for phase in phases))
    table.add_section()
    table.add_row("peak", *(unit(phase.measured) for phase in phases))
    return table


def _modules(breakdown: Breakdown, unit: _Unit, most: int) -> Table:
    modules = list(breakdown.peak.modules.items())
    table = _table("module", unit.name)
    for name, size in modules[:most]:
        table.add_row(escape(name), unit(size))
    if len(modules) > most:
        table.add_row(f"{len(modules) - most} more", unit(sum(size for _, size in modules[most:])))
    return table


def _tensors(breakdown: Breakdown, unit: _Unit, most: int) -> Table:
    table = _table("tensor", unit.name)
    for tensor in breakdown.peak.tensors[:most]:
        table.add_row(escape(_describe(tensor)), unit(tensor.size))
    return table


def _describe(tensor: TensorBytes) -> str:
    times = f"{tensor.count} x " if tensor.count > 1 else ""
    maker = tensor.operation.removeprefix("aten.").partition(".")[0]
    by = f", {maker}" if maker else ""
    return f"{times}{list(tensor.shape)} {tensor.dtype}{by} in {tensor.module}, {tensor.category}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def findings(breakdown: Breakdown) -> Iterable[str]:
    """What is said in sentences: score matrices and what flash attention saves, math SDPA, what to know of it."""
    unit = _Unit(breakdown)
    alike: dict[Any, list[str]] = {}
    for scores in breakdown.score_matrices:
        alike.setdefault((scores.shape, scores.dtype, scores.saved, scores.most), []).append(scores.module)
    for (shape, dtype, saved, most), modules in alike.items():
        yield (
            f"Score matrices in {_names(modules)}: {list(shape)} {dtype}, {unit(saved)} {unit.name} saved for the "
            f"backward, {unit(most)} at most{', each' if len(modules) > 1 else ''}"
        )
    saves = breakdown.flash_saves
    if saves is not None:
        yield (
            f"Flash attention would save {unit(saves.saved)} {unit.name} of what is saved for the backward, and "
            f"{unit(saves.peak)} of the peak ({unit(breakdown.peak.measured)})"
        )
    for logits in breakdown.logits:
        yield (
            f"Logits of {logits.module}: {list(logits.shape)}, with copies, log-probabilities and gradients "
            f"{unit(logits.most)} {unit.name} at most"
        )
    chunked = breakdown.chunked_loss_saves
    if chunked is not None and chunked.peak > 0:
        yield f"A cross-entropy over {CHUNK_ROWS:,} rows at a time would save {unit(chunked.peak)} of the peak"
    culprit = next(iter(breakdown.peak.culprits), None)
    if culprit is not None:
        share = breakdown.peak.culprits[culprit] / max(1, breakdown.peak.measured)
        yield f"Most of the peak: {culprit}, {share:.0%}{_afterwards(breakdown)}"
    fell: dict[str, list[str]] = {}
    for use in breakdown.sdpa:
        if use.backend == "math":
            fell.setdefault(use.reason, []).append(use.module)
    for reason, modules in fell.items():
        yield f"SDPA in {_names(modules)} took its math back end: {reason}"
    yield from breakdown.notes


def _afterwards(breakdown: Breakdown) -> str:
    first = next(iter(breakdown.peak.culprits))
    saving = {SCORES: breakdown.flash_saves, LOGITS: breakdown.chunked_loss_saves}.get(first)
    if saving is None or saving.then == first:
        return ""
    return f"; without them, {saving.then}"


def _names(modules: list[str]) -> str:
    first = modules[0] or "the training step"
    return first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"


def write_files(folder: Path, breakdown: Breakdown) -> list[Path]:
    """memory_probe.json and memory_probe.png in `folder`; numbers first, so that no chart can lose them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("memory_probe.json", "memory_probe.png")]
    files[0].write_text(json.dumps(breakdown.to_json(), indent=2) + "\n")
    draw_breakdown(files[1], breakdown)
    return files


def draw_breakdown(path: Path, breakdown: Breakdown) -> None:
    """Left: each phase's peak by category, what is untracked on top. Right: the highest peak by module."""
    unit = _Unit(breakdown)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.4, 4.8), dpi=150, layout="constrained")
        title = f"What fills the memory of training step {breakdown.step} on {breakdown.device}"
        figure.suptitle(f"{title}: {_MEASURED[breakdown.source]}", x=0.01, ha="left", fontsize=11)
        left, right = figure.subplots(1, 2)
        _draw_phases(left, breakdown, unit)
        _draw_modules(right, breakdown, unit)
        figure.savefig(path)


def _draw_phases(axes: Axes, breakdown: Breakdown, unit: _Unit) -> None:
    names, phases = list(breakdown.phases), list(breakdown.phases.values())
    parts = {category: [phase.categories[category] / unit.size for phase in phases] for category in CATEGORIES}
    stack_bars(axes, names, parts | {UNTRACKED: [phase.untracked / unit.size for phase in phases]})
    for x, phase in enumerate(phases):
        axes.annotate(unit(phase.measured), (x, max(phase.measured, phase.tracked) / unit.size), ha="center",
                      xytext=(0, 3), textcoords="offset points")  # fmt: skip
    axes.set_ylim(0, 1.08 * max(max(phase.measured, phase.tracked) for phase in phases) / unit.size)
    axes.set_ylabel(unit.name)
    axes.set_title("by category, at each phase's peak")
    legend_beside(axes)


def _draw_modules(axes: Axes, breakdown: Breakdown, unit: _Unit) -> None:
    modules = list(breakdown.peak.modules.items())[:12][::-1]
    axes.barh([name for name, _ in modules], [size / unit.size for _, size in modules], color="#0072B2", height=0.7)
    axes.set_xlabel(unit.name)
    axes.set_title(f"by module, at the peak (in the {breakdown.phase})")
    axes.grid(axis="y", visible=False)
