"""For each arm: how its need grows with T and with the rows, and the largest of both that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from flash_train.memory.cards import MIB
from flash_train.memory.curve import Curve
from flash_train.memory.predict import Prediction
from flash_train.planning.settings import Settings

Predict = Callable[[int, int], Prediction]
"""(rows, T) -> the prediction for one micro-batch of that size."""
Axis = Literal["length", "rows"]
WORST, SEGMENTS = 0.4, 256 * MIB
"""A share of the peak, and bytes above that: torch's allocator may keep so much beyond it. On an H200 it was 40 % in
the worst of 92 runs; of a small model it is a few segments and what cuBLAS has."""
SPARE = 64 * MIB
"""Left free in a replay: a run has a metric or two beside its step, and the context is not the same on every GPU."""


@dataclass(frozen=True, eq=False)
class Point:
    """One size of a micro-batch, and what it needs in bytes."""

    rows: int
    length: int
    needed: int
    fits: bool
    prediction: Prediction | None
    """None where the need was not predicted but lies on the polynomial through its neighbours."""
    replayed: bool = False
    """Whether the allocator's part was, and is no allowance."""


class ArmPlan:
    """One attention implementation's. A ValueError of the model or the attention is its `refusal`.

    `longest` is T with `rows` rows, `largest_batch` the rows of `length` tokens; None where not even the least fits.
    Of a prediction without a replay the allowance alone says what the allocator takes.
    """

    def __init__(self, arm: str, predict: Predict, settings: Settings) -> None:
        self.arm = arm
        self.refusal: str | None = None
        self.longest: int | None = None
        self.largest_batch: int | None = None
        self._settings = settings
        self._predict = predict
        self._known: dict[tuple[int, int], Prediction] = {}
        self._replayed: dict[tuple[int, int], int] = {}
        rows, length = settings.rows, settings.length
        self._curves: dict[Axis, Curve] = {
            "length": Curve(lambda T: self._smooth(rows, T), count=lambda T: self._needed(rows, T)),
            "rows": Curve(lambda B: self._smooth(B, length), count=lambda B: self._needed(B, length)),
        }
        budget, limit = settings.card.memory, settings.limit
        try:  # the first question about rows is that about T again
            self.longest = self._curves["length"].largest(
                budget, step=settings.length_step, first=length, limit=limit // rows
            )
            self.largest_batch = self._curves["rows"].largest(budget, step=1, first=rows, limit=limit // length)
        except ValueError as error:
            self.refusal = str(error)

    @property
    def questions(self) -> int:
        """How many steps were predicted."""
        return len(self._known)

    def point(self, axis: Axis, size: int) -> Point:
        """T = `size` tokens with the plan's rows, or `size` rows with the plan's tokens; nothing more is predicted."""
        curve = self._curves[axis]
        rows, length = (self._settings.rows, size) if axis == "length" else (size, self._settings.length)
        prediction, replayed = self._known.get((rows, length)), self._replayed.get((rows, length))
        estimate = prediction.needed(self._settings.allowance) if prediction else round(curve.estimate(size))
        needed = replayed or estimate
        fits = needed <= self._settings.card.memory
        return Point(rows, length, needed, fits, prediction, replayed is not None)

    def points(self, axis: Axis, sizes: Sequence[int] = ()) -> list[Point]:
        """Those of `sizes` and all that were predicted, in order."""
        return [self.point(axis, size) for size in sorted({*sizes, *self._curves[axis].points})]

    def top(self) -> Point:
        """The longest T that fits; the least T where nothing does."""
        return self.point("length", self.longest or self._settings.length_step)

    def predict(self, rows: int, length: int) -> Prediction:
        """For `rows` rows of `length` tokens; asked once."""
        if (rows, length) not in self._known:
            self._known[rows, length] = self._predict(rows, length)
        return self._known[rows, length]

    def _smooth(self, rows: int, length: int) -> int:
        """What lies on polynomials."""
        prediction = self.predict(rows, length)
        return round(prediction.smooth * (1 + self._settings.allowance)) + prediction.context

    def _needed(self, rows: int, length: int) -> int:
        """Replayed where it decides: where the peak alone fits, and what the allocator might take may be too much."""
        prediction, budget = self.predict(rows, length), self._settings.card.memory
        worst = prediction.needed(max(WORST, self._settings.allowance)) + SEGMENTS
        if prediction.replay is None or not prediction.needed(0) <= budget < worst:
            return prediction.needed(self._settings.allowance)
        if (rows, length) not in self._replayed:
            outside = prediction.context + SPARE
            reserved = prediction.replay.reserved(budget - outside)
            self._replayed[rows, length] = max(reserved, prediction.peak) + outside
        return self._replayed[rows, length]


def ladder(plans: Sequence[ArmPlan], settings: Settings, axis: Axis) -> list[int]:
    """The sizes of the table: those that were asked for, or powers of two until none of the arms fits any more."""
    if axis == "length" and settings.lengths:
        return list(settings.lengths)
    found = [plan.longest if axis == "length" else plan.largest_batch for plan in plans if plan.refusal is None]
    sizes = [512 if axis == "length" else 1]
    while sizes[-1] <= max((size or 0 for size in found), default=0):
        sizes.append(2 * sizes[-1])
    return sizes
