"""The warp of the Hopper backwards that fetches, and what it shares with the warpgroups that compute."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flash_train.ops.kernels.hopper.copies import load_input, load_rows
from flash_train.ops.kernels.hopper.places import documents_of, locate, query_tiles, span_of, tile_in
from flash_train.ops.kernels.hopper.shim import bar_sync

FREE = gl.constexpr(9)
"""The first of the named barriers at which the warp that fetches waits until both warpgroups have read a tile, of q by
stages, then of dO. A warp that has read is counted and goes on; to arrive at a barrier in shared memory a warpgroup
would first meet."""
KEYS_FREE = gl.constexpr(15)
"""The named barrier at which it waits until a document's keys and values have been read, and dK and dV in their place
been stored."""


class Rings(NamedTuple):
    """Tiles in shared memory, and the barriers that say of each that it is full."""

    k: Any
    """This and v: 64 keys a tile, read by both warpgroups; dK and dV take their place in the end."""
    v: Any
    q: Any
    do: Any
    starts: Any
    """Beside do: where the sums of S^T and dP^T begin."""
    ds: Any
    """dS^T: two pairs of one tile a warpgroup; in `backward_wide.py` each pair is P and dS. One pair is written while
    the other may still be read."""
    dq: Any
    """One tile [64, 64] a warpgroup, on its way to global memory: `backward_deliver.py`."""
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any
    dq_ready: Any
    """Both of dq's tiles may be written."""
    dq_left: Any
    """Both have been read by the copy engine."""


class Inputs(NamedTuple):
    """Descriptors."""

    q: Any
    k: Any
    v: Any
    do: Any


class Numbers(NamedTuple):
    """What the kernel is called with."""

    key_heads: Any
    """B G, `split` of each"""
    G: Any
    """Likewise."""
    group: Any
    """Query heads of each."""
    T: Any
    S: Any
    left: Any
    right: Any
    shift: Any
    """Query t stands beside key t + shift. (With documents: `places.span_of`, until `inside` one.)"""
    log2_scale: Any
    """Of the scores, or of their tanh under a soft cap, in units of log2."""
    scale: Any
    inner: Any
    """Under a soft cap: of the scores, whose tanh is then taken."""
    ordered: Any
    """Whether programs add to dQ one after the other, and not the first and the last alone in their place."""
    together: Any
    """Heads at a time: `locate`."""
    split: Any
    """How many programs share the query heads that see a key; each has a dK and dV of its own."""
    first_query: Any
    """Where T queries begin in their batch row: 0 but inside a document."""
    first_key: Any


@gluon.jit
def inside(n, span):
    """`n` of a document alone."""
    return Numbers(n.key_heads, n.G, n.group, span.T, span.S, n.left, n.right, span.shift, n.log2_scale, n.scale,
                   n.inner, n.ordered, n.together, n.split, span.first_query, span.first_key)  # fmt: skip


@gluon.jit
def head_of(n, KEYS: gl.constexpr):
    """(block, key head, b, g) of this program. The first have the most rows, if that may be."""
    block, key_head = locate(gl.program_id(0), gl.cdiv(n.S, KEYS), n.key_heads, n.together, False)
    b = key_head // n.G
    return block, key_head, b, key_head - b * n.G


@gluon.jit
def produce(inputs, near, starts, bounds, document, rings, n, MASK: gl.constexpr, DOCUMENTS: gl.constexpr,
            KEYS: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, DO_STAGES: gl.constexpr):  # fmt: skip
    """The warp that fetches."""
    block, key_head, b, g = head_of(n, KEYS)
    done = 0  # query tiles
    if DOCUMENTS:
        turn = 0
        number, end = documents_of(document, b, block, n.S, KEYS)
        while number < end:
            span = span_of(bounds, number, n)
            own, is_there = tile_in(block, span.first_key, span.S, KEYS)
            if is_there:
                if turn > 0:
                    bar_sync(KEYS_FREE, 288)
                done = produce_keys(inputs, near, starts, rings, own, b, g, done, inside(n, span), MASK, KEYS, BLOCK_T,
                                    STAGES, DO_STAGES)  # fmt: skip
                turn += 1
            number += 1
        if turn > 0:
            bar_sync(KEYS_FREE, 288)
    else:
        done = produce_keys(inputs, near, starts, rings, block, b, g, done, n, MASK, KEYS, BLOCK_T, STAGES,
                            DO_STAGES)  # fmt: skip
    for i in gl.static_range(STAGES):  # no barrier is left half full
        if done > i:
            bar_sync(FREE + i, 288)
    for i in gl.static_range(DO_STAGES):
        if done > i:
            bar_sync(FREE + STAGES + i, 288)


@gluon.jit
def _fetch_keys(x, near, block, b, g, n, full, tiles, KEYS: gl.constexpr):
    """A block's keys, or values, 64 a tile."""
    mbarrier.expect(full, KEYS // 64 * x.block_type.nbytes)
    for part in gl.static_range(KEYS // 64):
        load_input(x, near, b, g, block * KEYS + part * 64, n.first_key, n.S, full, tiles.index(part))


@gluon.jit
def produce_keys(inputs, near, starts, rings, block, b, g, done, n, MASK: gl.constexpr, KEYS: gl.constexpr,
                 BLOCK_T: gl.constexpr, STAGES: gl.constexpr, DO_STAGES: gl.constexpr):  # fmt: skip
    """A block's keys and values, then the queries that see them and their dO, by heads. Returns how many query tiles
    the rings have seen."""
    start, _, _, end = query_tiles(block, n, BLOCK_T, KEYS, MASK)
    _fetch_keys(inputs.k, near.k, block, b, g // n.split, n, rings.k_full, rings.k, KEYS)
    _fetch_keys(inputs.v, near.v, block, b, g // n.split, n, rings.v_full, rings.v, KEYS)
    for member in range(0, n.group):
        h = g * n.group + member
        for back in range(start, end):
            i = start + end - 1 - back
            stage = done % STAGES
            if done >= STAGES:
                bar_sync(FREE + stage, 288)
            mbarrier.expect(rings.q_full.index(stage), inputs.q.block_type.nbytes)
            load_input(inputs.q, near.q, b, h, i * BLOCK_T, n.first_query, n.T, rings.q_full.index(stage),
                       rings.q.index(stage))  # fmt: skip
            stage = done % DO_STAGES
            if done >= DO_STAGES:
                bar_sync(FREE + STAGES + stage, 288)
            mbarrier.expect(rings.do_full.index(stage), inputs.do.block_type.nbytes + starts.block_type.nbytes)
            load_input(inputs.do, near.do, b, h, i * BLOCK_T, n.first_query, n.T, rings.do_full.index(stage),
                       rings.do.index(stage))  # fmt: skip
            load_rows(starts, 0, b * n.G * n.group + h, i * BLOCK_T, 0, n.first_query, n.T, rings.do_full.index(stage),
                      rings.starts.index(stage))  # fmt: skip
            done += 1
    return done


@gluon.jit
def make_rings(q, k, v, do, starts, KEY_TILES: gl.constexpr, BLOCK_T: gl.constexpr, W: gl.constexpr,
               STAGES: gl.constexpr, DO_STAGES: gl.constexpr):  # fmt: skip
    """Shared memory, and its barriers ready."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SHARED_16: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    SHARED_32: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    rings = Rings(
        gl.allocate_shared_memory(k.dtype, [KEY_TILES, 64, W], SHARED),
        gl.allocate_shared_memory(v.dtype, [KEY_TILES, 64, W], SHARED),
        gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_T, W], SHARED),
        gl.allocate_shared_memory(do.dtype, [DO_STAGES, BLOCK_T, W], SHARED),
        gl.allocate_shared_memory(starts.dtype, [DO_STAGES, BLOCK_T, 16], SHARED_16),
        gl.allocate_shared_memory(k.dtype, [4, 64, BLOCK_T], SHARED),
        gl.allocate_shared_memory(gl.float32, [2, 64, 64], SHARED_32),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    mbarrier.init(rings.k_full, count=1)
    mbarrier.init(rings.v_full, count=1)
    mbarrier.init(rings.dq_ready, count=1)
    mbarrier.init(rings.dq_left, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(rings.q_full.index(i), count=1)
    for i in gl.static_range(DO_STAGES):
        mbarrier.init(rings.do_full.index(i), count=1)
    fence_async_shared()
    return rings
