"""An explanation of an out-of-memory error, and advice, as text."""

import io
from collections.abc import Iterable, Sequence

from rich import box, get_console
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flash_train.diagnostics.explanation import FRAGMENTED, Explanation
from flash_train.memory.changes import Advice
from flash_train.memory.sizes import human_bytes
from flash_train.memory.trace import PhaseMemory, TensorBytes

_BASIS = {
    "re-run": "re-run: the step was taken again on fake tensors, with the change",
    "modelled": "modelled: on the record of the step, with the blocks replaced that the change replaces",
    "counters": "counters: the allocator's own",
}


def print_explanation(explanation: Explanation, console: Console | None = None, *, most: int = 6) -> None:
    """What was asked for and where, what was there, what filled it, and the `most` best changes."""
    console = console or get_console()
    for line in headline(explanation):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if explanation.moment is not None:
        _print(console, _filling(explanation.moment.memory, _what_basis(explanation.basis)))
    elif explanation.advisory is not None:
        breakdown = explanation.advisory.breakdown
        _print(console, _filling(breakdown.peak, f"at the predicted peak, in the {breakdown.phase}"))
    print_advice(explanation.advice, console, left_out=explanation.left_out, most=most)
    if explanation.advisory is not None and not explanation.advice:
        console.print(_nothing_helps(explanation), markup=False, highlight=False, soft_wrap=True)


def print_advice(
    advice: Sequence[Advice], console: Console | None = None, *, left_out: Iterable[str] = (), most: int = 6
) -> None:
    """The `most` best changes: what each saves, what the step peaks at then, whether it fits, and how that is known."""
    console = console or get_console()
    if advice:
        _print(console, _changes(advice[:most]))
        for number, each in enumerate(advice[:most], start=1):
            console.print(f"{number}. {each.how}", markup=False, highlight=False, soft_wrap=True)
        bases = dict.fromkeys(basis for each in advice[:most] for basis in each.basis.split(" + "))
        console.print("; ".join(_BASIS[basis] for basis in bases), markup=False, highlight=False, soft_wrap=True)
    for line in left_out:
        console.print(f"Not predicted: {line}", markup=False, highlight=False, soft_wrap=True)


def as_text(explanation: Explanation) -> str:
    """The same, with all advice and torch's own message."""
    console = Console(record=True, width=100, file=io.StringIO())
    print_explanation(explanation, console, most=100)
    return f"{console.export_text()}\ntorch said: {explanation.message}\n"


def headline(explanation: Explanation) -> Iterable[str]:
    """Sentences: where, for what, and what the device had."""
    incident, counters = explanation.incident, explanation.incident.counters
    place = f"in {_phase(explanation.phase)} of step {explanation.step}"
    rank = f"rank {explanation.rank}, " if explanation.rank else ""
    yield f"Out of memory {place} ({rank}{explanation.device})"
    if incident.requested is not None:
        made = incident.module and f" in the forward of {incident.module}"
        node = incident.node and f" in autograd's {incident.node}"
        yield f"Asked for: {human_bytes(incident.requested)}{made or node or ''}{_for_what(explanation)}"
    elif incident.module:
        yield f"In the forward of {incident.module}"
    if counters is not None:
        yield (
            f"There were: {human_bytes(counters.available)}, of which {human_bytes(counters.allocated)} were allocated "
            f"and {human_bytes(counters.unused)} more reserved; outside of this process's allocator (CUDA context, "
            f"other processes) {human_bytes(counters.outside)} of the device's {human_bytes(counters.total)}"
        )
        if counters.unused > FRAGMENTED * max(1, counters.reserved):
            share = counters.unused / counters.reserved
            yield f"Fragmentation: {share:.0%} of what is reserved is not allocated"
        if explanation.moment is not None:
            unexplained = counters.allocated - explanation.moment.memory.tracked
            yield f"{human_bytes(unexplained)} of what was allocated no tensor below explains"


def _for_what(explanation: Explanation) -> str:
    if explanation.moment is not None:
        return f", for {_describe(explanation.moment.tensor)}"
    names = explanation.parameters
    if len(names) > 0:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f", the size of the parameter {names[0]}{more}: its optimizer state or its gradient"
    return ", the size of no tensor that the step is known to make" if explanation.basis else ""


def _nothing_helps(explanation: Explanation) -> str:
    if explanation.phase == "optimizer":
        return (
            "No change that was tried takes anything off the optimizer's step: what fills it is the model and its "
            "optimizer. Fewer parameters, an optimizer with less state, or sharding (FSDP) would."
        )
    assert explanation.advisory is not None
    tensors = explanation.advisory.breakdown.peak.tensors
    return f"No change that was tried takes 1 % off{f'; the largest is {_describe(tensors[0])}' if tensors else ''}"


def _phase(phase: str) -> str:
    return f"the {phase}" if phase in ("forward", "backward") else {
        "optimizer": "the optimizer's step", "step": "the training step", "validation": "validation",
    }.get(phase, phase)  # fmt: skip


def _what_basis(basis: str) -> str:
    step = "the step on fake tensors" if basis == "prediction" else "the last probed step"
    return f"at that moment, by {step}"


def _filling(memory: PhaseMemory, title: str) -> Table:
    table = _table(f"what filled memory {title}", "", "%", "largest")
    for name, size in list(memory.culprits.items())[:6]:
        share = size / max(1, memory.tracked)
        table.add_row(name, human_bytes(size), f"{share:.0%}", escape(_largest(memory, name)))
    return table


def _largest(memory: PhaseMemory, culprit: str) -> str:
    tensor = next((tensor for tensor in memory.tensors if tensor.culprit == culprit), None)
    return "" if tensor is None else _describe(tensor)


def _changes(advice: Sequence[Advice]) -> Table:
    limited = any(each.fits is not None for each in advice)
    table = _table("what to change, best first", "saves", "peak then", *(["fits"] if limited else []), "by")
    for number, each in enumerate(advice, start=1):
        fits = [{True: "yes", False: "no", None: "?"}[each.fits]] if limited else []
        sizes = human_bytes(each.saves), human_bytes(each.peak)
        table.add_row(f"{number}. {escape(each.change)}", *sizes, *fits, each.basis)
    return table


def _describe(tensor: TensorBytes) -> str:
    times = f"{tensor.count} x " if tensor.count > 1 else ""
    maker = tensor.operation.removeprefix("aten.").partition(".")[0]
    return f"{times}{list(tensor.shape)} {tensor.dtype}{f', {maker}' if maker else ''} in {tensor.module}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if column in ("largest", "by") else "right", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)
