"""The warp of the Hopper forward that fetches, and what it shares with the warpgroups that compute."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_train.ops.kernels.hopper.places import TOGETHER, key_tile, key_tiles, locate
from flash_train.ops.kernels.hopper.shim import fetch_add, load, view
from flash_train.ops.kernels.tiles import MANY


class Rings(NamedTuple):
    """Tiles in shared memory, and the barriers that say of each whether it is full or empty."""

    tile: Any
    """One integer: which tile the queries are of, if programs walk; more than there are behind the last. Tile i that
    is done again, with every maximum, is -1 - i."""
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
    """Query t stands beside key t + shift."""
    scale: Any
    """Of the scores, or of their tanh under a soft cap, in units of log2."""
    inner: Any
    """Under a soft cap: of the scores, whose tanh is then taken."""


@gluon.jit
def fetch(x, tiles, full, empty, number, b, g, first, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """Rows from `first` on into tile `number` of a ring, as soon as that is empty."""
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), x.block_type.nbytes)
    load(x, [b, g, first, 0], full.index(stage), view(tiles.index(stage), x.dtype, [1, 1, ROWS, WIDTH], x.layout))


@gluon.jit
def produce_tile(q, k, v, rings, tile, done, n, MASK: gl.constexpr, BLOCK_S: gl.constexpr, D: gl.constexpr,
                 E: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Queries of a tile, then its keys and values. Keys are needed, and freed, one step earlier than values, and are
    fetched one step earlier. Returns how many tiles of keys the rings have seen."""
    BLOCK_T: gl.constexpr = CONSUMERS * 64
    block, head = locate(tile, gl.cdiv(n.T, BLOCK_T), n.heads, TOGETHER, MASK != "full")
    b = head // n.H
    h = head - b * n.H
    tiles = key_tiles(block, n, BLOCK_T, BLOCK_S, MASK)
    count = tiles[3]
    first = (tiles[0] - 1) * BLOCK_S
    g = h // n.group
    for i in gl.static_range(CONSUMERS):
        mbarrier.expect(rings.q_full.index(i), q.block_type.nbytes)
        load(q, [b, h, block * BLOCK_T + i * 64, 0], rings.q_full.index(i),
             view(rings.q.index(i), q.dtype, [1, 1, 64, D], q.layout))  # fmt: skip
    fetch(k, rings.k, rings.k_full, rings.k_empty, done, b, g, first, BLOCK_S, D, STAGES)
    for i in range(1, count):
        before = first
        first = key_tile(i, tiles, MASK) * BLOCK_S
        fetch(k, rings.k, rings.k_full, rings.k_empty, done + i, b, g, first, BLOCK_S, D, STAGES)
        fetch(v, rings.v, rings.v_full, rings.v_empty, done + i - 1, b, g, before, BLOCK_S, E, STAGES)
    fetch(v, rings.v, rings.v_full, rings.v_empty, done + count - 1, b, g, first, BLOCK_S, E, STAGES)
    return done + count


@gluon.jit
def tell(rings, tile):
    """The consumers' next tile."""
    rings.tile.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def overflowed(rings, CONSUMERS: gl.constexpr):
    """Whether a row's sum is too large, or not a number."""
    ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    fine = rings.sums.index(0).load(ROWS) < MANY
    for i in gl.static_range(1, CONSUMERS):
        fine = fine & (rings.sums.index(i).load(ROWS) < MANY)
    return gl.min(fine.to(gl.int32), 0) == 0


@gluon.jit
def produce(q, k, v, counter, rings, n, MASK: gl.constexpr, BLOCK_S: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
            CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
            FIXED_MAX: gl.constexpr):  # fmt: skip
    """The warp that fetches."""
    tile = gl.program_id(0)
    if PERSISTENT:
        done = 0
        turn = 0
        following = tile
        while tile < gl.cdiv(n.T, CONSUMERS * 64) * n.heads:
            tell(rings, tile)
            done = produce_tile(q, k, v, rings, gl.where(tile < 0, -1 - tile, tile), done, n, MASK, BLOCK_S, D, E,
                                CONSUMERS, STAGES)  # fmt: skip
            if tile >= 0:
                following = gl.num_programs(0) + fetch_add(counter)
            for i in gl.static_range(CONSUMERS):  # until the queries are read
                mbarrier.wait(rings.q_empty.index(i), turn & 1)
            turn += 1
            again = False
            if FIXED_MAX:
                again = (tile >= 0) & overflowed(rings, CONSUMERS)
            tile = gl.where(again, -1 - tile, following)
        tell(rings, tile)
        for i in gl.static_range(CONSUMERS):
            mbarrier.arrive(rings.q_full.index(i))
    else:
        produce_tile(q, k, v, rings, tile, 0, n, MASK, BLOCK_S, D, E, CONSUMERS, STAGES)
