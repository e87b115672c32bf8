"""What is known of an out-of-memory error at the moment of its death: from the allocator, or from the exception."""

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from flash_train.memory.cards import MIB, ROUNDING
from flash_train.memory.live import round_up

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_LIBRARY = re.compile(r"CU(BLAS|SOLVER|SPARSE|DNN)_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)")


@dataclass(frozen=True)
class Counters:
    """The allocator and the device at one moment, in bytes."""

    allocated: int
    reserved: int
    limit: int
    """What the process may have: the device's memory, or the share set by set_per_process_memory_fraction."""
    free: int
    """Nobody's."""
    total: int
    """The device's."""
    retries: int

    @property
    def unused(self) -> int:
        """Reserved, and not allocated: cached, or pieces too small for what was asked for."""
        return self.reserved - self.allocated

    @property
    def outside(self) -> int:
        """Of this process's CUDA context and libraries, and of other processes."""
        return max(0, self.total - self.free - self.reserved)

    @property
    def available(self) -> int:
        """What this process's allocator could have."""
        return min(self.limit, self.reserved + self.free)


@dataclass(frozen=True)
class Incident:
    """One refused request."""

    requested: int | None
    """Bytes, as the allocator asked the device for them: it rounds up."""
    tolerance: int
    """How far off `requested` may be, where it was read from a message with two decimals."""
    module: str | None
    """In whose forward, by its dotted name; None if in nobody's."""
    node: str
    """Autograd's, as SoftmaxBackward0; "" outside of it."""
    counters: Counters | None
    """None where no allocator was asked: on a CPU, or without the observer."""

    def asked_for(self, size: int) -> bool:
        """Whether a block of `size` bytes makes torch's allocators ask for what was requested."""
        if self.requested is None:
            return False
        rounded = round_up(size, ROUNDING)
        segment = 2 * MIB if rounded <= MIB else 20 * MIB if rounded < 10 * MIB else round_up(rounded, 2 * MIB)
        return any(abs(self.requested - candidate) <= self.tolerance for candidate in (size, rounded, segment))


def out_of_memory(exception: BaseException) -> BaseException | None:
    """`exception`, or the one that led to it, if that says that memory ran out; else None."""
    found: BaseException | None = exception
    for _ in range(10):
        if found is None:
            return None
        text = str(found)
        if isinstance(found, torch.OutOfMemoryError | MemoryError) or (
            isinstance(found, RuntimeError)
            and (
                ("CUDA" in text and "out of memory" in text)
                or "DefaultCPUAllocator: can't allocate memory" in text
                or "not enough memory: you tried to allocate" in text
                or _LIBRARY.search(text)
            )
        ):
            return found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def incident_of(exception: BaseException, names: Mapping[int, str]) -> Incident:
    """From the exception alone: its text, and the frames that it left."""
    match = _ASKED.search(str(exception))
    requested, tolerance = None, 0
    if match:
        unit = _UNITS[match[2]]
        requested, tolerance = round(float(match[1]) * unit), 0 if unit == 1 else round(0.005 * unit)
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return Incident(requested, tolerance, running_module(reversed(frames), names), "", None)


def running_module(frames: Iterable[FrameType], names: Mapping[int, str]) -> str | None:
    """The module whose forward the first of `frames` is that is one's; `names` by the modules' ids."""
    for frame in frames:
        if frame.f_code.co_name == "forward":
            part = frame.f_locals.get("self")
            if isinstance(part, nn.Module) and id(part) in names:
                return names[id(part)]
    return None


# The allocator's observer

Listener = Callable[[int, int, int, int], Any]
_listeners: list[Listener] = []
_attached = False


def listen(listener: Listener) -> None:
    """From now on `listener(device, requested, limit, free)` is called when CUDA's allocator gives up, before it
    raises. torch knows no way to detach an observer, so there is one for the whole process."""
    global _attached
    if listener not in _listeners:
        _listeners.append(listener)
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if not _attached and attach is not None and torch.cuda.is_available():
        torch.cuda.init()  # torch ends the process if an observer comes before
        attach(_observe)
        _attached = True


def forget(listener: Listener) -> None:
    """The end of `listen`."""
    if listener in _listeners:
        _listeners.remove(listener)


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    for listener in tuple(_listeners):
        try:
            listener(device, requested, limit, free)
        except Exception:  # it must not become another error than the allocator's
            pass


def observed(device: int, requested: int, limit: int, free: int, names: Mapping[int, str]) -> Incident:
    """In the observer: counters and frames, in microseconds, without any operation of torch's."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()
    return Incident(
        requested, 0, running_module(frames, names), node.name() if node is not None else "",
        counters_of(device, limit=limit, free=free),
    )  # fmt: skip


def counters_of(device: int, *, limit: int, free: int) -> Counters:
    """Now; `limit` and `free` as the observer is told them."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = (
        statistics.get(name, {}).get("all", {}).get("current", 0) for name in ("allocated_bytes", "reserved_bytes")
    )
    total = torch.cuda.get_device_properties(device).total_memory
    return Counters(allocated, reserved, limit, free, total, statistics.get("num_alloc_retries", 0))
