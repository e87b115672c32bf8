"""Gluon's vocabulary on the CPU, as far as the Hopper kernels have it: a program's partitions run as threads.

Memory barriers count arrivals and bytes as the hardware's do, and the copy engine fills with zeros what lies outside a
tensor and leaves out what would be written there. Products end where they begin, and registers, layouts and fences are
nothing: of those a GPU alone can tell.
"""

import math
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language import constexpr

from flash_train.ops.kernels.hopper import shim

TIMEOUT = 10.0
"""Seconds after which a wait is a deadlock."""


class Shared:
    """A tile, or tiles, in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype, self.layout = data, data.dtype, None

    def index(self, i: int) -> "Shared":
        assert 0 <= i < len(self.data)
        return Shared(self.data[i])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.count = self.arrivals = self.bytes = self.phase = 0

    def change(self, arrivals: int = 0, size: int = 0) -> None:
        with self.changed:
            self.arrivals, self.bytes = self.arrivals + arrivals, self.bytes + size
            assert 0 <= self.arrivals <= self.count
            if self.arrivals == self.count and self.bytes == 0:
                self.phase, self.arrivals = self.phase + 1, 0
                self.changed.notify_all()


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.all[i]


class Descriptor:
    """A tensor, as a kernel sees its descriptor."""

    def __init__(self, x: Any) -> None:
        base = x.base
        if isinstance(base, shim.Before):
            (B, H, T, rows, D), (b, h, t, again, d) = x.shape, x.strides
            assert (B, H, T - 1, D) == base.x.shape and (b, h, t, d) == base.x.stride() and t == again
            assert rows == base.rows <= base.x.storage_offset() // t, "there is other memory before it"
            self.x, self.before = base.x, rows
        elif len(x.shape) == 5:
            self.x, self.before = base, 0
        else:
            self.x = base.as_strided(x.shape, x.strides)
        self.block_shape, self.dtype, self.layout = x.block_shape, base.dtype, None
        self.block_type = types.SimpleNamespace(nbytes=self.x.element_size() * torch.Size(self.block_shape).numel())

    def inside(self, at: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """(the part of the block that the tensor has, where in the block that is)"""
        if len(at) == 5:
            b, h, start, skipped, column = at
            rows = self.block_shape[3]
            stop = start + rows - self.before
            assert 0 <= start and 0 <= skipped <= rows and (stop <= self.x.shape[2] or skipped == rows)
            here, (_, _, _, columns) = self._inside(
                [b, h, stop - rows + skipped, column], [1, 1, rows - skipped, self.block_shape[4]]
            )
            return here[:, :, None], (slice(0, 1), slice(0, 1), slice(0, 1), slice(0, rows - skipped), columns)
        return self._inside(at, self.block_shape)

    def _inside(self, at: Sequence[int], block: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        assert min(at) >= 0
        sizes = [max(0, min(b, n - i)) for b, n, i in zip(block, self.x.shape, at, strict=True)]
        part = tuple(slice(min(i, n), i + s) for i, n, s in zip(at, self.x.shape, sizes, strict=True))
        return self.x[part], tuple(slice(0, s) for s in sizes)


class Pointer:
    def __init__(self, x: Tensor, offset: Any = 0) -> None:
        self.x, self.offset = x, offset

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.x, self.offset + more)

    def load(self) -> int:
        return int(self.x.view(-1)[self.offset])

    def store(self, value: Tensor, mask: Tensor) -> None:
        self.x.view(-1)[self.offset[mask]] = value[mask]


def _load(x: Descriptor, at: Sequence[int], barrier: Barrier, to: Shared) -> None:
    here, place = x.inside(at)
    assert list(to.data.shape) == x.block_shape
    to.data.zero_()
    to.data[place] = here
    barrier.change(size=-x.block_type.nbytes)


def _store(x: Descriptor, at: Sequence[int], tile: Shared) -> None:
    here, place = x.inside(at)
    here.copy_(tile.data[place])


def with_nan(like: Tensor, *shape: int, dtype: torch.dtype | None = None, before: int = 0) -> Tensor:
    """`launch.empty`, filled with NaN or -1."""
    x = torch.empty(before + math.prod(shape), dtype=dtype or like.dtype)
    return x.fill_(float("nan") if x.is_floating_point() else -1)[before:].view(shape)


def run_on_cpu(
    module: Any, kernel: Any, program: int, args: tuple[Any, ...], programs: int = 1, **instead: Any
) -> None:
    """One program of a kernel of the module; `instead` of functions of the module others are called."""
    named, lock, here = [Barrier() for _ in range(16)], threading.Lock(), threading.local()

    def reduce_add(x: Descriptor, at: Sequence[int], tile: Shared) -> None:
        inside, place = x.inside(at)
        with lock:
            inside += tile.data[place]

    def fetch_add(pointer: Pointer) -> int:
        with lock:
            found = int(pointer.x[0])
            pointer.x[0] += 1
        return found

    def await_count(pointer: Pointer, count: int) -> None:  # programs run one after the other
        assert int(pointer.x[pointer.offset]) >= count, "a program would wait for a later one"

    def add_one(pointer: Pointer) -> None:
        with lock:
            pointer.x[pointer.offset] += 1

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype is torch.int64:  # barriers alone have it
            return Barrier() if len(shape) == 1 else Barriers(shape[0])
        return Shared(torch.empty(shape, dtype=dtype).fill_(float("nan") if dtype.is_floating_point else -1))

    def wait(barrier: Barrier, parity: int) -> None:
        with barrier.changed:
            assert barrier.changed.wait_for(lambda: barrier.phase % 2 != parity, TIMEOUT), "deadlock"

    def meet(number: Any, threads: int, *, stay: bool = True) -> None:
        """A partition at a named barrier, which counts threads."""
        barrier = named[number]
        with barrier.changed:
            barrier.count, before = threads, barrier.phase
            barrier.change(arrivals=here.threads)
            assert not stay or barrier.changed.wait_for(lambda: barrier.phase != before, TIMEOUT), "deadlock"

    def multiply(a: Any, b: Any, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
        a, b = ((x.data if isinstance(x, Shared) else x).to(acc.dtype) for x in (a, b))
        return a @ b + acc if use_acc else a @ b

    failures: list[BaseException] = []

    def partition(threads: int, function: Any, args: tuple[Any, ...]) -> None:
        here.threads = threads
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)

    def specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        threads = [
            threading.Thread(target=partition, args=(32 * size, *x), daemon=True)
            for size, x in zip([4, *warps], partitions, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    nothing = lambda *args, **kwargs: None  # noqa: E731
    # what its functions from other modules name, too
    others = {x.__module__ for x in vars(module).values() if isinstance(x, GluonJITFunction)} - {shim.__name__}
    names = {name: x for other in others for name, x in vars(sys.modules[other]).items()} | vars(module)
    names["gl"] = types.SimpleNamespace(
        constexpr=lambda x: x, float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64,
        static_range=range,
        cdiv=lambda a, b: -(-a // b), program_id=lambda axis: program, num_programs=lambda axis: programs,
        max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis), sum=lambda x, axis: x.sum(axis),
        log=torch.log,
        maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
        minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b, dtype=a.dtype)),
        store=lambda pointer, value, mask: pointer.store(value, mask), load=lambda pointer: pointer.load(),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        arange=lambda a, b, layout: torch.arange(a, b), broadcast=torch.broadcast_tensors,
        where=lambda *x: torch.where(*map(torch.as_tensor, x)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        allocate_shared_memory=allocate, warp_specialize=specialize,
        **dict.fromkeys(
            ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout",
             "SwizzledSharedLayout"), nothing,
        ),
    )  # fmt: skip
    names["mbarrier"] = types.SimpleNamespace(
        MBarrierLayout=nothing, wait=wait, arrive=lambda barrier: barrier.change(arrivals=1),
        init=lambda barrier, count: setattr(barrier, "count", count),
        expect=lambda barrier, size: barrier.change(arrivals=1, size=size),
    )  # fmt: skip
    names.update(
        tma=types.SimpleNamespace(store_wait=nothing), fence_async_shared=nothing, load=_load, store=_store,
        reduce_add=reduce_add, view=lambda x, dtype, shape, layout: Shared(x.data.view(shape)),
        bar_sync=meet, bar_arrive=lambda number, threads: meet(number, threads, stay=False),
        await_count=await_count, add_one=add_one, seam=nothing, stored=nothing, exp2=torch.exp2, tanh=torch.tanh,
        in_pairs=lambda x: x,
        rescale=lambda acc, factor: acc * factor, fetch_add=fetch_add, layout_of=nothing,
        rank_of=lambda x: len(x.block_shape), wide=lambda x: x,
        first_half=lambda tile, like: tile,
        warpgroup_mma=multiply, warpgroup_mma_wait=lambda left, deps: deps[0] if len(deps) == 1 else deps,
    )  # fmt: skip
    for name, x in list(names.items()):
        if isinstance(x, GluonJITFunction) and x.__module__ != shim.__name__:
            body = vars(x)["fn"]
            names[name] = types.FunctionType(body.__code__, names, name, body.__defaults__)
        elif isinstance(x, constexpr):
            names[name] = x.value
    names.update(instead)
    kinds = (Descriptor(x) if hasattr(x, "block_shape") else Pointer(x) if isinstance(x, Tensor) else x for x in args)
    names[kernel.__name__](*kinds)
    if failures:
        raise failures[0]
    assert not any(barrier.arrivals for barrier in named), "a named barrier is left half full"
