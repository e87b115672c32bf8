"""The comparison as a table: the same columns for the terminal, the report and wandb."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from flash_train.comparison.plan import REFERENCE
from flash_train.comparison.results import Cell
from flash_train.comparison.text import human_bytes, human_count, human_ratio

_STATUS = {"oom": "OOM"}


def columns(cells: Sequence[Cell]) -> list[str]:
    """The headings; reserved memory only where an allocator reserves any."""
    reserved = ["reserved"] if _reserves(cells) else []
    return ["T", "attention", "peak", *reserved, f"of {REFERENCE}", "tokens/s", f"x {REFERENCE}", "loss"]


def body(cells: Sequence[Cell]) -> list[list[str]]:
    """One line of text per cell, in the order of `columns`; an arm that was not measured says why instead."""
    references = {cell.length: cell for cell in cells if cell.arm == REFERENCE}
    return [_line(cell, references.get(cell.length), reserved=_reserves(cells)) for cell in cells]


def print_table(cells: Sequence[Cell], console: Console) -> None:
    """The table in a terminal, a rule between one length and the next. It is never cut: what is no terminal, or a
    narrow one, gets the table's own width, and reserved memory stays in the files to keep that under 80 characters.
    """
    headings = columns(cells)
    shown = [index for index, heading in enumerate(headings) if heading != "reserved"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index in shown:
        side = "left" if headings[index] == "attention" else "right"
        table.add_column(headings[index], justify=side, no_wrap=True)
    following = [cell.length for cell in cells[1:]] + [None]
    for line, cell, after in zip(body(cells), cells, following, strict=True):
        table.add_row(*(line[index] for index in shown), end_section=cell.length != after)
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)


def _reserves(cells: Sequence[Cell]) -> bool:
    return any(cell.peak_reserved_bytes for cell in cells)


def _line(cell: Cell, reference: Cell | None, *, reserved: bool) -> list[str]:
    head = [f"{cell.length}", cell.arm]
    if cell.status != "ok":
        return [*head, _STATUS.get(cell.status, cell.status), *["" for _ in range(4 + reserved)]]
    memory = [human_bytes(cell.peak_allocated_bytes)] if cell.peak_allocated_bytes else ["-"]
    if reserved:
        memory.append(human_bytes(cell.peak_reserved_bytes) if cell.peak_reserved_bytes else "-")
    share = speed = "-"
    if reference and reference.peak_allocated_bytes and cell.peak_allocated_bytes:
        share = f"{100 * cell.peak_allocated_bytes / reference.peak_allocated_bytes:.0f} %"
    if reference and reference.tokens_per_second and cell.tokens_per_second:
        speed = human_ratio(cell.tokens_per_second / reference.tokens_per_second)
    tokens = human_count(cell.tokens_per_second) if cell.tokens_per_second else "-"
    loss = f"{cell.last_loss:.4f}" if cell.last_loss is not None else "-"
    return [*head, *memory, share, tokens, speed, loss]
