"""The warp of the Hopper forward that fetches, and what it shares with the warpgroups that compute."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_train.ops.kernels.hopper.copies import load_input
from flash_train.ops.kernels.hopper.places import (
    TOGETHER,
    Span,
    documents_of,
    key_tile,
    key_tiles,
    locate,
    span_of,
    tile_in,
)
from flash_train.ops.kernels.hopper.shim import fetch_add
from flash_train.ops.kernels.tiles import MANY


class Rings(NamedTuple):
    """Tiles in shared memory, and the barriers that say of each whether it is full or empty."""

    told: Any
    """Integers: which tile the queries are of, if programs walk; more than there are behind the last. Tile i that
    is done again, with every maximum, is -1 - i. With documents then its `Span` and which tile it is there."""
    sums: Any
    """Of each row's exponentials, if maxima are left out."""
    q: Any
    k: Any
    v: Any
    output: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Numbers(NamedTuple):
    """What the kernel is called with."""

    heads: Any
    """B H"""
    H: Any
    group: Any
    """H / G"""
    T: Any
    S: Any
    left: Any
    right: Any
    shift: Any
    """Query t stands beside key t + shift. (With documents: `places.span_of`, until `inside` one.)"""
    scale: Any
    """Of the scores, or of their tanh under a soft cap, in units of log2."""
    inner: Any
    """Under a soft cap: of the scores, whose tanh is then taken."""
    first_query: Any
    """Where T queries begin in their batch row: 0 but inside a document."""
    first_key: Any


@gluon.jit
def inside(n, span):
    """`n` of a document alone."""
    return Numbers(n.heads, n.H, n.group, span.T, span.S, n.left, n.right, span.shift, n.scale, n.inner,
                   span.first_query, span.first_key)  # fmt: skip


@gluon.jit
def head_of(tile, n, BLOCK_T: gl.constexpr, MASK: gl.constexpr):
    """(block, head, b, h) of a tile."""
    block, head = locate(tile, gl.cdiv(n.T, BLOCK_T), n.heads, TOGETHER, MASK != "full")
    b = head // n.H
    return block, head, b, head - b * n.H


@gluon.jit
def fetch(x, near, tiles, full, empty, number, b, g, row, first, length, STAGES: gl.constexpr):
    """Rows from `row` on into tile `number` of a ring, as soon as that is empty."""
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), x.block_type.nbytes)
    load_input(x, near, b, g, row, first, length, full.index(stage), tiles.index(stage))


@gluon.jit
def produce_tile(q, k, v, near, rings, block, b, h, done, n, MASK: gl.constexpr, BLOCK_S: gl.constexpr,
                 CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Queries of a tile, then its keys and values. Keys are needed, and freed, one step earlier than values, and are
    fetched one step earlier. Of what follows a document only values count: its scores are hidden, and rows of queries
    have nothing to do with each other. Returns how many tiles of keys the rings have seen."""
    BLOCK_T: gl.constexpr = CONSUMERS * 64
    tiles = key_tiles(block, n, BLOCK_T, BLOCK_S, MASK)
    count = tiles[3]
    row = (tiles[0] - 1) * BLOCK_S
    g = h // n.group
    for i in gl.static_range(CONSUMERS):
        mbarrier.expect(rings.q_full.index(i), q.block_type.nbytes)
        load_input(q, q, b, h, block * BLOCK_T + i * 64, n.first_query, n.T, rings.q_full.index(i), rings.q.index(i))
    fetch(k, k, rings.k, rings.k_full, rings.k_empty, done, b, g, row, n.first_key, n.S, STAGES)
    for i in range(1, count):
        before = row
        row = key_tile(i, tiles, MASK) * BLOCK_S
        fetch(k, k, rings.k, rings.k_full, rings.k_empty, done + i, b, g, row, n.first_key, n.S, STAGES)
        fetch(v, near, rings.v, rings.v_full, rings.v_empty, done + i - 1, b, g, before, n.first_key, n.S, STAGES)
    fetch(v, near, rings.v, rings.v_full, rings.v_empty, done + count - 1, b, g, row, n.first_key, n.S, STAGES)
    return done + count


@gluon.jit
def tell(rings, number: gl.constexpr, x):
    """The consumers one integer."""
    rings.told.index(number).store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def told(rings, number: gl.constexpr):
    """A consumer: an integer that its producer told."""
    return gl.max(rings.told.index(number).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def tell_document(rings, span, tile):
    tell(rings, 1, span.first_query)
    tell(rings, 2, span.T)
    tell(rings, 3, span.first_key)
    tell(rings, 4, span.S)
    tell(rings, 5, span.shift)
    tell(rings, 6, tile)


@gluon.jit
def told_document(rings):
    """(span, tile)"""
    return Span(told(rings, 1), told(rings, 2), told(rings, 3), told(rings, 4), told(rings, 5)), told(rings, 6)


@gluon.jit
def await_readers(rings, turn, CONSUMERS: gl.constexpr):
    """Until the queries, and what was told, are read."""
    for i in gl.static_range(CONSUMERS):
        mbarrier.wait(rings.q_empty.index(i), turn & 1)


@gluon.jit
def overflowed(rings, CONSUMERS: gl.constexpr):
    """Whether a row's sum is too large, or not a number."""
    ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    fine = rings.sums.index(0).load(ROWS) < MANY
    for i in gl.static_range(1, CONSUMERS):
        fine = fine & (rings.sums.index(i).load(ROWS) < MANY)
    return gl.min(fine.to(gl.int32), 0) == 0


@gluon.jit
def produce(q, k, v, near, counter, bounds, document, rings, n, MASK: gl.constexpr, DOCUMENTS: gl.constexpr,
            BLOCK_S: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
            FIXED_MAX: gl.constexpr):  # fmt: skip
    """The warp that fetches."""
    BLOCK_T: gl.constexpr = CONSUMERS * 64
    tile = gl.program_id(0)
    if PERSISTENT:
        done = 0
        turn = 0
        following = tile
        while tile < gl.cdiv(n.T, BLOCK_T) * n.heads:
            block, head, b, h = head_of(gl.where(tile < 0, -1 - tile, tile), n, BLOCK_T, MASK)
            if DOCUMENTS:
                following = gl.num_programs(0) + fetch_add(counter)
                number, end = documents_of(document, b, block, n.T, BLOCK_T)
                while number < end:
                    span = span_of(bounds, number, n)
                    own, is_there = tile_in(block, span.first_query, span.T, BLOCK_T)
                    if is_there:
                        tell(rings, 0, tile)
                        tell_document(rings, span, own)
                        done = produce_tile(q, k, v, near, rings, own, b, h, done, inside(n, span), MASK, BLOCK_S,
                                            CONSUMERS, STAGES)  # fmt: skip
                        await_readers(rings, turn, CONSUMERS)
                        turn += 1
                    number += 1
                tile = following
            else:
                tell(rings, 0, tile)
                done = produce_tile(q, k, v, near, rings, block, b, h, done, n, MASK, BLOCK_S, CONSUMERS, STAGES)
                if tile >= 0:
                    following = gl.num_programs(0) + fetch_add(counter)
                await_readers(rings, turn, CONSUMERS)
                turn += 1
                again = False
                if FIXED_MAX:
                    again = (tile >= 0) & overflowed(rings, CONSUMERS)
                tile = gl.where(again, -1 - tile, following)
        tell(rings, 0, tile)
        for i in gl.static_range(CONSUMERS):
            mbarrier.arrive(rings.q_full.index(i))
    else:
        block, head, b, h = head_of(tile, n, BLOCK_T, MASK)
        produce_tile(q, k, v, near, rings, block, b, h, 0, n, MASK, BLOCK_S, CONSUMERS, STAGES)
