"""One comparison from the first child to the last line: run, read, judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from flash_train.comparison.agreement import judge
from flash_train.comparison.children import Children
from flash_train.comparison.plan import Run, plan_runs
from flash_train.comparison.progress import Display, Remaining, display
from flash_train.comparison.results import Cell, Row, cells, row_from_result
from flash_train.comparison.runner import FINISHED, Job, Outcome, run_job
from flash_train.comparison.text import human_bytes, human_count, human_seconds
from flash_train.comparison.verdict import Verdict, conclude


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison found. `environment` and `data` (its provenance) are those of the first run that tells."""

    rows: tuple[Row, ...]
    cells: tuple[Cell, ...]
    verdict: Verdict
    environment: Mapping[str, Any]
    data: Mapping[str, Any]


def conduct(children: Children, console: Console) -> Comparison:
    """Run what has not finished yet, one process after the other, and judge the whole.

    Raises ValueError, before the first run, for lengths and batches that do not fit.
    """
    settings = children.settings
    runs = plan_runs(settings.arms, settings.lengths, repeats=settings.repeats, judged=settings.judged_lengths)
    jobs = [children.training_job(run) for run in runs]
    check = children.gradient_job() if settings.judged_lengths else None
    gradients: dict[int, dict[str, float]] = {}
    failures: list[str] = []
    with display(console, total=len(jobs) + (check is not None)) as bar:
        rows, told = _train(runs, jobs, bar)
        if check is not None and any(row.status == "ok" for row in rows):
            gradients, failures = _check_gradients(check, bar)
    found = cells(rows)
    agreements = judge(rows, arms=settings.arms, lengths=settings.judged_lengths, gradients=gradients)
    return Comparison(
        rows=tuple(rows),
        cells=tuple(found),
        verdict=conclude(rows, found, agreements, micro_batch_tokens=settings.micro_batch_tokens, failures=failures),
        environment=told.get("environment") or {},
        data=told.get("data") or {},
    )


def _train(runs: Sequence[Run], jobs: Sequence[Job], bar: Display) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the runs, and the first result that says where it was made.

    When every run of the shortest length fails, or the first two of them fail alike, the rest is not tried: what is
    wrong is wrong with all of them. An arm that is refused once is not tried again: no length changes what it takes.
    """
    rows: list[Row] = []
    told: dict[str, Any] = {}
    refused: dict[str, Row] = {}
    remaining = Remaining()
    for index, (run, job) in enumerate(zip(runs, jobs, strict=True)):
        failed = bool(rows) and all(row.status == "failed" for row in rows)
        alike = len(rows) > 1 and len({row.error for row in rows}) == 1
        if failed and (alike or run.length > runs[0].length):
            break
        if run.arm in refused:
            result = {"status": "refused", "error": refused[run.arm].error}
            rows.append(row_from_result(run, result, seconds=0.0, folder=refused[run.arm].folder))
            bar.ended(f"{run}: refused, as before")
            continue
        bar.running(str(run), left=remaining.seconds([later.length for later in runs[index:]]))
        outcome = run_job(job, tick=bar.tick)
        if not outcome.reused:
            remaining.saw(run.length, outcome.seconds)
        rows.append(row_from_result(run, outcome.result, seconds=outcome.seconds, folder=job.folder.name))
        told = told if told.get("environment") else outcome.result
        if rows[-1].status == "refused":
            refused[run.arm] = rows[-1]
        bar.ended(_line(rows[-1], outcome))
    return rows, told


def _check_gradients(job: Job, bar: Display) -> tuple[dict[int, dict[str, float]], list[str]]:
    """The errors by length and arm, and what went wrong otherwise than by running out of memory."""
    bar.running(job.name, left=None)
    outcome = run_job(job, tick=bar.tick)
    errors = {int(length): error for length, error in (outcome.result.get("gradient_errors") or {}).items()}
    status = outcome.result["status"]
    failed = "" if status == "ok" else f"{job.name} {status}: {outcome.result.get('error')}"
    bar.ended((failed or f"{job.name}: ready") + _took(outcome))
    return errors, [failed] if status not in FINISHED else []


def _line(row: Row, outcome: Outcome) -> str:
    """One line about a run that ended."""
    if row.status != "ok":
        what = "ran out of memory" if row.status == "oom" else f"{row.status}: {row.error}"
    else:
        loss = f"loss {row.loss_curve[-1][1]:.4f}" if row.loss_curve else "no loss"
        peak = human_bytes(row.peak_allocated_bytes) if row.peak_allocated_bytes else "no peak"
        speed = f"{human_count(row.tokens_per_second)} tokens/s" if row.tokens_per_second else "no speed"
        what = f"{peak}, {speed}, {loss}"
    return f"{row.name}: {what}{_took(outcome)}"


def _took(outcome: Outcome) -> str:
    return " (ran before)" if outcome.reused else f" ({human_seconds(outcome.seconds)})"
