"""What runs now, what has run, how long it took and how long the rest will take."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flash_train.comparison.text import human_seconds


class Remaining:
    """Estimates the time of runs to come from those that ended: by length, as times mostly depend on it."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}

    def saw(self, length: int, seconds: float) -> None:
        self._seen.setdefault(length, []).append(seconds)

    def seconds(self, lengths: Sequence[int]) -> float | None:
        """For one run at each of `lengths`; None before the first run has ended. A length not seen yet is taken from
        the nearest one that was, in proportion.
        """
        return sum(self._one(length) for length in lengths) if self._seen else None

    def _one(self, length: int) -> float:
        nearest = min(self._seen, key=lambda seen: abs(seen - length))
        return sum(self._seen[nearest]) / len(self._seen[nearest]) * max(1.0, length / nearest)


class Display:
    """A progress bar under the lines of the runs that ended. It draws only when told to: the parent forks its
    children, which is safe as long as it has one thread.
    """

    def __init__(self, bar: Progress, *, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, left="")
        self._end: float | None = None

    def running(self, what: str, *, left: float | None) -> None:
        """`what` runs now; with all that follows it will take another `left` seconds, as far as is known."""
        self._bar.update(self._task, description=what)
        self._end = None if left is None else time.monotonic() + left

    def tick(self) -> None:
        left = None if self._end is None else max(0.0, self._end - time.monotonic())
        self._bar.update(self._task, left="" if left is None else f"about {human_seconds(left)} left")
        self._bar.refresh()

    def ended(self, line: str) -> None:
        self._bar.console.print(line, markup=False)
        self._bar.advance(self._task)
        self._bar.refresh()


@contextmanager
def display(console: Console, *, total: int) -> Iterator[Display]:
    """A `Display` for `total` runs, which disappears when they are done; the lines stay."""
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield Display(bar, total=total)
