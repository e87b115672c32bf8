"""For each arm: how its need grows with T and with the rows, and the largest of both that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from flash_train.memory.curve import Curve
from flash_train.memory.predict import Prediction
from flash_train.planning.settings import Settings

Predict = Callable[[int, int], Prediction]
"""(rows, T) -> the prediction for one micro-batch of that size."""
Axis = Literal["length", "rows"]


@dataclass(frozen=True, eq=False)
class Point:
    """One size of a micro-batch, and what it needs in bytes."""

    rows: int
    length: int
    needed: int
    fits: bool
    prediction: Prediction | None
    """None where the need was not predicted but lies on the polynomial through its neighbours."""


class ArmPlan:
    """One attention implementation's. A ValueError of the model or the attention is its `refusal`.

    `longest` is T with `rows` rows, `largest_batch` the rows of `length` tokens; None where not even the least fits.
    """

    def __init__(self, arm: str, predict: Predict, settings: Settings) -> None:
        self.arm = arm
        self.refusal: str | None = None
        self.longest: int | None = None
        self.largest_batch: int | None = None
        self._settings = settings
        self._predict = predict
        self._known: dict[tuple[int, int], Prediction] = {}
        self._curves: dict[Axis, Curve] = {
            "length": Curve(lambda length: self._needed(settings.rows, length)),
            "rows": Curve(lambda rows: self._needed(rows, settings.length)),
        }
        budget, limit = settings.card.memory, settings.limit
        try:
            self.longest = self._curves["length"].largest(
                budget, step=settings.length_step, first=1024, limit=limit // settings.rows
            )
            self.largest_batch = self._curves["rows"].largest(budget, step=1, first=2, limit=limit // settings.length)
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
        needed = curve.points.get(size, round(curve.estimate(size)))
        return Point(rows, length, needed, needed <= self._settings.card.memory, self._known.get((rows, length)))

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

    def _needed(self, rows: int, length: int) -> int:
        return self.predict(rows, length).needed(self._settings.allowance)


def ladder(plans: Sequence[ArmPlan], settings: Settings, axis: Axis) -> list[int]:
    """The sizes of the table: those that were asked for, or powers of two until none of the arms fits any more."""
    if axis == "length" and settings.lengths:
        return list(settings.lengths)
    found = [plan.longest if axis == "length" else plan.largest_batch for plan in plans if plan.refusal is None]
    sizes = [512 if axis == "length" else 1]
    while sizes[-1] <= max((size or 0 for size in found), default=0):
        sizes.append(2 * sizes[-1])
    return sizes
