"""The small kernel before the Hopper backward: what its sums of a row of scores begin with."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import block_size, empty, run
from flash_train.ops.kernels.operands import as_numbers, large, readable, vector
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import row_deltas, strides_of

HIGHEST = tl.constexpr(1.0e30)
"""The log-sum-exp of a row that saw nothing or is none: exp(s - 1e30) is 0, and nothing here is inf - inf."""
ROWS = Launch(block_t=64, block_s=0, warps=4, stages=1)
"""Each element is read once."""


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


@triton.jit(do_not_specialize=["H", "T", "dl_b", "dl_h", "dl_t", "padded"],
            do_not_specialize_on_alignment=["do", "output", "lse", "grad_lse"])  # fmt: skip
def rows_kernel(do, output, lse, grad_lse, starts, dq, counts, do_strides, o_strides, dq_strides, dl_b, dl_h, dl_t,
                H, T, padded, unit, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_E: tl.constexpr, WIDTH: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
                COUNT_ROWS: tl.constexpr):  # fmt: skip
    """-L unit and -delta = dL - rowsum(dO * O), three bf16 numbers each that begin rows of [B H, padded, 16]; and a 0
    of `counts`, or one for each row: one program, BLOCK_T rows of one head.

    Rows that saw nothing or are none get L = HIGHEST and delta = 0, and so P = dS = 0; and those that saw nothing,
    zeros in dQ [B H, T, D], for no key's program may come by.
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
    if COUNT_ROWS:
        tl.store(counts + head.to(tl.int64) * T + rows, rows * 0, mask=rows < T)
    else:
        tl.store(counts + tl.program_id(0), 0)
    columns = tl.arange(0, BLOCK_D)[None, :]
    zeros = tl.zeros([BLOCK_T, BLOCK_D], dq.dtype.element_ty)
    unseen = (nothing & (rows < T))[:, None] & (columns < D)
    stride_b, stride_h, stride_t, stride_d = strides_of(dq_strides, WIDTH)
    places = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + rows.to(tl.int64)[:, None] * stride_t
    tl.store(dq + places + columns * stride_d, zeros, mask=unseen)


def begin(
    do: Tensor, output: Tensor, lse: Tensor, grad_lse: Tensor | None, dq: Tensor, padded: int, unit: float, *,
    documents: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Where the sums of S^T and dP^T begin, `rows_kernel`'s [1, B H, padded, 16] bf16, and zeros to count by, one for
    64 rows of a head, or for each if there are documents; dQ's rows that saw nothing are set to 0."""
    B, H, T, E = output.shape
    D = dq.shape[-1]
    starts = empty(lse, 1, B * H, padded, 16, dtype=torch.bfloat16, before=128 * 16 if documents else 0)
    counts = empty(lse, B * H * (T if documents else padded // ROWS.block_t), dtype=torch.int32)
    o, lse = readable(output), lse.contiguous()  # under vmap it may be one that was expanded
    dl = lse if grad_lse is None else grad_lse
    width = vector(o.element_size())
    strides = [as_numbers(x.stride()) for x in (do, o, dq)]
    key = (
        "hopper rows", o.device, do.dtype, o.dtype, dl.dtype, D, E, width, grad_lse is not None,
        documents, *(large(x) for x in (*strides, dl.stride())),
    )  # fmt: skip
    run(
        rows_kernel, o.device, padded // ROWS.block_t * B * H, ROWS, key,
        do, o, lse, dl, starts, dq, counts, *strides, *dl.stride(), H, T, padded, unit, D, E,
        ROWS.block_t, block_size(D), block_size(E), width, grad_lse is not None, documents,
    )  # fmt: skip
    return starts, counts
