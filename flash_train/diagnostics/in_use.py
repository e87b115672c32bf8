"""Bytes in use between two steps, and how many more there could be: read often, so read cheaply."""

import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from flash_train.diagnostics.ledger import PeakLedger, ledger_of

_MIB = 2**20


class Gauge(Protocol):
    """Reads what a process has in use on one device."""

    source: str

    def read(self) -> int:
        """Bytes in use now."""
        ...

    def left(self) -> int | None:
        """Bytes by which that may still grow, as far as can be told; None where nothing can."""
        ...


class AllocatorGauge:
    """Allocated bytes of an accelerator's caching allocator: counters of the host, nothing is waited for."""

    source = "allocator"

    def __init__(self, ledger: PeakLedger, device: torch.device) -> None:
        self._ledger, self._device = ledger, device
        self._scope = ledger.open("between two readings")
        self._above = 0  # what a step needs for a moment

    def read(self) -> int:
        reading = self._ledger.fold()
        in_use, peak = reading.current[0], self._scope.allocated
        self._scope.allocated = 0
        self._above = max(self._above, peak - in_use)
        return in_use

    def left(self) -> int | None:
        backend: Any = getattr(torch, self._device.type)
        if not hasattr(backend, "mem_get_info"):
            return None
        free, total = backend.mem_get_info(self._device)
        allocated, reserved = self._ledger.fold().current[:2]
        if hasattr(backend, "get_per_process_memory_fraction"):
            free = min(free, int(total * backend.get_per_process_memory_fraction(self._device)) - reserved)
        return max(0, free + reserved - allocated - self._above)

    def close(self) -> None:
        self._ledger.close(self._scope)


class HostGauge:
    """Bytes that malloc has given out, which torch's CPU tensors are part of; without glibc, resident memory.

    The first stands still in healthy training, whatever the lengths of its batches; resident memory goes up and down
    with what malloc keeps.
    """

    def __init__(self) -> None:
        self._read = _malloced()
        self.source = "malloc" if self._read else "resident"
        self._read = self._read or _resident()

    @property
    def works(self) -> bool:
        """Whether this system has either."""
        return self._read is not None

    def read(self) -> int:
        assert self._read is not None
        return self._read()

    def left(self) -> int | None:
        known = [size for size in (_available(), _left_of_group()) if size is not None]
        return min(known, default=None)

    def close(self) -> None:
        pass


def gauge_of(device: torch.device) -> "AllocatorGauge | HostGauge | None":
    """None where nothing can be read."""
    if device.type == "cpu":
        gauge = HostGauge()
        return gauge if gauge.works else None
    ledger = ledger_of(device)
    return None if ledger is None else AllocatorGauge(ledger, device)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _malloced() -> Callable[[], int] | None:
    """What reads malloc's own count (some 0.1 ms); None where there is none, or another malloc serves torch."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2  # glibc 2.33
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo.restype = _Mallinfo

    def read() -> int:
        info = mallinfo()
        return info.uordblks + info.hblkhd  # in the heaps, and in mappings of their own

    before = read()
    sample = torch.empty(4 * _MIB, dtype=torch.uint8)
    seen = read() - before
    return read if sample.nbytes <= seen < 2 * sample.nbytes else None


def _resident() -> Callable[[], int] | None:
    file = Path("/proc/self/statm")
    if not file.exists():
        return None
    return lambda: int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available() -> int | None:
    lines = _lines("/proc/meminfo")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_of_group() -> int | None:
    """Of this container's limit."""
    most, now = (next(iter(_lines(f"/sys/fs/cgroup/memory.{name}")), "") for name in ("max", "current"))
    return int(most) - int(now) if most.isdigit() and now.isdigit() else None


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
