"""What Triton's Gluon spells differently from version to version, and what its Python side lacks.

Compiled for sm_90 by 3.6.0, 3.7.1, 3.8.0 and 3.9.0, without spills in the forward and without a wait between
products; run with 3.6.0.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "add_one",
    "await_count",
    "bar_arrive",
    "bar_sync",
    "describe",
    "describe_cut",
    "exp2",
    "fetch_add",
    "first_half",
    "in_pairs",
    "load",
    "rank_of",
    "reduce_add",
    "rescale",
    "seam",
    "store",
    "stored",
    "tanh",
    "view",
    "wide",
]

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, destination in shared memory): by the copy engine."""
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(descriptor, coordinates, source in shared memory)"""

if hasattr(tma, "async_atomic_add"):
    reduce_add = tma.async_atomic_add
else:

    @builtin
    def reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """As `store`, but added to what is there."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


_TILE = {
    (size, swizzle, rank): gl.NVMMASharedLayout(swizzle, 8 * size, rank)
    for size, swizzle in ((2, 128), (2, 32), (4, 128))
    for rank in (4, 5)
}


class Before(NamedTuple):
    """The memory from so many rows before a tensor's first one on."""

    x: Tensor
    rows: int

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def data_ptr(self) -> int:
        return self.x.data_ptr() - self.rows * self.x.stride(2) * self.x.element_size()


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A `readable` tensor [B, H, T, D] for the copy engine, in tiles of this many rows and columns of one head."""
    return _descriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def describe_cut(x: Tensor, rows: int, columns: int, *, rows_before: bool) -> TensorDescriptor:
    """Likewise, but so that a tile can end at any row: `copies.py`. `rows_before`: whether as many rows as a tile has
    lie before the tensor's first one."""
    (B, H, T, D), (b, h, t, d) = x.shape, x.stride()
    base, starts = (Before(x, rows), T + 1) if rows_before else (x, max(T - rows, 0) + 1)
    return _descriptor(base, [B, H, starts, rows, D], [b, h, t, t, d], [1, 1, 1, rows, columns])


def _descriptor(base: Any, shape: list[int], strides: list[int], block_shape: list[int]) -> TensorDescriptor:
    # without its constructor's checks, as in `operands.descriptors`
    y = TensorDescriptor.__new__(TensorDescriptor)
    y.base, y.shape, y.strides, y.block_shape = base, shape, strides, block_shape
    size = base.dtype.itemsize
    y.layout = _TILE[size, min(block_shape[-1] * size, 128), len(shape)]
    return y


@builtin
def view(x: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory, seen in another shape and layout."""
    change = x.reinterpret if hasattr(x, "reinterpret") else x._reinterpret
    return change(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def first_half(tile, like):
    """Of a tile [64, 64] of fp32 the first half, seen as one of 16-bit numbers that is stored as `like` is."""
    return view(tile, like.dtype, [2, 64, 64], like.layout).index(0)  # from 3.8 on a view is as large as its tile


@builtin
def rank_of(x: Any, _semantic: Any = None) -> Any:
    """Of a descriptor."""
    return gl.constexpr(len(x.block_shape))


@builtin
def layout_of(x: Any, _semantic: Any = None) -> Any:
    """How a tensor's elements are spread over threads."""
    return x.type.layout


@gluon.constexpr_function
def _barrier(what, threads):
    return f"bar.{what} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def bar_sync(number, THREADS: gl.constexpr):
    """Wait at a named barrier until so many threads are there. Numbers from 8 to 15: Triton takes those below."""
    gl.inline_asm_elementwise(_barrier("sync", THREADS), "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@gluon.jit
def bar_arrive(number, THREADS: gl.constexpr):
    """Be counted at a named barrier without waiting, each warp for itself."""
    gl.inline_asm_elementwise(_barrier("arrive", THREADS), "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@gluon.jit
def seam():
    """Nothing happens here, and ptxas moves no instruction across it.

    It schedules the wait for a product like any other instruction and brings it forward, ahead of the very work that
    should hide the product's time. This is a loop that always ends at once, which ptxas does not know.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred none; .reg .b32 lanes; AGAIN: activemask.b32 lanes; setp.eq.u32 none, lanes, 0; "
        "@none bra.uni AGAIN; mov.u32 $0, 0; }",
        "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wide(x):
    """An integer in 64 bits."""
    return x.to(gl.int64)


@gluon.jit
def exp2(x):
    """The hardware's, small results flushed to 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _rescale(n):
    multiply = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n))
    return (
        f"{{ .reg .pred one, two; setp.neu.f32 one, ${2 * n}, 0f3F800000; setp.neu.f32 two, ${2 * n + 2}, 0f3F800000; "
        f"or.pred one, one, two; vote.sync.any.pred one, one, 0xffffffff; @!one bra DONE; {multiply}DONE: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(acc, factor):
    """`acc` [64, N], a product's sums, times a factor a row [64, 1]: done by those warps alone that have a factor other
    than 1. (A thread has two rows, of which every other pair of its numbers is.)"""
    N: gl.constexpr = acc.shape[1] // 2
    factors, _ = gl.broadcast(factor, acc)
    return gl.inline_asm_elementwise(_rescale(N), _rescale_constraints(N), [acc, factors], dtype=gl.float32,
                                     is_pure=True, pack=N)  # fmt: skip


@gluon.jit
def tanh(x):
    """1 - 2 / (exp(2x) + 1), to 2^-22; the hardware's own knows 11 bits."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0f4038AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 e, e; fma.rn.f32 $0, e, 0fC0000000, 0f3F800000; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_add(pointer):
    """The 32-bit integer at the pointer, to which 1 is added. For a partition of one warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane, found; mov.b32 found, 0; mov.u32 lane, %laneid; "
        "setp.eq.u32 first, lane, 0; @first atom.global.add.u32 found, [$1], 1; "
        "shfl.sync.idx.b32 $0, found, 0, 31, 0xffffffff; }",
        "=r,l,~{memory}", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_count(pointer, count):
    """Wait until the 32-bit integer at the pointer is `count`; the copy engine then sees what was stored before it
    became that."""
    gl.inline_asm_elementwise(
        "{ .reg .pred less; .reg .b32 found; AGAIN: ld.acquire.gpu.global.b32 found, [$1]; "
        "setp.lt.s32 less, found, $2; @less bra AGAIN; fence.proxy.async.global; mov.u32 $0, found; }",
        "=r,l,r,~{memory}", [pointer.to(gl.int64), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_one(pointer):
    """Add 1 to the 32-bit integer at the pointer, behind what was written before. For a partition of one warp."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
        "setp.eq.u32 first, lane, 0; @first red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l,~{memory}", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def stored():
    """Wait until what this thread gave the copy engine to store is there. (`tma.store_wait`: until it is read.)"""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def in_pairs(x):
    """`x` of 16-bit numbers, two to a register: a loop that carries it would otherwise take it apart."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
