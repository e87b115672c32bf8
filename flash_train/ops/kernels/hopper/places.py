"""Where a program of the Hopper kernels works: its tile, and the tiles on the other side that have to do with it.

`n` is a kernel's `Numbers`: of these T, S, left, right and shift are read.

Documents are cut into tiles from their own first row on, each as if it stood alone. A program has those that begin in
its block of rows: of every document one at most, and of a batch without documents the block itself.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.ops.features import Terms
from flash_train.ops.kernels.hopper.shim import wide


def shift_of(terms: Terms, T: int, S: int) -> int:
    """Query t stands beside key t + shift. With documents it is a factor, of S - T of each: see `span_of`."""
    if terms.top_left:
        return 0
    return S - T if terms.bounds is None else 1


TOGETHER = gl.constexpr(8)
"""Heads that the forward takes at a time, so that their keys and values stay in the L2 cache."""


@gluon.jit
def locate(tile, blocks, heads, together, LAST_FIRST: gl.constexpr):
    """(block, head) of a tile: so many heads at a time, one block of all of them after the other."""
    group = tile // (together * blocks)
    here = min(together, heads - group * together)
    rest = tile - group * together * blocks
    block = rest // here
    head = group * together + rest - block * here
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, head


class Span(NamedTuple):
    """A document: its first query and how many it has, its first key and how many, and its shift."""

    first_query: Any
    T: Any
    first_key: Any
    S: Any
    shift: Any


@gluon.jit
def documents_of(document, b, block, length, BLOCK: gl.constexpr):
    """(first, last + 1) of the documents that rows of the block belong to, of batch row b, which is `length` long."""
    row = document + wide(b) * length
    return gl.load(row + block * BLOCK), gl.load(row + (min(block * BLOCK + BLOCK, length) - 1)) + 1


@gluon.jit
def span_of(bounds, number, n):
    """A document's; bounds outside the tensors are cut to them. With documents n.shift is 1 where their last rows stand
    beside each other, and 0 where their first ones do."""
    row = bounds + number * 4
    first_query = min(max(gl.load(row), 0), n.T)
    T = min(max(gl.load(row + 1), first_query), n.T) - first_query
    first_key = min(max(gl.load(row + 2), 0), n.S)
    S = min(max(gl.load(row + 3), first_key), n.S) - first_key
    return Span(first_query, T, first_key, S, n.shift * (S - T))


@gluon.jit
def tile_in(block, first, length, BLOCK: gl.constexpr):
    """(tile, whether it is there): the one of a document's that begins in the block; it has rows from `first` on."""
    tile = (max(block * BLOCK - first, 0) + BLOCK - 1) // BLOCK
    return tile, (first + tile * BLOCK < block * BLOCK + BLOCK) & (tile * BLOCK < length)


@gluon.jit
def key_tiles(block, n, BLOCK_T: gl.constexpr, BLOCK_S: gl.constexpr, MASK: gl.constexpr):
    """(end, last, first, count): key tiles end - 1, end - 2, ..., `count` of them, all but the `last` last and the
    `first` first ones seen by all queries of the block. One is last at least; if nothing is seen, its mask hides it.

    Every query that sees a key sees one of those few. They are visited before the others: `key_tile`.
    """
    top = block * BLOCK_T + n.shift  # the keys that the first and the last query stand beside
    bottom = min(block * BLOCK_T + BLOCK_T, n.T) - 1 + n.shift
    if MASK == "full":
        end, full_end = (n.S + BLOCK_S - 1) // BLOCK_S, n.S // BLOCK_S
    else:
        end = (min(max(bottom + n.right + 1, 0), n.S) + BLOCK_S - 1) // BLOCK_S
        full_end = min(max(top + n.right, 0), n.S) // BLOCK_S  # the last key of the first query not among them
    start, full = 0, 0
    if MASK == "window":
        start = min(max(top - n.left, 0), n.S) // BLOCK_S
        full = (min(max(bottom - n.left, 0), n.S) + BLOCK_S - 1) // BLOCK_S
    end = max(end, start + 1)
    count = end - start
    last = min(max(end - full_end, 1), count)
    return end, last, count - min(max(end - full, last), count), count


@gluon.jit
def key_tile(i, tiles, MASK: gl.constexpr):
    """Which one the i-th visit is to."""
    end, last, first, count = tiles
    if MASK == "window":
        if i >= last + first:
            i -= first
        elif i >= last:
            i += count - last - first
    return end - 1 - i


@gluon.jit
def query_tiles(block, n, BLOCK_T: gl.constexpr, BLOCK_S: gl.constexpr, MASK: gl.constexpr):
    """(start, full, full_end, end): query tiles start to end - 1 see a key of the block; in those from `full` to
    `full_end` - 1 every query sees every key, and no key is S or more. (Rows from T on contribute 0 without this.)"""
    tiles = (n.T + BLOCK_T - 1) // BLOCK_T
    first = block * BLOCK_S - n.shift  # the queries that stand beside the first and the last key
    last = min(block * BLOCK_S + BLOCK_S, n.S) - 1 - n.shift
    if MASK == "full":
        start, full = 0, n.T * 0
    else:
        start = max(first - n.right, 0) // BLOCK_T if first - n.right < n.T else tiles
        full = (min(max(last - n.right, 0), n.T) + BLOCK_T - 1) // BLOCK_T
    if MASK == "window":
        end = max((min(max(last + n.left + 1, 0), n.T) + BLOCK_T - 1) // BLOCK_T, start)
        full_end = max(first + n.left + 1, 0) // BLOCK_T if first + n.left + 1 < n.T else tiles
    else:
        end, full_end = tiles, tiles
    if block * BLOCK_S + BLOCK_S > n.S:  # of keys from S on there would be infinity * 0 in dQ
        full = end
    full = min(max(full, start), end)
    return start, full, min(max(full_end, full), end), end


@gluon.jit
def shared_tiles(block, n, BLOCK_T: gl.constexpr, BLOCK_S: gl.constexpr, MASK: gl.constexpr):
    """(earlier, later): of the query tiles that see a key of the block, those below `earlier` see one of an earlier
    block, too, and those from `later` on one of a later block."""
    start, _, _, end = query_tiles(block, n, BLOCK_T, BLOCK_S, MASK)
    earlier, later = start, end
    if block > 0:
        _, _, _, earlier = query_tiles(block - 1, n, BLOCK_T, BLOCK_S, MASK)
    if (block + 1) * BLOCK_S < n.S:
        later, _, _, _ = query_tiles(block + 1, n, BLOCK_T, BLOCK_S, MASK)
    return earlier, later


@gluon.jit
def blocks_before(block, tile, n, BLOCK_T: gl.constexpr, BLOCK_S: gl.constexpr, MASK: gl.constexpr):
    """How many blocks before this one see a query of the tile, which this one sees: `query_tiles`."""
    if MASK == "window":
        block -= max(tile * BLOCK_T + n.shift - n.left, 0) // BLOCK_S
    return block
