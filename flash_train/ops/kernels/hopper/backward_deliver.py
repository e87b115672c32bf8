"""The warps of the Hopper backwards that add dQ up, and what the warpgroups hand over to them.

A tile of queries has parts of dQ from all programs whose keys it sees. The first of them stores its part, so that
nobody has to write zeros before; the others add theirs; the last one gets the sum of the others, adds its own in
registers and stores dQ itself, so that nobody has to read the sums once more. (Zeros before and a kernel that finished
dQ were a quarter of the time at T = 512, all of it memory traffic.) A count for each tile says how many have added. The
first is known, and so is the last: programs are numbered from the first keys to the last, so that none waits for one
that is not there yet. Those between add as they come, or, `ordered`, one after the other, and dQ is then the same to
the bit on every run.

All walk through the queries from the last to the first. So with a causal mask the longest programs are the first to
start and the shortest fill the end, and a program gets to its own diagonal, where it is the last to add, in the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flash_train.ops.kernels.hopper.backward_fetch import head_of, inside
from flash_train.ops.kernels.hopper.copies import add_rows, load_rows, store_rows
from flash_train.ops.kernels.hopper.places import (
    blocks_before,
    documents_of,
    query_tiles,
    shared_tiles,
    span_of,
    tile_in,
)
from flash_train.ops.kernels.hopper.shim import (
    add_one,
    await_count,
    bar_arrive,
    bar_sync,
    first_half,
    layout_of,
    stored,
    wide,
)

FULL = gl.constexpr(13)
"""The first of the named barriers at which a warp that delivers waits until both warpgroups have handed their tiles
over."""


@gluon.jit
def spread(x, DOCUMENTS: gl.constexpr):
    """[64, 64] of dQ, its rows in the order in which they are kept as sums.

    Of eight rows, those four that half a warp writes to shared memory at once are two apart, and so in different banks.
    (One behind the other they share banks in pairs: a 12th of the backward's work for shared memory, which bounds it.)
    A document may end between eight rows, and then they stay as they are.
    """
    if DOCUMENTS:
        return x
    else:
        return x.reshape([8, 2, 4, 64]).permute((0, 2, 1, 3)).reshape([64, 64])


@gluon.jit
def gathered(x, DOCUMENTS: gl.constexpr):
    """Back in their own order."""
    if DOCUMENTS:
        return x
    else:
        return x.reshape([8, 4, 2, 64]).permute((0, 2, 1, 3)).reshape([64, 64])


@gluon.jit
def hand_over(rings, part, number, first, last, scale, ME: gl.constexpr, DOCUMENTS: gl.constexpr):
    """A warpgroup's [64, 64] of dQ, the program's `number`-th, to the warp that delivers; the program is the first or
    the last, or both, that adds to it."""
    mbarrier.wait(rings.dq_ready, number & 1)
    tile = rings.dq.index(ME)
    KEPT: gl.constexpr = layout_of(spread(part, DOCUMENTS))
    if not last:
        tile.store(spread(part, DOCUMENTS))
    else:
        if not first:
            part += gl.convert_layout(gathered(tile.load(KEPT), DOCUMENTS), layout_of(part))
        final = first_half(tile, rings.k)
        final.store((part * scale).to(rings.k.dtype))
    fence_async_shared()
    bar_arrive(FULL + number % 2, 288)


@gluon.jit
def deliver(sums, dq, counts, bounds, document, rings, n, ME: gl.constexpr, MASK: gl.constexpr,
            DOCUMENTS: gl.constexpr, KEYS: gl.constexpr, BLOCK_T: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """A warp that adds, to `sums` fp32, or that stores what the last program hands over as dQ. Every other tile is
    ME's: while one warp waits until its tile is there and counts it, the other has the next one on its way."""
    block, key_head, b, g = head_of(n, KEYS)
    if DOCUMENTS:  # a count for each query, of which the first one of a tile has its
        handed = 0
        number, end = documents_of(document, b, block, n.S, KEYS)
        while number < end:
            span = span_of(bounds, number, n)
            own, is_there = tile_in(block, span.first_key, span.S, KEYS)
            if is_there:
                handed = _deliver_keys(sums, dq, counts + span.first_query, n.T, BLOCK_T, rings, own, b, key_head,
                                       handed, inside(n, span), ME, MASK, KEYS, BLOCK_T, W)  # fmt: skip
            number += 1
    else:
        _deliver_keys(sums, dq, counts, gl.cdiv(n.T, BLOCK_T), 1, rings, block, b, key_head, 0, n, ME, MASK, KEYS,
                      BLOCK_T, W)  # fmt: skip


@gluon.jit
def _deliver_keys(sums, dq, counts, a_head, a_tile, rings, block, b, key_head, handed, n, ME: gl.constexpr,
                  MASK: gl.constexpr, KEYS: gl.constexpr, BLOCK_T: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """What the block's keys add, behind `handed` parts of others. `counts` has `a_head` numbers a head and `a_tile` a
    tile. Returns how many parts have been handed over."""
    PARTS: gl.constexpr = W // 128 if W > 128 else 1  # which a tile is handed over in
    DOWN: gl.constexpr = 64 if W == 64 else 0  # how far the second warpgroup's part is from the first one's
    RIGHT: gl.constexpr = 0 if W == 64 else W // 2
    start, _, _, end = query_tiles(block, n, BLOCK_T, KEYS, MASK)
    earlier, later = shared_tiles(block, n, BLOCK_T, KEYS, MASK)
    one, two = rings.dq.index(0), rings.dq.index(1)
    all_parts = (end - start) * n.group * PARTS
    for part in range((ME + handed) % 2, all_parts, 2):
        number = handed + part
        member = part // (PARTS * (end - start))
        head = key_head * n.group + member
        i = end - 1 - (part // PARTS - member * (end - start))
        row, column = i * BLOCK_T, part % PARTS * 64
        first, last = i >= earlier, i < later
        count = counts + (wide(head) * a_head + i * a_tile)
        before = PARTS * blocks_before(block, i, n, BLOCK_T, KEYS, MASK)
        if not last and n.ordered == 0:
            before = min(before, PARTS)
        if last and not first:
            await_count(count, before)
        if number > 0:
            mbarrier.wait(rings.dq_left, (number - 1) & 1)
        if last and not first:
            mbarrier.expect(rings.dq_ready, 2 * sums.block_type.nbytes)
            load_rows(sums, 0, head, row, column, n.first_query, n.T, rings.dq_ready, one)
            load_rows(sums, 0, head, row + DOWN, column + RIGHT, n.first_query, n.T, rings.dq_ready, two)
        else:
            mbarrier.arrive(rings.dq_ready)
            if not first:
                await_count(count, before)
        bar_sync(FULL + ME, 288)
        if last:
            h = head - b * n.G * n.group
            store_rows(dq, b, h, row, column, n.first_query, n.T, first_half(one, rings.k))
            store_rows(dq, b, h, row + DOWN, column + RIGHT, n.first_query, n.T, first_half(two, rings.k))
        elif first:
            store_rows(sums, 0, head, row, column, n.first_query, n.T, one)
            store_rows(sums, 0, head, row + DOWN, column + RIGHT, n.first_query, n.T, two)
        else:
            add_rows(sums, 0, head, row, column, n.first_query, n.T, one)
            add_rows(sums, 0, head, row + DOWN, column + RIGHT, n.first_query, n.T, two)
        tma.store_wait(0)
        mbarrier.arrive(rings.dq_left)
        if not last:
            stored()
            add_one(count)
    return handed + all_parts
