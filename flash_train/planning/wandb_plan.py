"""A plan in wandb: one run with its curves, what was measured beside them, its table, chart and files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flash_train.comparison.wandb_report import attempt, keep_files, line_chart, start_run, why_unusable
from flash_train.planning.measured import Measured
from flash_train.planning.output import verdict
from flash_train.planning.plan import ArmPlan, ladder
from flash_train.planning.settings import Settings

_GIB = 2**30
_LENGTH = "plan/sequence_length"


def try_to_log(
    folder: Path,
    plans: Sequence[ArmPlan],
    settings: Settings,
    files: Sequence[Path],
    console: Console,
    *,
    config: Mapping[str, Any],
    measured: Sequence[Measured] = (),
) -> None:
    """`log_plan`, or one line that says why not."""
    unusable = why_unusable()
    if unusable:
        console.print(f"wandb cannot be used ({unusable}); the results are written without it", markup=False)
    else:
        attempt(lambda: log_plan(folder, plans, settings, files, config=config, measured=measured), console)


def log_plan(
    folder: Path,
    plans: Sequence[ArmPlan],
    settings: Settings,
    files: Sequence[Path],
    *,
    config: Mapping[str, Any],
    measured: Sequence[Measured] = (),
) -> None:
    """Log one run with `job_type=plan`. Every metric is over T, in GiB: `plan/<arm>/needed_gib` (allowance and context
    included), and of as many rows `plan/<arm>/predicted_peak_gib` and `plan/<arm>/measured_peak_gib`.
    """
    import wandb

    able = [plan for plan in plans if plan.refusal is None]
    here = [x for x in measured if x.rows == settings.rows]
    with start_run(folder, config, job_type="plan", name=f"{config['name']} plan") as run:
        run.define_metric(_LENGTH)
        for plan in able:
            for metric in ("needed_gib", "predicted_peak_gib", "measured_peak_gib"):
                run.define_metric(f"plan/{plan.arm}/{metric}", step_metric=_LENGTH)
        for length, values in _by_length(able, settings, here).items():
            run.log({_LENGTH: length, **values})
        points = [
            (plan.arm, x.length, x.needed / _GIB)
            for plan in able
            for x in plan.points("length", ladder(able, settings, "length"))
        ]
        pictures = {f"plan/{file.stem}_chart": wandb.Image(str(file)) for file in files if file.suffix == ".png"}
        chart = {"plan/needed": line_chart(points, title="Memory needed (GiB) by sequence length")} if points else {}
        run.log({**chart, **pictures, **({"plan/measured": _table(measured)} if measured else {})})
        run.summary["plan/verdict"] = verdict(plans, settings)
        run.summary["plan/budget_gib"] = settings.card.memory / _GIB
        for plan in able:
            run.summary[f"plan/{plan.arm}/longest_length"] = plan.longest
            run.summary[f"plan/{plan.arm}/largest_batch"] = plan.largest_batch
        keep_files(run, files)


def _by_length(
    plans: Sequence[ArmPlan], settings: Settings, measured: Sequence[Measured]
) -> dict[int, dict[str, float]]:
    """Metrics by T, from short to long."""
    lines: dict[int, dict[str, float]] = {}
    for plan in plans:
        for point in plan.points("length", ladder(plans, settings, "length")):
            values = lines.setdefault(point.length, {})
            values[f"plan/{plan.arm}/needed_gib"] = point.needed / _GIB
            if point.prediction is not None:
                values[f"plan/{plan.arm}/predicted_peak_gib"] = point.prediction.peak / _GIB
    for x in measured:
        values = lines.setdefault(x.length, {})
        values[f"plan/{x.arm}/predicted_peak_gib"] = x.predicted / _GIB
        values[f"plan/{x.arm}/measured_peak_gib"] = x.peak / _GIB
    return dict(sorted(lines.items()))


def _table(measured: Sequence[Measured]) -> Any:
    import wandb

    columns: list[str | int] = ["arm", "rows", "length", "predicted_bytes", "measured_bytes", "error_percent"]
    lines: list[Any] = [[x.arm, x.rows, x.length, x.predicted, x.peak, x.error_percent] for x in measured]
    return wandb.Table(columns=columns, data=lines)
