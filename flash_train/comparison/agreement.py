"""Do the implementations train the same model? Their differences against the noise floor of an exact reordering."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flash_train.comparison.plan import REFERENCE, REORDERED
from flash_train.comparison.results import Row

GRADIENT_LIMIT = 2.0
LOSS_LIMIT = 3.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """An arm against the reference at one length. Gradient errors are relative to float64, losses in nats.

    `agrees` is None, and `why` says why, where a number is missing.
    """

    arm: str
    length: int
    gradient_error: float | None
    reference_gradient_error: float | None
    loss_difference: float | None
    loss_floor: float | None
    agrees: bool | None
    why: str | None

    @property
    def gradient_ratio(self) -> float | None:
        return _ratio(self.gradient_error, self.reference_gradient_error)

    @property
    def loss_ratio(self) -> float | None:
        return _ratio(self.loss_difference, self.loss_floor)


def loss_difference(one: Row, other: Row) -> float | None:
    """The largest difference between the losses of two runs at equal steps; None unless their steps are the same."""
    if not one.loss_curve or [step for step, _ in one.loss_curve] != [step for step, _ in other.loss_curve]:
        return None
    apart = np.subtract([loss for _, loss in one.loss_curve], [loss for _, loss in other.loss_curve])
    return float(np.abs(apart).max())  # NaN if one of them is, where Python's max would pass over it


def noise_floor(rows: Sequence[Row], length: int) -> float | None:
    """How far an exact reordering moves the loss: the reference against itself with the keys visited in reverse
    order, and against its own repeats; the larger of the two, and never less than the spacing of the recorded
    fp32 losses, below which no difference can be told. None where a run of the floor is missing.
    """
    reference = _find(rows, REFERENCE, length, 1)
    reversed_order, repeated = _find(rows, REORDERED, length, 1), _find(rows, REFERENCE, length, 2)
    if reference is None or reversed_order is None or repeated is None:
        return None
    differences = [loss_difference(reference, other) for other in (reversed_order, repeated)]
    measured = [difference for difference in differences if difference is not None]
    if len(measured) < len(differences):
        return None
    recorded = np.asarray([loss for _, loss in reference.loss_curve], dtype=np.float32)
    return float(np.max([*measured, np.spacing(np.abs(recorded)).max()]))


def judge(
    rows: Sequence[Row], *, arms: Sequence[str], lengths: Sequence[int], gradients: Mapping[int, Mapping[str, float]]
) -> list[Agreement]:
    """Each arm but the reference, and those that were refused, at each judged length.

    `gradients[length][arm]` are errors against float64.
    """
    left_out = {REFERENCE, REORDERED, *(row.arm for row in rows if row.status == "refused")}
    return [
        _judge_one(rows, arm, length, gradients.get(length, {}))
        for length in lengths
        for arm in arms
        if arm not in left_out
    ]


def _judge_one(rows: Sequence[Row], arm: str, length: int, gradients: Mapping[str, float]) -> Agreement:
    reference, candidate = _find(rows, REFERENCE, length, 1), _find(rows, arm, length, 1)
    floor = noise_floor(rows, length)
    difference = loss_difference(reference, candidate) if reference and candidate else None
    error, allowed = gradients.get(arm), gradients.get(REFERENCE)
    agrees = why = None
    if candidate is None:
        why = f"{arm} has no valid run at T={length}"
    elif difference is None or floor is None:
        why = f"no noise floor at T={length}: a run of {REFERENCE} or {REORDERED} is missing"
    elif error is None or allowed is None:
        why = f"no gradient check at T={length}"
    else:
        agrees = error <= GRADIENT_LIMIT * allowed and difference <= LOSS_LIMIT * floor
    return Agreement(
        arm=arm,
        length=length,
        gradient_error=error,
        reference_gradient_error=allowed,
        loss_difference=difference,
        loss_floor=floor,
        agrees=agrees,
        why=why,
    )


def _find(rows: Sequence[Row], arm: str, length: int, repeat: int) -> Row | None:
    wanted = (arm, length, repeat, "ok")
    return next((row for row in rows if (row.arm, row.length, row.repeat, row.status) == wanted), None)


def _ratio(number: float | None, unit: float | None) -> float | None:
    if number is None or unit is None:
        return None
    return number / unit if unit else (math.inf if number else 1.0)
