"""A curve that costs a second a point: where to ask it, and what lies between."""

import math
from collections.abc import Callable

_APART = math.log(1.2)
"""Two points of an estimate are that far from each other, as a ratio."""


class Curve:
    """Bytes by a whole size (tokens, rows), never falling: a maximum of polynomials of the second degree at most.

    `curve(size)` asks `evaluate` and remembers; `curve.points` are the sizes that were asked, with their bytes.
    `count(size)`, if given, are the bytes that count against a budget, where these lie only near the polynomials.
    """

    def __init__(self, evaluate: Callable[[int], int], *, count: Callable[[int], int] | None = None) -> None:
        self._evaluate = evaluate
        self._count = count or self
        self.points: dict[int, int] = {}

    def __call__(self, size: int) -> int:
        if size not in self.points:
            self.points[size] = self._evaluate(size)
        return self.points[size]

    def estimate(self, size: int) -> float:
        """The polynomial through the nearest points, three if there are as many that lie apart, since rounding counts
        much between neighbours; where one piece ends and another begins, and far from all points, it is as good as
        that. ValueError without a point."""
        if not self.points:
            raise ValueError("an estimate needs a point: call the curve with a size first")
        near: list[int] = []
        for known in sorted(self.points, key=lambda known: abs(math.log(known / size))):
            if all(abs(math.log(known / other)) > _APART for other in near):
                near.append(known)
        near = near[:3]
        return sum(  # Lagrange's form
            self.points[x] * math.prod((size - other) / (x - other) for other in near if other != x) for x in near
        )

    def largest(self, budget: int, *, step: int, first: int, limit: int) -> int | None:
        """The largest multiple of `step`, `limit` at most, that needs no more than `budget`; None if not even `step`.

        It was asked, and the next multiple too (unless it is beyond the limit). The first question is about `first`,
        or near it; each other is put where the polynomial through the last answers crosses the budget, and, where that
        stops helping, more and more towards the middle of what the answer lies in.
        """
        limit -= limit % step
        fits, fails = 0, limit + step  # in which the answer lies: [fits, fails)
        size, slow = min(max(step, first // step * step), limit), 0
        while fails - fits > step:
            width, doubled = fails - fits, size >= 2 * fits
            counted = self._count(size)
            if counted <= budget:
                fits = size
            else:
                fails = size
            helped = 2 * (fails - fits) <= width or (counted <= budget and doubled)
            slow = max(0, slow - 1) if helped else slow + 1
            level = budget + self(size) - counted  # of the polynomials, if what counts lies as far from them there
            crossing, middle = int(self._crossing(level, fits, fails)), self._middle(fits, fails, limit)
            crossing = min(max(crossing, fits + step), fails - step)
            stride = step * 4 ** (slow - 2) if slow > 1 else 0
            size = crossing + max(-stride, min(stride, middle - crossing))
            size = min(max(size // step * step, fits + step), fails - step)
        return fits or None

    @staticmethod
    def _middle(fits: int, fails: int, limit: int) -> int:
        return 4 * fits if fails > limit and fits else (fits + fails) // 2

    def _crossing(self, budget: int, fits: int, fails: int) -> float:
        """Where the polynomial through the points next to [fits, fails) reaches the budget; at most 16 times
        beyond what was asked."""
        known = sorted(self.points)
        near = sorted(known, key=lambda x: min(abs(x - fits), abs(x - fails)))[:3]
        if len(near) == 1:
            return 2 * near[0] if fits else near[0] / 2
        (x0, y0), (x1, y1), *rest = ((x, self.points[x]) for x in sorted(near, reverse=True))
        slope = (y0 - y1) / (x0 - x1)
        curvature = 0.0
        if rest:
            x2, y2 = rest[0]
            curvature = max(0.0, (slope - (y1 - y2) / (x1 - x2)) / (x0 - x2))
        # y0 + slope (x - x0) + curvature (x - x0)(x - x1) = budget, in d = x - x0
        linear, constant = slope + curvature * (x0 - x1), y0 - budget
        if curvature * x0 > 1e-9 * abs(linear):
            found = x0 + (-linear + math.sqrt(max(0.0, linear**2 - 4 * curvature * constant))) / (2 * curvature)
        elif linear > 0:
            found = x0 - constant / linear
        else:
            found = 0.0 if constant > 0 else math.inf
        return min(found, 16.0 * known[-1])
