"""How the Hopper kernels copy tiles: rows of one head, or of one document in it.

Rows of the next document must neither be read (they may be NaN, and 0 * NaN is NaN) nor written over. The copy engine
leaves out what lies outside of a tensor, but documents end anywhere. So where there are documents, a tensor
[B, H, T, D] is described to it as [B, H, T + 1, ROWS, D], with one stride for both T + 1 and ROWS, from ROWS rows
before the tensor on: (stop, i) is row stop - ROWS + i. A tile that begins at (stop, ROWS - n) has the n rows before
`stop`, and its others are outside.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.ops.kernels.hopper.shim import load, rank_of, reduce_add, store, view


@gluon.jit
def _place(x, b, h, row, column, first, length):
    """Coordinates of the tile from `row` on, of `length` rows that begin at the head's row `first`."""
    if rank_of(x) == 5:
        ROWS: gl.constexpr = x.block_shape[3]
        n = min(max(length - row, 0), ROWS)
        return b, h, first + row + n, ROWS - n, column
    else:
        return b, h, row, column


@gluon.jit
def _as_block(tile, x):
    return view(tile, x.dtype, x.block_shape, x.layout)


@gluon.jit
def load_rows(x, b, h, row, column, first, length, barrier, tile):
    """A tile of them into shared memory, zeros where there are none."""
    load(x, _place(x, b, h, row, column, first, length), barrier, _as_block(tile, x))


@gluon.jit
def store_rows(x, b, h, row, column, first, length, tile):
    """A tile of them from shared memory."""
    store(x, _place(x, b, h, row, column, first, length), _as_block(tile, x))


@gluon.jit
def add_rows(x, b, h, row, column, first, length, tile):
    """As `store_rows`, but added to what is there."""
    reduce_add(x, _place(x, b, h, row, column, first, length), _as_block(tile, x))
