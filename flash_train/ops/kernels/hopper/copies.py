"""How the Hopper kernels copy tiles: rows of one head, or of one document in it.

Rows of the next document must neither be read where they count (they may be NaN, and 0 * NaN is NaN) nor written over.
The copy engine leaves out what lies outside of a tensor, but documents end anywhere. So such a tensor [B, H, T, D] is
described to it as [B, H, T - ROWS + 1, ROWS, D], with one stride for both: (start, i) is row start + i. A tile that
begins at (end - ROWS, ROWS - n) has the n rows before `end`, and its others are outside.

Where `end` is less than ROWS there is no such start, and rows before the tensor will not do: the engine touches them.
What the kernels write has ROWS rows before it (`launch.empty`), and is described from there on; of what they read,
`first_rows` copies the first rows of each head behind others.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.ops.kernels.hopper.shim import load, rank_of, reduce_add, store, view
from flash_train.ops.kernels.launch import empty, run
from flash_train.ops.kernels.operands import large
from flash_train.ops.kernels.tables import Launch

COPY = Launch(block_t=128, block_s=0, warps=4, stages=1)
"""Rows of a tile at most. Each element is read once."""


@gluon.jit
def _rows_before(x, row, first, length):
    """(n, end): of a tile from `row` on, of `length` rows that begin at the head's row `first`."""
    ROWS: gl.constexpr = x.block_shape[3]
    n = min(max(length - row, 0), ROWS)
    return n, first + row + n


@gluon.jit
def _place(x, b, h, row, column, first, length):
    """Coordinates in what has rows before it; or in what is described as it is, as all is without documents."""
    if rank_of(x) == 5:
        n, end = _rows_before(x, row, first, length)
        return b, h, end, x.block_shape[3] - n, column
    else:
        return b, h, first + row, column


@gluon.jit
def _as_block(tile, x):
    return view(tile, x.dtype, x.block_shape, x.layout)


@gluon.jit
def load_input(x, near, b, h, row, first, length, barrier, tile):
    """A tile of an input's rows into shared memory; if it is cut, zeros where there are none. `near`: `first_rows`."""
    if rank_of(x) == 5:
        n, end = _rows_before(x, row, first, length)
        ROWS: gl.constexpr = x.block_shape[3]
        if end < ROWS:
            load(near, (b, h, end, ROWS - n, 0), barrier, _as_block(tile, near))
        else:
            load(x, (b, h, end - ROWS, ROWS - n, 0), barrier, _as_block(tile, x))
    else:
        load(x, (b, h, first + row, 0), barrier, _as_block(tile, x))


@gluon.jit
def load_rows(x, b, h, row, column, first, length, barrier, tile):
    """A tile of rows that kernels wrote into shared memory, zeros where there are none."""
    load(x, _place(x, b, h, row, column, first, length), barrier, _as_block(tile, x))


@gluon.jit
def store_rows(x, b, h, row, column, first, length, tile):
    """A tile of rows from shared memory."""
    store(x, _place(x, b, h, row, column, first, length), _as_block(tile, x))


@gluon.jit
def add_rows(x, b, h, row, column, first, length, tile):
    """As `store_rows`, but added to what is there."""
    reduce_add(x, _place(x, b, h, row, column, first, length), _as_block(tile, x))


@triton.jit(do_not_specialize=["stride_b", "stride_h", "stride_t", "H", "T"], do_not_specialize_on_alignment=["x"])
def first_rows_kernel(x, y, stride_b, stride_h, stride_t, H, T, ROWS: tl.constexpr, D: tl.constexpr,
                      BLOCK_D: tl.constexpr):  # fmt: skip
    """y [B H, ROWS, D] = rows of x, as far as it has some: one program, one head."""
    head = tl.program_id(0)
    b = head // H
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < T) & (columns < D)
    place = b.to(tl.int64) * stride_b + (head - b * H).to(tl.int64) * stride_h + rows.to(tl.int64) * stride_t
    there = tl.load(x + place + columns, mask=inside, other=0.0)
    tl.store(y + head.to(tl.int64) * ROWS * D + rows * D + columns, there, mask=columns < D)


def first_rows(x: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of each head of a `readable` x, [B, H, rows, D], with so many rows before them."""
    B, H, T, D = x.shape
    y = empty(x, B, H, rows, D, before=rows * D)
    strides = x.stride()[:3]
    key = "hopper first rows", x.device, x.dtype, rows, D, *large(strides)
    run(
        first_rows_kernel, x.device, B * H, COPY, key,
        x, y, *strides, H, T, rows, D, triton.next_power_of_2(D),
    )  # fmt: skip
    return y
