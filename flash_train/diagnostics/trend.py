"""Growth that goes on, told from noise, from steps up and from what levels off."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

_READINGS = 16
_GROUPS = 4
_SCALES = 5
_COARSER = 4


@dataclass(frozen=True)
class Growth:
    """Memory that grows steadily."""

    slope: float
    """Bytes a step."""
    since: int
    """The step in which it began, as far back as readings go."""
    step: int
    """Of the last reading."""
    size: int
    """Bytes then."""


class Trend:
    """Judges readings of bytes as they come: `add` returns the growth once there is one.

    The last 16 readings are looked at, and of every 4th, 16th, 64th and 256th reading the last 16 as well, so that fast
    growth is seen soon and slow growth in the end. The slope is Theil and Sen's, the median of all pairs' slopes. It
    is growth if it is at least `least` bytes a step, four of five readings are above the one before (what keeps the
    largest so far seldom is), from each quarter of the readings to the next there is at least two thirds of it (a step
    up and what levels off have a quarter without), and what it adds up to is at least four standard deviations of the
    readings around it.
    """

    def __init__(self, *, least: int) -> None:
        self._least = least
        self._scales: list[deque[tuple[int, int]]] = [deque(maxlen=_READINGS) for _ in range(_SCALES)]
        self._number = 0
        self._first: tuple[int, int] | None = None

    def add(self, step: int, size: int) -> Growth | None:
        """`size` bytes at `step`, which are more than before."""
        self._first = self._first or (step, size)
        found = None
        for power, readings in enumerate(self._scales):
            if self._number % _COARSER**power == 0:
                readings.append((step, size))
                found = found or self._judge(readings)
        self._number += 1
        return found

    @property
    def slope(self) -> float | None:
        """Bytes a step over the last 16 readings; None before there are as many."""
        return slope(self._scales[0]) if len(self._scales[0]) == _READINGS else None

    def _judge(self, readings: Sequence[tuple[int, int]]) -> Growth | None:
        if len(readings) < _READINGS:
            return None
        rate = slope(readings)
        if rate < self._least or not (_mostly_up(readings) and _everywhere(readings, rate) and _clear(readings, rate)):
            return None
        step, size = readings[-1]
        assert self._first is not None
        # Where a line back meets what there was in the beginning: before that, it did not grow.
        began = step - (size - self._first[1]) / rate
        return Growth(rate, max(self._first[0], round(began)), step, size)


def slope(readings: Sequence[tuple[int, int]]) -> float:
    """Theil and Sen's estimate, in bytes a step: as many as a quarter of the readings may be anything."""
    return statistics.median(
        (later - size) / (after - step) for (step, size), (after, later) in combinations(readings, 2)
    )


def _mostly_up(readings: Sequence[tuple[int, int]]) -> bool:
    ups = [later > size for (_, size), (_, later) in pairwise(readings)]
    return sum(ups) >= 4 / 5 * len(ups)


def _everywhere(readings: Sequence[tuple[int, int]], rate: float) -> bool:
    length = _READINGS // _GROUPS
    ordered = list(readings)
    groups = [ordered[at : at + length] for at in range(0, _READINGS, length)]
    middles = [tuple(statistics.median(values) for values in zip(*group, strict=True)) for group in groups]
    return all(later - size >= 2 / 3 * rate * (after - step) for (step, size), (after, later) in pairwise(middles))


def _clear(readings: Sequence[tuple[int, int]], rate: float) -> bool:
    above = [size - rate * step for step, size in readings]
    middle = statistics.median(above)
    deviation = 1.2533 * statistics.fmean(abs(value - middle) for value in above)  # a normal distribution's
    return rate * (readings[-1][0] - readings[0][0]) >= 4 * deviation
