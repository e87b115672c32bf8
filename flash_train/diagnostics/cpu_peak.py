"""The peak of live tensor bytes on a CPU, from the allocator's own events.

A CPU has no high-water mark to read, resident memory is no tensor meter, and a dispatch mode sees a custom op as one
call and misses what it allocates inside. The profiler records each allocation and release where it happens.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, profile, record_function

from flash_train.memory.live import parts_of

_MARK = "flash_train.diagnostics/"
_BEGIN = "begin/"


@dataclass(frozen=True)
class CpuPeak:
    """Peaks in bytes: of everything since `PeakProbe.begin`, and of each marked phase."""

    overall: int
    phases: dict[str, int]


class PeakProbe:
    """Profiles a stretch of one thread: `start`, `begin` (measuring from here), `mark` as phases change, `stop`.

    A peak is the bytes alive at `begin` plus the running sum of the events after it. What was allocated since `start`
    is known from the events; of what is older, the storages reachable from the objects given to `begin` are counted,
    each once. The profiler does not report the release of blocks older than `start`, so let a whole training step
    lie between `start` and `begin`: gradients of the step before are then born under the profiler.
    Sizes are the bytes that were requested: the CPU allocator rounds nothing. Other threads' tensors (data loaders)
    and memory that is not the allocator's (NumPy arrays, memory maps) are not seen.
    """

    def __init__(self) -> None:
        # `acc_events` keeps the results valid across cycles; without it recent versions warn.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._held: dict[int, int] = {}

    def start(self) -> None:
        """RuntimeError if another profiler is running: there can be one."""
        if _profiler_enabled():
            raise RuntimeError("one profiler can run at a time, and another one is running: no CPU peak is measured.")
        sacrifice = torch.empty(1)
        with _without_profiler_chatter():
            self._profile.start()
            # The first release of an older block makes the allocator print a warning: spend it here.
            del sacrifice

    def begin(self, phase: str, held: Iterable[Any]) -> None:
        """Measure from here on, in `phase`; `held` are modules, optimizers, tensors and containers of them."""
        self._held = storages(held)
        self.mark(_BEGIN + phase)

    def mark(self, phase: str) -> None:
        """What follows belongs to `phase`; "" for none."""
        with record_function(_MARK + phase):
            pass

    def stop(self) -> CpuPeak:
        """End profiling and return the peaks since `begin`."""
        self.abandon()
        assert self._profile.profiler is not None and self._profile.profiler.kineto_results is not None
        return _replay(_timeline(self._profile.profiler.kineto_results.experimental_event_tree()), self._held)

    def abandon(self) -> None:
        """End profiling without a result."""
        with _without_profiler_chatter():
            self._profile.stop()


def storages(held: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of the CPU tensors reachable from `held`.

    Looks into modules (parameters, buffers, tensors kept as plain attributes), optimizers (their state), gradients,
    mappings, lists, tuples, sets and dataclasses. A tensor that is a view counts its whole storage.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack = list(held)
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            _note(item, found)
            if item.is_leaf and item.grad is not None:
                stack.append(item.grad)
        elif isinstance(item, nn.Module):
            for module in item.modules():
                stack.extend((module._parameters, module._buffers))
                stack.extend(value for value in vars(module).values() if isinstance(value, (Tensor, list, tuple)))
        elif isinstance(item, torch.optim.Optimizer):
            stack.extend((item.state, item.param_groups))
        else:
            stack.extend(parts_of(item))
    return found


def _note(tensor: Tensor, found: dict[int, int]) -> None:
    try:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    except (NotImplementedError, RuntimeError):
        pass  # a tensor without a storage of its own (sparse, wrapper subclass)


@dataclass(frozen=True)
class _Event:
    address: int = 0
    size: int = 0  # bytes, negative for a release
    mark: str | None = None


def _timeline(roots: list[Any]) -> list[_Event]:
    """Allocations, releases and our marks, in the order of time."""
    timed: list[tuple[int, _Event]] = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        fields = node.extra_fields
        if hasattr(fields, "alloc_size"):
            if fields.device.type == "cpu":
                timed.append((node.start_time_ns, _Event(address=fields.ptr, size=fields.alloc_size)))
        elif node.name.startswith(_MARK):
            timed.append((node.start_time_ns, _Event(mark=node.name.removeprefix(_MARK))))
    return [event for _, event in sorted(timed, key=lambda pair: pair[0])]


def _replay(events: list[_Event], held: dict[int, int]) -> CpuPeak:
    """Run the events over the set of live blocks.

    Blocks are followed by their address. The allocator remembers blocks of an earlier profile that were released
    unseen; a release of an address that we did not see born is therefore believed only if `held` knows it.
    """
    live: dict[int, int] = {}
    total = 0
    begun = False
    phase = ""
    overall = 0
    phases: dict[str, int] = {}
    for event in events:
        if event.mark is not None:
            phase = event.mark.removeprefix(_BEGIN)
            if event.mark.startswith(_BEGIN):
                begun = True
                live = held | live
                total = sum(live.values())
        else:
            total -= live.pop(event.address, 0)
            if event.size > 0:
                live[event.address] = event.size
                total += event.size
        if begun:
            overall = max(overall, total)
            if phase:
                phases[phase] = max(phases.get(phase, 0), total)
    return CpuPeak(overall, phases)


@contextlib.contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Hold back what is written to stderr, and pass on all but the lines that the profiler's own library prints."""
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no stderr to keep clean
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            kept.seek(0)
            for line in kept:
                if b"ActivityProfiler" not in line and b"Memory block of unknown size" not in line:
                    os.write(saved, line)
            os.close(saved)
