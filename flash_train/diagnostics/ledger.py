"""Nested scopes over the one high-water mark that an allocator has."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flash_train.diagnostics.counters import Allocator, Reading, allocator_of

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Scope:
    """A stretch of time whose peaks are wanted, in bytes; final once closed."""

    name: str
    allocated: int = 0
    reserved: int = 0


class PeakLedger:
    """Gives any number of overlapping scopes their own peak, although the allocator has one mark per device.

    Before the ledger resets the mark it folds it into every open scope, so that no reader hides another's peak.
    It expects to be the only one who resets: use one ledger per device (`ledger_of`). A reset from outside is noticed
    when any mark stands lower than its own value at our last reset, counted in `outside_resets` and logged once;
    one that comes while every counter stands higher than then leaves no trace in the allocator and cannot be seen.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._open: list[Scope] = []
        self._floor: tuple[int, ...] = ()
        self.outside_resets = 0

    def open(self, name: str, *, closing: Scope | None = None) -> Scope:
        """Begin a scope; `closing` ends another one at the same moment, for the cost of one reading."""
        self.fold()
        if closing is not None:
            self._open.remove(closing)
        scope = Scope(name)
        self._open.append(scope)
        return scope

    def close(self, scope: Scope) -> Scope:
        """End `scope` and return it with its peaks. ValueError if it is not open."""
        if scope not in self._open:
            raise ValueError(f"a scope is closed once, and {scope.name!r} is not open: keep what open() returned.")
        self.fold()
        self._open.remove(scope)
        return scope

    @contextmanager
    def scope(self, name: str) -> Iterator[Scope]:
        """`with ledger.scope("step") as scope: ...`, after which `scope.allocated` is the peak."""
        scope = self.open(name)
        try:
            yield scope
        finally:
            self.close(scope)

    def fold(self) -> Reading:
        """Give the mark to every open scope, then reset it. Returns the reading from before the reset."""
        reading = self._allocator.read()
        self._notice_outside_reset(reading)
        for scope in self._open:
            scope.allocated = max(scope.allocated, reading.allocated_peak)
            scope.reserved = max(scope.reserved, reading.reserved_peak)
        self._allocator.reset_peaks()
        self._floor = reading.current
        return reading

    def _notice_outside_reset(self, reading: Reading) -> None:
        if not any(peak < floor for peak, floor in zip(reading.peak, self._floor, strict=False)):
            return
        if self.outside_resets == 0:
            logger.warning(
                "Somebody else reset the allocator's peak statistics: peaks between the ledger's last reading and that "
                "reset are lost. Read them through flash_train.diagnostics.ledger.ledger_of(device) instead."
            )
        self.outside_resets += 1


_LEDGERS: dict[torch.device, PeakLedger] = {}


def ledger_of(device: torch.device) -> PeakLedger | None:
    """The process's one ledger for `device` (with its index), or None where the backend keeps no peaks."""
    if device not in _LEDGERS:
        allocator = allocator_of(device)
        if allocator is None:
            return None
        _LEDGERS[device] = PeakLedger(allocator)
    return _LEDGERS[device]
