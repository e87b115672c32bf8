"""What the runs measured, as rows: from the children's result.json to results.json and results.csv."""

import csv
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from flash_train.comparison.plan import Run
from flash_train.memory.sizes import error_percent

PHASES = ("forward", "backward", "optimizer", "validation")

# What an implementation may turn into and still be itself, by device; every other name stands for itself alone.
_SAME_METHOD: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("flash", "cuda"): ("hopper", "triton"),
    ("flash", "cpu"): ("tiled",),
    ("sdpa", "cuda"): ("sdpa_flash",),
    ("sdpa", "cpu"): ("sdpa_flash",),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Memory in bytes, times in milliseconds, losses in nats; None where nothing was measured.

    `status`: ok; oom (ran out of memory, `error` says where); refused (the implementation does not take what the model
    or the device asks of it, `error` says what); invalid (it ran, but not as the implementation that was asked for,
    `error` says why); failed (crashed, `error` says how).
    `memory_source`: allocator (the highest of all steps), or on a CPU profiler (the live tensors of one probed step).
    `predicted_peak_bytes`: of a training step, before the first one; `prediction_refusal` says why there is none. Its
    error is against the highest peak of training: validation, which may peak above it, is not predicted.
    `breakdown`: of the step that a MemoryProbe saw, else of the predicted one, as `Breakdown.to_json` gives it;
    `advice`: what would take less, as `memory.changes.Advice` has it.
    """

    arm: str
    length: int
    repeat: int
    measured: bool
    status: str
    error: str | None
    ran: str | None
    device: str | None
    memory_source: str | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    predicted_peak_bytes: int | None
    prediction_error_percent: float | None
    prediction_refusal: str | None
    forward_peak_allocated_bytes: int | None
    backward_peak_allocated_bytes: int | None
    optimizer_peak_allocated_bytes: int | None
    validation_peak_allocated_bytes: int | None
    alloc_retries: int | None
    outside_resets: int | None
    tokens_per_second: float | None
    step_ms: float | None
    mfu_percent: float | None
    data_wait_percent: float | None
    parameters: int | None
    commit: str | None
    initial_weights_sha256: str | None
    data_sha256: str | None
    seconds: float
    loss_curve: tuple[tuple[int, float], ...]
    folder: str
    breakdown: dict[str, Any] | None
    advice: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return str(Run(arm=self.arm, length=self.length, repeat=self.repeat))

    @property
    def training_peak_bytes(self) -> int | None:
        """The highest of what is predicted: of all but validation."""
        phases = (
            self.forward_peak_allocated_bytes,
            self.backward_peak_allocated_bytes,
            self.optimizer_peak_allocated_bytes,
        )
        return max((phase for phase in phases if phase), default=self.peak_allocated_bytes)


def row_from_result(run: Run, result: dict[str, Any], *, seconds: float, folder: str) -> Row:
    """The row of a run whose child left `result` (the schema of flash-train's result.json)."""
    memory, speed = result.get("memory") or {}, result.get("speed") or {}
    device = (result.get("device") or "").partition(":")[0] or None
    phases, attention = memory.get("phases") or {}, result.get("attention") or {}
    status, error = result["status"], result.get("error")
    if status == "interrupted":
        status, error = "failed", error or "interrupted"
    rewritten = result.get("rewritten_by_compiler") or 0
    invalid = substitution(run.arm, device, attention, rewritten) if status == "ok" else None
    return Row(
        arm=run.arm,
        length=run.length,
        repeat=run.repeat,
        measured=run.measured,
        status="invalid" if invalid else status,
        error=invalid or error,
        ran=attention.get("ran"),
        device=device,
        memory_source=memory.get("source"),
        peak_allocated_bytes=memory.get("peak_allocated_bytes"),
        peak_reserved_bytes=memory.get("peak_reserved_bytes"),
        predicted_peak_bytes=memory.get("predicted_bytes"),
        prediction_error_percent=memory.get("prediction_error_percent"),
        prediction_refusal=memory.get("prediction_refusal"),
        forward_peak_allocated_bytes=phases.get("forward"),
        backward_peak_allocated_bytes=phases.get("backward"),
        optimizer_peak_allocated_bytes=phases.get("optimizer"),
        validation_peak_allocated_bytes=phases.get("validation"),
        alloc_retries=memory.get("alloc_retries"),
        outside_resets=memory.get("outside_resets"),
        tokens_per_second=speed.get("tokens_per_second"),
        step_ms=speed.get("step_ms"),
        mfu_percent=speed.get("mfu_percent"),
        data_wait_percent=speed.get("data_wait_percent"),
        parameters=result.get("parameters"),
        commit=(result.get("environment") or {}).get("git_commit"),
        initial_weights_sha256=result.get("initial_weights_sha256"),
        data_sha256=_sha256(result.get("data")),
        seconds=seconds,
        loss_curve=tuple((int(step), float(loss)) for step, loss in result.get("loss_curve") or ()),
        folder=folder,
        breakdown=result.get("probe") or memory.get("prediction"),
        advice=tuple(memory.get("advice") or ()),
    )


def _sha256(provenance: dict[str, Any] | None) -> str | None:
    """One hash of all that a data module says about where its tokens come from and which batches come first."""
    if provenance is None:
        return None
    return hashlib.sha256(json.dumps(provenance, sort_keys=True).encode()).hexdigest()


def substitution(asked: str, device: str | None, attention: dict[str, Any], rewritten: int) -> str | None:
    """Why a run is no measurement of `asked`: something else ran, or the compiler rewrote it; None if it is one.

    `attention` is result.json's record of what ran; `rewritten` counts the attentions that Inductor made SDPA of.
    """
    ran = attention.get("ran")
    if ran is not None and ran not in _SAME_METHOD.get((asked, device), (asked,)):
        reason = attention.get("reason")
        return f"{asked} was asked for and {ran} ran" + (f": {reason}" if reason else "")
    if rewritten:
        return f"the compiler rewrote the attention into SDPA in {rewritten} places"
    return None


def unequal_starts(rows: Iterable[Row]) -> list[str]:
    """One sentence for each length whose runs did not start from the same weights or read the same data."""
    problems = []
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        by_length.setdefault(row.length, []).append(row)
    for length, group in sorted(by_length.items()):
        for what, attribute in (("initial weights", "initial_weights_sha256"), ("data", "data_sha256")):
            known = [row for row in group if getattr(row, attribute) is not None]
            other = next((row for row in known if getattr(row, attribute) != getattr(known[0], attribute)), None)
            if other is not None:
                problems.append(
                    f"The comparison is invalid: at T={length}, {known[0].name} and {other.name} "
                    f"did not have the same {what}."
                )
    return problems


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All repeats of an implementation at a length: the largest peak, the median speed and the range around it.

    A peak is predicted once, also of what then runs out of memory; its error is that of the largest measured one.
    """

    arm: str
    length: int
    status: str
    error: str | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    predicted_peak_bytes: int | None
    prediction_error_percent: float | None
    tokens_per_second: float | None
    slowest: float | None
    fastest: float | None
    step_ms: float | None
    last_loss: float | None


def cells(rows: Iterable[Row]) -> list[Cell]:
    """One cell for each arm and length, in the order of the rows; one repeat that is not ok decides its status."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row.measured:
            groups.setdefault((row.length, row.arm), []).append(row)
    return [_cell(group) for group in groups.values()]


def _cell(group: Sequence[Row]) -> Cell:
    worst = next((row for row in group if row.status != "ok"), group[0])
    good = [row for row in group if row.status == "ok"] if worst.status == "ok" else []
    speeds = [row.tokens_per_second for row in good if row.tokens_per_second is not None]
    times = [row.step_ms for row in good if row.step_ms is not None]
    predicted = next((row.predicted_peak_bytes for row in group if row.predicted_peak_bytes), None)
    measured = max((row.training_peak_bytes or 0 for row in good), default=0)
    return Cell(
        arm=worst.arm,
        length=worst.length,
        status=worst.status,
        error=worst.error,
        peak_allocated_bytes=max((row.peak_allocated_bytes or 0 for row in good), default=0) or None,
        peak_reserved_bytes=max((row.peak_reserved_bytes or 0 for row in good), default=0) or None,
        predicted_peak_bytes=predicted,
        prediction_error_percent=error_percent(predicted, measured) if predicted and measured else None,
        tokens_per_second=median(speeds) if speeds else None,
        slowest=min(speeds, default=None),
        fastest=max(speeds, default=None),
        step_ms=median(times) if times else None,
        last_loss=good[0].loss_curve[-1][1] if good and good[0].loss_curve else None,
    )


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document`; numbers that JSON cannot hold (NaN, infinities) become null."""
    path.write_text(json.dumps(_plain(document), indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write one line per row; the loss curve, the breakdown and the advice stay in results.json."""
    nested = ("loss_curve", "breakdown", "advice")
    names = [field.name for field in fields(Row) if field.name not in nested] + ["last_loss"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            last_loss = row.loss_curve[-1][1] if row.loss_curve else None
            writer.writerow({**asdict(row), "last_loss": last_loss})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
