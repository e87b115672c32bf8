"""The comparison as a table: the same columns for the terminal, the report and wandb."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flash_train.comparison.plan import REFERENCE
from flash_train.comparison.results import Cell
from flash_train.comparison.text import human_bytes, human_count, human_ratio
from flash_train.memory.sizes import human_error

_STATUS = {"oom": "OOM"}
_PREDICTION = ("predicted", "error")


def columns(cells: Sequence[Cell]) -> list[str]:
    """The headings; reserved memory only where an allocator reserves any, predictions only where there are any."""
    memory = ["peak", *(["reserved"] if _reserves(cells) else []), *(_PREDICTION if _predicts(cells) else [])]
    return ["T", "attention", *memory, f"of {REFERENCE}", "tokens/s", f"x {REFERENCE}", "loss"]


def body(cells: Sequence[Cell]) -> list[list[str]]:
    """One line of text per cell, in the order of `columns`; an arm that was not measured says why instead."""
    references = {cell.length: cell for cell in cells if cell.arm == REFERENCE}
    reserves, predicts = _reserves(cells), _predicts(cells)
    return [_line(cell, references.get(cell.length), reserves=reserves, predicts=predicts) for cell in cells]


def print_table(cells: Sequence[Cell], console: Console) -> None:
    """The table in a terminal, a rule between one length and the next; predictions in one of their own. It is never
    cut: what is no terminal, or a narrow one, gets the table's own width, and reserved memory stays in the files to
    keep that under 80 characters.
    """
    _print(cells, console, [heading for heading in columns(cells) if heading not in ("reserved", *_PREDICTION)])
    if _predicts(cells):
        _print(cells, console, ["T", "attention", "predicted", "peak", "error"], title="Predicted and measured peaks")


def _print(cells: Sequence[Cell], console: Console, wanted: Sequence[str], *, title: str | None = None) -> None:
    headings = columns(cells)
    shown = [headings.index(heading) for heading in wanted]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for index in shown:
        side = "left" if headings[index] == "attention" else "right"
        table.add_column(headings[index], justify=side, no_wrap=True)
    following = [cell.length for cell in cells[1:]] + [None]
    for line, cell, after in zip(body(cells), cells, following, strict=True):
        table.add_row(*(line[index] for index in shown), end_section=cell.length != after)
    _show(table, console)


def print_lines(headings: Sequence[str], lines: Sequence[Sequence[str]], console: Console, *, title: str) -> None:
    """Lines of text in the same dress, the first column to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(escape(heading), justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    _show(table, console)


def _show(table: Table, console: Console) -> None:
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)


def _reserves(cells: Sequence[Cell]) -> bool:
    return any(cell.peak_reserved_bytes for cell in cells)


def _predicts(cells: Sequence[Cell]) -> bool:
    return any(cell.predicted_peak_bytes for cell in cells)


def _line(cell: Cell, reference: Cell | None, *, reserves: bool, predicts: bool) -> list[str]:
    head, error = [f"{cell.length}", cell.arm], cell.prediction_error_percent
    predicted = [_bytes(cell.predicted_peak_bytes), "-" if error is None else human_error(error)] if predicts else []
    if cell.status != "ok":
        reserved = [""] if reserves else []
        return [*head, _STATUS.get(cell.status, cell.status), *reserved, *predicted, *["" for _ in range(4)]]
    memory = [_bytes(cell.peak_allocated_bytes), *([_bytes(cell.peak_reserved_bytes)] if reserves else []), *predicted]
    share = speed = "-"
    if reference and reference.peak_allocated_bytes and cell.peak_allocated_bytes:
        share = f"{100 * cell.peak_allocated_bytes / reference.peak_allocated_bytes:.0f} %"
    if reference and reference.tokens_per_second and cell.tokens_per_second:
        speed = human_ratio(cell.tokens_per_second / reference.tokens_per_second)
    tokens = human_count(cell.tokens_per_second) if cell.tokens_per_second else "-"
    loss = f"{cell.last_loss:.4f}" if cell.last_loss is not None else "-"
    return [*head, *memory, share, tokens, speed, loss]


def _bytes(size: int | None) -> str:
    return human_bytes(size) if size else "-"
