"""Two ways to measure peaks by phase: an accelerator's allocator keeps a mark, a CPU's does not."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from flash_train.diagnostics.cpu_peak import PeakProbe
from flash_train.diagnostics.ledger import PeakLedger, Scope

logger = logging.getLogger(__name__)

_FIRST, _EVERY = 5, 10
"""Steps in which phases are followed unless somebody chooses: the first of a run, where states and caches are made, and
one of so many after them."""


class Meter(Protocol):
    """Follows the phases of training. Steps are numbered as Lightning logs them."""

    source: str

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it ends."""
        ...

    def leave(self) -> None:
        """No phase from here on."""
        ...

    def step_begins(self, step: int, held: Callable[[], list[Any]]) -> None:
        """Before the first batch of a step; `held` gives the objects whose tensors are alive."""
        ...

    def step_ends(self, step: int) -> None:
        """After the last batch of a step."""
        ...

    def validation_batch_begins(self, held: Callable[[], list[Any]]) -> None:
        """Before each validation batch."""
        ...

    def validation_batch_ends(self) -> None:
        """After each validation batch."""
        ...

    def validation_ends(self) -> None:
        """After the last validation batch and what follows it."""
        ...

    def collect(self) -> dict[str, int]:
        """Bytes since the last call (profiler: so far): `allocated`, `reserved`, phases by name; `retries` in all."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class AllocatorMeter:
    """Peaks of all that happens, phase by phase, from the allocator's own mark."""

    source = "allocator"

    def __init__(
        self, ledger: PeakLedger, *, phases_every: int | None = 1, first_step: int = 0, window: int = 0
    ) -> None:
        self._ledger = ledger
        # None: as MemoryMonitor says; among `window` steps one is followed.
        self._phases_every = phases_every or min(_EVERY, window or _EVERY)
        self._all_before = first_step + _FIRST if phases_every is None else first_step
        self._follows = True
        self._retries = ledger.fold().retries
        self._resets_before = ledger.outside_resets
        self._window = ledger.open("window")
        self._phase: Scope | None = None
        self._phases: dict[str, int] = {}

    @property
    def outside_resets(self) -> int:
        """How often somebody else reset the marks that this meter reads."""
        return self._ledger.outside_resets - self._resets_before

    def enter(self, phase: str) -> None:
        if not self._follows:
            return
        ended = self._phase
        self._phase = self._ledger.open(phase, closing=ended)
        self._keep(ended)

    def leave(self) -> None:
        if self._phase is not None:
            self._keep(self._ledger.close(self._phase))
            self._phase = None

    def _keep(self, ended: Scope | None) -> None:
        if ended is not None:
            self._phases[ended.name] = max(self._phases.get(ended.name, 0), ended.allocated)

    def step_begins(self, step: int, held: Callable[[], list[Any]]) -> None:
        self._follows = step < self._all_before or step % self._phases_every == 0

    def step_ends(self, step: int) -> None:
        self._follows = True

    def validation_batch_begins(self, held: Callable[[], list[Any]]) -> None:
        if self._phase is None:
            self.enter("validation")

    def validation_batch_ends(self) -> None:
        pass

    def validation_ends(self) -> None:
        self.leave()

    def collect(self) -> dict[str, int]:
        retries = self._ledger.fold().retries - self._retries
        phases, self._phases = self._phases, {}
        peaks = {"allocated": self._window.allocated, "reserved": self._window.reserved}
        self._window.allocated = self._window.reserved = 0  # the marks begin anew as well: one reading does for both
        return {**peaks, "retries": retries, **phases}

    def close(self) -> None:
        self.leave()
        self._ledger.close(self._window)


class ProfilerMeter:
    """Peaks of one step, and of one validation batch, from a CPU allocator's events.

    The step before the measured one runs under the profiler as well, so that the gradients which the measured step
    releases are known to it.
    """

    source = "profiler"

    def __init__(self, measured_step: int, *, first_step: int) -> None:
        self.steps = range(max(measured_step - 1, first_step), measured_step + 1)
        self._probe: PeakProbe | None = None
        self._measured = ""  # "step" or "validation" while one is
        self._validated = False
        self._peaks: dict[str, int] = {}

    def step_begins(self, step: int, held: Callable[[], list[Any]]) -> None:
        if step == self.steps[0] and self._probe is None:
            self._start()
        if step == self.steps[-1] and self._probe is not None:
            self._measured = "step"
            self._probe.begin("", held())

    def step_ends(self, step: int) -> None:
        if self._measured == "step":
            self._finish()
            logger.info("Peak memory of step %d measured on the CPU, from its allocator's events.", step)

    def enter(self, phase: str) -> None:
        if self._measured == "step" and self._probe is not None:
            self._probe.mark(phase)

    def leave(self) -> None:
        self.enter("")

    def validation_batch_begins(self, held: Callable[[], list[Any]]) -> None:
        if self._probe is None and not self._validated:
            self._validated = True  # one is enough, and one attempt
            self._start()
            if self._probe is not None:
                self._measured = "validation"
                self._probe.begin("validation", held())

    def validation_batch_ends(self) -> None:
        if self._measured == "validation":
            self._finish()

    def validation_ends(self) -> None:
        pass

    def _start(self) -> None:
        probe = PeakProbe()
        try:
            probe.start()
        except RuntimeError as error:  # the user's own profiler is at work
            logger.warning("%s", error)
        else:
            self._probe = probe

    def _finish(self) -> None:
        probe, self._probe, self._measured = self._probe, None, ""
        if probe is not None:
            peak = probe.stop()
            self._peaks["allocated"] = max(self._peaks.get("allocated", 0), peak.overall)
            self._peaks.update(peak.phases)

    def collect(self) -> dict[str, int]:
        return {**self._peaks, "retries": 0} if self._peaks else {}

    def close(self) -> None:
        probe, self._probe, self._measured = self._probe, None, ""
        if probe is not None:
            probe.abandon()
