"""Runs that take turns on one device, for `tests.training.benchmark`: StepClock is in each, Arm is the other side.

All are started together, take their first steps and then hold still, between two steps and with nothing in flight,
until the benchmark gives one of them its turn; so two arms are compared within seconds. One that waits for its turn
costs its memory. The two sides speak through a pipe, whose end also tells each that the other is no more.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import repeat
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Self

import lightning
import torch

from flash_train.commands.environment import describe_environment
from flash_train.diagnostics.clock import now
from flash_train.diagnostics.ledger import ledger_of

REPOSITORY = Path(__file__).parents[2]
FIRST_STEPS, UNTIMED_STEPS = 8, 2
"""Of a run before its first turn, compilation included, and of each turn before the steps that are timed."""


def steps_of(turns: Sequence[int]) -> int:
    """Of a whole run, whose turns have so many timed steps."""
    return FIRST_STEPS + sum(UNTIMED_STEPS + timed for timed in turns)


class Board:
    """The meters of a GPU, by NVML where nvidia-ml-py is installed; None is what nobody measures."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        if device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # a meter that is not there ends no run
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self._nvml = nvml

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def megahertz(self) -> float | None:
        """Of the multiprocessors, now."""
        return self._nvml and self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def _read(self, name: str, *arguments: Any) -> float | None:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


class StepClock(lightning.Callback):
    """Takes a run's turns, in the same way for every arm: as a callback, or called by a loop as each step ends.

    A step lasts from the end of the last one to its own, data, logging and callbacks included. On a GPU ends are
    events in the stream, read when the turn is over, so that nobody waits for the clock within a turn. The peak is
    the allocator's over the timed steps; where there is none, as on a CPU, it is None. Energy and power are of the
    whole turn, with its untimed steps.

    Args:
        turns: timed steps of each turn.
        channel: a file descriptor, the end of Arm's pipe. EOFError where Arm is no more when a turn is over.
    """

    def __init__(self, turns: Sequence[int], channel: int) -> None:
        self._turns, self._benchmark = tuple(turns), Connection(channel)
        self._untimed = False

    def begin(self, device: torch.device) -> None:
        self._device, self._ledger, self._board = device, ledger_of(device), Board(device)
        self._course = self._whole_run()
        next(self._course)

    def step_ends(self) -> None:
        next(self._course, None)

    # Where these yield, a step is taken

    def _whole_run(self) -> Iterator[None]:
        start = monotonic()
        yield
        self._synchronise()
        first = monotonic() - start
        yield from repeat(None, FIRST_STEPS - 1)
        self._synchronise()
        self._hold({"first_step_seconds": first, "environment": describe_environment(self._device)})
        for timed in self._turns:
            self._hold((yield from self._turn(timed)))

    def _turn(self, timed: int) -> Generator[None, None, dict[str, Any]]:
        began, joules = monotonic(), self._board.joules()
        self._untimed = True
        yield from repeat(None, UNTIMED_STEPS)
        self._untimed = False
        scope = self._ledger and self._ledger.open("timed steps")
        ends = [now(self._device)]
        for _ in range(timed):
            yield
            ends.append(now(self._device))
        peak = self._ledger.close(scope).allocated if self._ledger and scope else None
        megahertz = self._board.megahertz()  # the device is still at work
        self._synchronise()
        ended, joules_then = monotonic(), self._board.joules()
        used = None if joules is None or joules_then is None else joules_then - joules
        return {
            "step_ms": [1e3 * end.seconds_since(start) for start, end in zip(ends, ends[1:], strict=False)],
            "began": began,
            "ended": ended,
            "peak_bytes": peak,
            "joules_per_step": None if used is None else used / (UNTIMED_STEPS + timed),
            "watts": None if used is None else used / (ended - began),
            "megahertz": megahertz,
        }

    def _hold(self, said: dict[str, Any]) -> None:
        self._benchmark.send(said)
        self._benchmark.recv()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # As a callback, the last one of a step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step_ends()

    def disturbs_timing(self, step: int) -> bool:
        """SpeedMonitor asks: the wait for a turn is no part of training."""
        return self._untimed


class Arm:
    """A run in a process that leads a group of its own, all of which ends with this context.

    Args:
        command: what starts it, given the file descriptor that is StepClock's channel.
        folder: of the run, which writes result.json there; what it prints lies beside it, in a .log.
        environment: variables that differ from this process's.
        timeout: seconds in which it must be ready, take a turn, or end.
    """

    problem = ""
    """Why it failed, once it has."""
    seconds = 0.0
    """Of the whole process, once it has ended."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], folder: Path, environment: dict[str, str], timeout: float
    ) -> None:
        self._folder, self._printed, self._timeout = folder, folder.with_suffix(".log"), timeout
        self._start = monotonic()
        self._channel, theirs = Pipe()
        with theirs, self._printed.open("wb") as output:
            self._child = subprocess.Popen(
                command(theirs.fileno()), cwd=REPOSITORY, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._channel.close()

    def ready(self) -> dict[str, Any] | None:
        """What it says after its first steps; None: it failed."""
        return self._hear(max(0.0, self._start + self._timeout - monotonic()))

    def turn(self) -> dict[str, Any] | None:
        """Give it its next turn: what it says of it; None: it failed, now or before."""
        self.go_on()
        return self._hear(self._timeout)

    def go_on(self) -> None:
        with contextlib.suppress(OSError):  # that it is no more is heard
            self._channel.send(None)

    def end(self) -> dict[str, Any]:
        """What is in result.json, once the run has gone on to its end; {}: it failed, now or before."""
        if self.problem:
            return {}
        code, found = self._stop(self._timeout), self._written()
        if code == 0 and found.get("status") == "ok":
            return found
        self._fail(code)
        return {}

    def _hear(self, seconds: float) -> dict[str, Any] | None:
        if self.problem:
            return None
        try:
            if self._channel.poll(seconds):
                return self._channel.recv()
            self._fail(self._stop(0))
        except (EOFError, OSError):
            self._fail(self._stop(self._timeout))
        return None

    def _stop(self, seconds: float) -> int | None:
        """The exit code; None where it had to be killed when so much time had passed."""
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.__exit__()
            self.seconds = monotonic() - self._start

    def _fail(self, code: int | None) -> None:
        lines = [line for line in self._printed.read_text(errors="replace").splitlines() if line.strip()]
        why = self._written().get("error") or "".join(lines[-1:]) or "it said nothing"
        how = f"stopped after {self._timeout:g} s" if code is None else f"exit code {code}"
        self.problem = f"{how}: {why}"

    def _written(self) -> dict[str, Any]:
        file = self._folder / "result.json"
        return json.loads(file.read_text()) if file.is_file() else {}
