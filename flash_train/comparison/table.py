"""The comparison as a table: the same columns for the terminal, the report and wandb."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from flash_train.comparison.plan import REFERENCE
from flash_train.comparison.results import Cell
from flash_train.comparison.text import human_bytes, human_count, human_ratio

_STATUS = {"oom": "OOM"}


def columns(cells: Sequence[Cell]) -> list[str]:
    """The headings; reserved memory only where an allocator reserves any."""
    reserved = ["reserved"] if any(cell.peak_reserved_bytes for cell in cells) else []
    return ["T", "attention", "peak", *reserved, f"of {REFERENCE}", "tokens/s", f"x {REFERENCE}", "loss"]


def body(cells: Sequence[Cell]) -> list[list[str]]:
    """One line of text per cell, in the order of `columns`; an arm that was not measured says why instead."""
    references = {cell.length: cell for cell in cells if cell.arm == REFERENCE}
    reserved = any(cell.peak_reserved_bytes for cell in cells)
    return [_line(cell, references.get(cell.length), reserved=reserved) for cell in cells]


def terminal_table(cells: Sequence[Cell]) -> Table:
    """The table for a terminal, a rule between one length and the next."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns(cells):
        table.add_column(heading, justify="left" if heading == "attention" else "right", no_wrap=True)
    following = [cell.length for cell in cells[1:]] + [None]
    for line, cell, after in zip(body(cells), cells, following, strict=True):
        table.add_row(*line, end_section=cell.length != after)
    return table


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
