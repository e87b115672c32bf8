"""Processes that share one GPU, in which each one's peak is its own: as many at once as there is memory for."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import IO

_PAUSE = 0.05


@dataclass(frozen=True)
class Task:
    """A command that makes itself ready, waits for a line on its standard input, and then takes `size` bytes."""

    name: str
    command: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class Ended:
    """`code` is None where it was stopped after the time that it had."""

    name: str
    code: int | None
    output: str
    """What it printed, errors included."""
    seconds: float
    """Since it was told to go on."""


class _Process:
    def __init__(self, task: Task, output: IO[bytes]) -> None:
        self.task, self._output, self._begin = task, output, float("inf")
        self._process = subprocess.Popen(task.command, stdin=subprocess.PIPE, stdout=output, stderr=output)

    @property
    def holds(self) -> int:
        """Bytes of the budget, now."""
        return self.task.size if self._begin < float("inf") else 0

    def go_on(self) -> None:
        self._begin = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its exit code will say
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def ended(self, seconds: float) -> Ended | None:
        code, taken = self._process.poll(), max(0.0, time.monotonic() - self._begin)
        if code is None and taken < seconds:
            return None
        self.stop()
        self._output.seek(0)
        return Ended(self.task.name, code, self._output.read().decode(errors="replace"), taken)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def run_packed(tasks: Sequence[Task], *, budget: int, processes: int, seconds: float) -> Generator[Ended]:
    """Starts `tasks` in their order, `processes` at most at a time, and lets each go on as soon as the `budget` has
    room for it; one that is larger goes on alone. Gives each as it ends, stopped after its `seconds`. Whoever stops
    listening stops those that run.
    """
    waiting, started = list(tasks), list[_Process]()
    with contextlib.ExitStack() as files:
        try:
            while waiting or started:
                while waiting and len(started) < processes:
                    started.append(_Process(waiting.pop(0), files.enter_context(tempfile.TemporaryFile())))
                for each in started:
                    held = sum(other.holds for other in started)
                    if not each.holds and (not held or held + each.task.size <= budget):
                        each.go_on()
                for each in list(started):
                    if (ended := each.ended(seconds)) is not None:
                        started.remove(each)
                        yield ended
                time.sleep(_PAUSE if started else 0)
        finally:
            for each in started:
                each.stop()
