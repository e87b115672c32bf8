"""A plan as tables in the terminal, results.json and results.csv."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flash_train.comparison.results import write_json
from flash_train.comparison.text import human_bytes, human_ratio
from flash_train.memory.live import CATEGORIES, Block
from flash_train.memory.sizes import human_error
from flash_train.planning.charts import draw_plan
from flash_train.planning.measured import Measured
from flash_train.planning.plan import ArmPlan, Axis, Point, ladder
from flash_train.planning.settings import Settings

MARKS = (
    "~ not predicted, but on the polynomial through its neighbours; * more than the budget; allowance: what torch's "
    "allocator takes beyond the peak, by a replay of its rules near the budget, elsewhere by a share of the peak; "
    "uncut: rests of blocks that are too small for it to cut off"
)
PARTS = (*CATEGORIES, "cuBLAS", "uncut", "allowance", "context")
_COLUMNS = ("arm", "rows", "length", "needed_bytes", "peak_bytes", "predicted", "replayed", "fits", "phase",
            *(f"{part.replace(' ', '_')}_bytes" for part in PARTS))  # fmt: skip
_LARGEST = 20


def print_plan(
    plans: Sequence[ArmPlan],
    settings: Settings,
    console: Console,
    *,
    setting: str,
    measured: Sequence[Measured] = (),
) -> None:
    """What each arm needs by T and by rows, the largest that fit, what fills the memory there, and what was
    `measured`."""
    console.print(f"{setting}; {human_bytes(settings.card.memory)}", markup=False)
    able = [plan for plan in plans if plan.refusal is None]
    if able:
        _print_needs(able, settings, console, "length", f"Needed by T, {count(settings.rows)} in a micro-batch")
        _print_needs(able, settings, console, "rows", f"Needed by rows in a micro-batch, T = {settings.length:,}")
        _print_answers(able, settings, console)
        for plan in able:
            console.print(f"{plan.arm}, largest tensors: {'; '.join(_most(plan.top()))}", markup=False)
    for plan in plans:
        if plan.refusal is not None:
            console.print(f"{plan.arm}: refused: {plan.refusal}", markup=False)
    console.print(MARKS, markup=False)
    if measured:
        _print_measured(measured, console)
        if all(x.rows != settings.rows for x in measured):
            rows = sorted({x.rows for x in measured})
            console.print(
                f"the chart is of rows={settings.rows}, and was measured of {', '.join(map(str, rows))}", markup=False
            )


def _print_measured(measured: Sequence[Measured], console: Console) -> None:
    table = Table(title="Predicted and measured peaks", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("T", "rows", "arm", "predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for x in measured:
        sizes = human_bytes(x.predicted), human_bytes(x.peak), human_error(x.error_percent)
        table.add_row(f"{x.length:,}", f"{x.rows:,}", x.arm, *sizes)
    _print(table, console)


def _print_needs(plans: Sequence[ArmPlan], settings: Settings, console: Console, axis: Axis, title: str) -> None:
    table = _table(title, "T" if axis == "length" else "rows", plans)
    for size in ladder(plans, settings, axis):
        table.add_row(f"{size:,}", *(_need(plan.point(axis, size)) for plan in plans))
    _print(table, console)


def _need(point: Point) -> str:
    return ("~" if point.prediction is None else "") + human_bytes(point.needed) + (" " if point.fits else "*")


def _print_answers(plans: Sequence[ArmPlan], settings: Settings, console: Console) -> None:
    table = _table(f"What fits, and what fills it at the longest T ({count(settings.rows)})", "", plans)
    table.add_row("longest T", *(f"{plan.longest:,}" if plan.longest else "none" for plan in plans))
    most = (f"{plan.largest_batch:,}" if plan.largest_batch else "none" for plan in plans)
    table.add_row(f"most rows of {settings.length:,}", *most)
    table.add_section()
    points = [plan.top() for plan in plans]
    table.add_row("the peak is in the", *(p.prediction.phase if p.prediction else "-" for p in points))
    for part in PARTS:
        sizes = [parts_of(point).get(part, 0) for point in points]
        if any(sizes):
            pairs = zip(sizes, points, strict=True)
            table.add_row(part, *(f"{human_bytes(size)} {100 * size / x.needed:3.0f} %" for size, x in pairs))
    _print(table, console)


def _most(point: Point) -> list[str]:
    """The tensors that take most together, equal ones as one."""
    blocks = point.prediction.blocks if point.prediction else ()
    alike = Counter((block.size, block.shape, block.dtype, _maker(block)) for block in blocks)
    found = sorted(alike.items(), key=lambda item: -item[1] * item[0][0])[:3]
    return [
        f"{f'{number} x ' if number > 1 else ''}{human_bytes(size)} {list(shape)} {_name(dtype)} ({maker})"
        for (size, shape, dtype, maker), number in found
    ]


def _maker(block: Block) -> str:
    return block.operation.removeprefix("aten.").partition(".")[0] or block.category


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def parts_of(point: Point) -> dict[str, int]:
    """Bytes by part, which add up to what is needed; {} where it was not predicted."""
    prediction = point.prediction
    if prediction is None:
        return {}
    allowance = point.needed - prediction.peak - prediction.context
    return prediction.categories | {"allowance": allowance, "context": prediction.context}


def verdict(plans: Sequence[ArmPlan], settings: Settings) -> str:
    """One sentence: how far the arm with the longest T goes, and how much further than the others."""
    able = [plan for plan in plans if plan.longest]
    if all(plan.refusal for plan in plans):
        return "every arm refuses this model"
    if not able:
        return f"nothing fits {human_bytes(settings.card.memory)}: even T = {settings.length_step} needs more"
    longest = max(plan.longest or 0 for plan in able)
    best = [plan.arm for plan in able if plan.longest == longest]
    others = (
        f"{human_ratio(longest / (plan.longest or 1))} as far as {plan.arm}" for plan in able if plan.arm not in best
    )
    return ", ".join((f"{' and '.join(best)} {'fits' if len(best) == 1 else 'fit'} T = {longest:,}", *others))


def count(rows: int) -> str:
    """ "1 row", "2 rows"."""
    return f"{rows:,} {'row' if rows == 1 else 'rows'}"


def _table(title: str, first: str, plans: Sequence[ArmPlan]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for plan in plans:
        table.add_column(plan.arm, justify="right", no_wrap=True)
    return table


def _print(table: Table, console: Console) -> None:
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)


def write_files(
    folder: Path,
    plans: Sequence[ArmPlan],
    settings: Settings,
    *,
    setting: str,
    facts: Mapping[str, Any],
    measured: Sequence[Measured] = (),
) -> list[Path]:
    """Write all files into `folder`; numbers first, so that no chart can lose them. The files."""
    files = [folder / name for name in ("results.json", "results.csv", "memory.png")]
    lines = {plan.arm: list(_lines(plan, plans, settings)) for plan in plans}
    write_json(
        files[0],
        {
            **facts,
            "budget_bytes": settings.card.memory,
            "card": settings.card.name or None,
            "capability": list(settings.card.capability),
            "allowance": settings.allowance,
            "arms": {plan.arm: _document(plan, lines[plan.arm]) for plan in plans},
            "measured": [
                {
                    "arm": x.arm,
                    "rows": x.rows,
                    "length": x.length,
                    "measured_peak_bytes": x.peak,
                    "predicted_peak_bytes": x.predicted,
                    "error_percent": x.error_percent,
                }
                for x in measured
            ],
        },
    )
    with files[1].open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([line[column] for column in _COLUMNS] for own in lines.values() for line in own)
    able = [plan for plan in plans if plan.refusal is None]
    if not able:
        return files[:2]
    parts = {plan.arm: parts_of(plan.top()) for plan in able}
    draw_plan(files[2], able, settings, setting=setting, parts=parts, measured=measured)
    return files


def _document(plan: ArmPlan, lines: list[dict[str, Any]]) -> dict[str, Any]:
    prediction = None if plan.refusal else plan.top().prediction
    return {
        "refusal": plan.refusal,
        "longest_length": plan.longest,
        "largest_batch": plan.largest_batch,
        "steps_predicted": plan.questions,
        "points": lines,
        "largest_tensors": [
            {"bytes": block.size, "shape": list(block.shape), "dtype": _name(block.dtype), "category": block.category,
             "operation": block.operation, "module": block.module, "phase": block.phase}
            for block in (prediction.blocks[:_LARGEST] if prediction else ())
        ],
    }  # fmt: skip


def _lines(plan: ArmPlan, plans: Sequence[ArmPlan], settings: Settings) -> Iterator[dict[str, Any]]:
    if plan.refusal is not None:
        return
    axes: tuple[Axis, Axis] = ("length", "rows")
    points = {(x.rows, x.length): x for axis in axes for x in plan.points(axis, ladder(plans, settings, axis))}
    for point in points.values():
        parts = parts_of(point)
        yield {
            "arm": plan.arm,
            "rows": point.rows,
            "length": point.length,
            "needed_bytes": point.needed,
            "peak_bytes": point.prediction.peak if point.prediction else None,
            "predicted": point.prediction is not None,
            "replayed": point.replayed,
            "fits": point.fits,
            "phase": point.prediction.phase if point.prediction else None,
            **{f"{part.replace(' ', '_')}_bytes": parts.get(part, 0) if parts else None for part in PARTS},
        }
