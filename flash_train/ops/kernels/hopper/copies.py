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
from flash_train.ops.kernels.launch import block_size, empty, run
from flash_train.ops.kernels.operands import as_numbers, large, vector
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import load_tile, store_tile

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


@triton.jit
def _copy(x, y, head, strides, H, T, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """y [B H, ROWS, D] = rows of x [B, H, T, D], as far as it has some, of one head."""
    b = head // H
    tile = load_tile(x, strides, b, head - b * H, 0, T, D, ROWS, BLOCK_D, WIDTH, False)
    store_tile(y, head.to(tl.int64) * ROWS * D, D, 0, 0, ROWS, tile, D, ROWS, BLOCK_D)


@triton.jit(do_not_specialize=["B", "H", "G", "T", "S"], do_not_specialize_on_alignment=["q", "k", "v", "do"])
def first_rows_kernel(q, k, v, do, near_q, near_k, near_v, near_do, q_strides, k_strides, v_strides, do_strides, B, H,
                      G, T, S, ROWS_T: tl.constexpr, ROWS_S: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                      BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, WIDTH: tl.constexpr,
                      ALL: tl.constexpr):  # fmt: skip
    """One program: a head of one of them. Without ALL, of v alone."""
    head = tl.program_id(0)
    if head < B * G:
        _copy(v, near_v, head, v_strides, G, S, ROWS_S, E, BLOCK_E, WIDTH)
    elif ALL:
        head -= B * G
        if head < B * G:
            _copy(k, near_k, head, k_strides, G, S, ROWS_S, D, BLOCK_D, WIDTH)
        elif head < B * (G + H):
            _copy(q, near_q, head - B * G, q_strides, H, T, ROWS_T, D, BLOCK_D, WIDTH)
        else:
            _copy(do, near_do, head - B * (G + H), do_strides, H, T, ROWS_T, E, BLOCK_E, WIDTH)


def first_rows(q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, rows_t: int, rows_s: int) -> list[Tensor]:
    """The first rows of each head of these `readable` tensors, [B, heads, rows_t or rows_s, size] with so many rows
    before them. Without dO of v alone."""
    (B, H, T, D), (G, S, E) = q.shape, v.shape[1:]
    every = [(q, H, rows_t, D), (k, G, rows_s, D), (v, G, rows_s, E), (do, H, rows_t, E)]
    wanted = [(x, heads, rows, size) for x, heads, rows, size in every if do is not None or x is v]
    near = [empty(v, B, heads, rows, size, before=rows * size) for _, heads, rows, size in wanted]
    inputs, copies = [v if do is None else x for x, *_ in every], near if do is not None else near * 4
    strides, width = [as_numbers(x.stride()) for x in inputs if x is not None], vector(v.element_size())
    key = "hopper first rows", v.device, v.dtype, D, E, rows_t, rows_s, do is None, *(large(x) for x in strides)
    run(
        first_rows_kernel, v.device, sum(B * heads for _, heads, *_ in wanted), COPY, key,
        *inputs, *copies, *strides, B, H, G, T, S, rows_t, rows_s, D, E, block_size(D), block_size(E), width,
        do is not None,
    )  # fmt: skip
    return near
