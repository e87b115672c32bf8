"""The two small kernels around the Hopper backward: what its sums of a row of scores begin with, and dQ after it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import block_size, blocks, empty, run
from flash_train.ops.kernels.operands import as_numbers, large, readable, vector
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import row_deltas, store_tile

HIGHEST = tl.constexpr(1.0e30)
"""The log-sum-exp of a row that saw nothing or is none: exp(s - 1e30) is 0, and nothing here is inf - inf."""
ROWS = Launch(block_t=64, block_s=0, warps=4, stages=1)
FINISH = Launch(block_t=4096, block_s=0, warps=8, stages=1)
"""Each element is read once; block_t counts rows of the one kernel, elements of the other."""
OCTET = 8
"""Rows of dQ's sums that are stored together: `sum_place`."""


@triton.jit
def in_three(x, columns, first):
    """[rows, 16]: three bf16 numbers that add up to x, fp32 [rows], in columns from `first` on."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    place = columns - first
    return tl.where(place == 0, high[:, None], tl.where(place == 1, middle[:, None],
                    tl.where(place == 2, low[:, None], 0.0)))  # fmt: skip


@triton.jit
def sum_place(row):
    """Where a row of dQ's sums stands: of eight, those four that half a warp writes to shared memory at once are two
    apart, and so in different banks. (One behind the other they share banks in pairs: a 12th of the backward's work for
    shared memory, which bounds it.)"""
    return row // 8 * 8 + row % 4 * 2 + row % 8 // 4


@triton.jit(do_not_specialize=["H", "T", "t_sums", "padded", "dl_b", "dl_h", "dl_t"],
            do_not_specialize_on_alignment=["do", "output", "lse", "grad_lse"])  # fmt: skip
def rows_kernel(do, output, lse, grad_lse, starts, dq_sum, do_strides, o_strides, dl_b, dl_h, dl_t, H, T,
                t_sums, padded, unit, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_E: tl.constexpr, WIDTH: tl.constexpr, HAS_GRAD_LSE: tl.constexpr):  # fmt: skip
    """-L unit and -delta = dL - rowsum(dO * O), three bf16 numbers each that begin rows of [B H, padded, 16], and zeros
    [B H, T_SUMS, D] for dQ's sums: one program, BLOCK_T rows of one head.

    Rows that saw nothing or are none get L = HIGHEST and delta = 0, and so P = dS = 0.
    """
    blocks = padded // BLOCK_T
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) - head * blocks) * BLOCK_T
    b = head // H
    h = head - b * H
    rows = first + tl.arange(0, BLOCK_T)
    delta = row_deltas(do, output, grad_lse, do_strides, o_strides, dl_b, dl_h, dl_t, b, h, first, T, E, BLOCK_T,
                       BLOCK_E, WIDTH, HAS_GRAD_LSE)  # fmt: skip
    L = tl.load(lse + head.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf"))
    nothing = L == float("-inf")
    columns = tl.arange(0, 16)[None, :]
    start = in_three(tl.maximum(-tl.where(nothing, HIGHEST, L) * unit, -3.0e38), columns, 0)
    start += in_three(tl.where(nothing, 0.0, -delta), columns, 3)
    tl.store(starts + (head.to(tl.int64) * padded + rows)[:, None] * 16 + columns, start)
    sums = dq_sum + (head.to(tl.int64) * t_sums + first) * D
    zeros = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    store_tile(sums, 0, D, 0, 0, t_sums - first, zeros, D, BLOCK_T, BLOCK_D)


@triton.jit(do_not_specialize=["T", "t_sums"])
def finish_kernel(dq_sum, dq, T, t_sums, scale, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """dQ = scale dS K in the inputs' dtype: one program, BLOCK_T rows of one head."""
    blocks = tl.cdiv(T, BLOCK_T)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < T)[:, None] & (columns < D)[None, :]
    sums = tl.load(dq_sum + (head * t_sums + sum_place(rows))[:, None] * D + columns, mask=inside)
    tl.store(dq + (head * T + rows)[:, None] * D + columns, (sums * scale).to(dq.dtype.element_ty), mask=inside)


def begin(
    do: Tensor, output: Tensor, lse: Tensor, grad_lse: Tensor | None, D: int, padded: int, unit: float
) -> tuple[Tensor, Tensor]:
    """Where the sums of S^T and dP^T begin, `rows_kernel`'s [1, B H, padded, 16] bf16; and where those of dQ do, zeros
    [1, B H, T in whole octets, D] fp32 by `sum_place`."""
    B, H, T, E = output.shape
    starts = empty(lse, 1, B * H, padded, 16, dtype=torch.bfloat16)
    t_sums = blocks(T, OCTET) * OCTET
    dq_sum = empty(lse, 1, B * H, t_sums, D)
    o, lse = readable(output), lse.contiguous()  # under vmap it may be one that was expanded
    dl = lse if grad_lse is None else grad_lse
    width = vector(o.element_size())
    strides = as_numbers(do.stride()), as_numbers(o.stride())
    key = (
        "hopper rows", o.device, do.dtype, o.dtype, dl.dtype, D, E, width, grad_lse is not None,
        *(large(x) for x in (*strides, dl.stride())),
    )  # fmt: skip
    run(
        rows_kernel, o.device, padded // ROWS.block_t * B * H, ROWS, key,
        do, o, lse, dl, starts, dq_sum, *strides, *dl.stride(), H, T, t_sums, padded, unit, D, E,
        ROWS.block_t, block_size(D), block_size(E), width, grad_lse is not None,
    )  # fmt: skip
    return starts, dq_sum


def finish(dq_sum: Tensor, dq: Tensor, scale: float) -> None:
    """dQ [B, H, T, D] from the sums of dS K, `begin`'s."""
    B, H, T, D = dq.shape
    rows = FINISH.block_t // block_size(D)
    run(
        finish_kernel, dq.device, blocks(T, rows) * B * H, FINISH, ("hopper finish", dq.device, dq.dtype, D),
        dq_sum, dq, T, dq_sum.shape[2], scale, D, rows, block_size(D),
    )  # fmt: skip
