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
    """A command, and the bytes that it is given while it runs."""

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


class _Running:
    def __init__(self, task: Task, output: IO[bytes]) -> None:
        self.task, self._output, self._begin = task, output, time.monotonic()
        self._process = subprocess.Popen(task.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def ended(self, seconds: float) -> Ended | None:
        code, taken = self._process.poll(), time.monotonic() - self._begin
        if code is None and taken < seconds:
            return None
        self.stop()
        self._output.seek(0)
        return Ended(self.task.name, code, self._output.read().decode(errors="replace"), taken)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def run_packed(tasks: Sequence[Task], *, budget: int, processes: int, seconds: float) -> Generator[Ended]:
    """Starts `tasks` in their order, but each as soon as the `budget` has room for it, `processes` at most at a time;
    one that is larger runs alone. Gives each as it ends, stopped after its `seconds`. Whoever stops listening stops
    those that run.
    """
    waiting, running = list(tasks), list[_Running]()
    with contextlib.ExitStack() as files:
        try:
            while waiting or running:
                for task in list(waiting):
                    used = sum(each.task.size for each in running)
                    if len(running) < processes and (not running or used + task.size <= budget):
                        waiting.remove(task)
                        running.append(_Running(task, files.enter_context(tempfile.TemporaryFile())))
                for each in list(running):
                    if (ended := each.ended(seconds)) is not None:
                        running.remove(each)
                        yield ended
                time.sleep(_PAUSE if running else 0)
        finally:
            for each in running:
                each.stop()
