"""Peaks that flash-compare measured, to stand beside a plan's predictions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_train.comparison.plan import rows_per_micro_batch
from flash_train.memory.sizes import error_percent
from flash_train.planning.plan import ArmPlan

_SAME = ("model", "vocabulary_size", "vocabulary_multiple", "precision", "checkpointing", "loss")
_PHASES = ("forward", "backward", "optimizer")

Size = tuple[str, int, int]
"""(arm, rows, T)"""


@dataclass(frozen=True)
class Measured:
    """The highest training peak of an arm at one size of the micro-batch, beside its prediction. Sizes in bytes."""

    arm: str
    rows: int
    length: int
    peak: int
    predicted: int

    @property
    def error_percent(self) -> float:
        return error_percent(self.predicted, self.peak)


def read_results(path: Any, config: Mapping[str, Any]) -> dict[Size, int]:
    """Peaks in bytes in a comparison's results.json, or in that of its folder.

    Raises ValueError if there is none, if its runs were of another setting than `config`'s, or not on a GPU.
    """
    file = Path(str(path))
    file = file / "results.json" if file.is_dir() else file
    try:
        found = json.loads(file.read_text())
        _check_setting(path, found["config"], config)
        peaks: dict[Size, int] = {}
        for row in found["rows"]:
            if row["status"] == "ok" and (peak := _training_peak(row)):
                key = _size_of(row, found["config"])
                peaks[key] = max(peaks.get(key, 0), peak)
        on_cpu = any(row["device"] == "cpu" for row in found["rows"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"measured must be the results.json of a flash-compare, or its folder, got {path} ({error})"
        ) from error
    if on_cpu:
        raise ValueError(f"measured must be of runs on a GPU, which a plan is for, got {path}, whose ran on a CPU")
    return peaks


def _check_setting(path: Any, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in _SAME:
        if name in theirs and theirs[name] != ours[name]:
            raise ValueError(
                f"measured must be of the same setting, got {path}, where {_difference(name, theirs[name], ours[name])}"
                ": give the overrides of that comparison"
            )


def _difference(name: str, theirs: Any, ours: Any) -> str:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        inner = next(key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key))
        return _difference(f"{name}.{inner}", theirs.get(inner), ours.get(inner))
    return f"{name} is {theirs!r}, and here {ours!r}"


def _size_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> Size:
    rows = rows_per_micro_batch(
        row["length"], batch_size=config["data"]["batch_size"], micro_batch_tokens=config.get("micro_batch_tokens")
    )
    return row["arm"], rows, row["length"]


def beside(plans: Sequence[ArmPlan], peaks: Mapping[Size, int]) -> list[Measured]:
    """The peaks of the plans' arms, each with a prediction of just that size, by rows and T."""
    by_arm = {plan.arm: plan for plan in plans if plan.refusal is None}
    return [
        Measured(arm, rows, length, peak, by_arm[arm].predict(rows, length).peak)
        for (arm, rows, length), peak in sorted(peaks.items(), key=lambda item: (item[0][2], item[0][1]))
        if arm in by_arm
    ]


def _training_peak(row: Mapping[str, Any]) -> int | None:
    """What is predicted: of all but validation."""
    phases = [row.get(f"{phase}_peak_allocated_bytes") or 0 for phase in _PHASES]
    return max(phases) or row["peak_allocated_bytes"]
