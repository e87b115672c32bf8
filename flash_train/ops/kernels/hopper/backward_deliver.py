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

from flash_train.ops.kernels.hopper.places import blocks_before, locate, query_tiles, shared_tiles
from flash_train.ops.kernels.hopper.shim import (
    add_one,
    await_count,
    bar_arrive,
    bar_sync,
    layout_of,
    load,
    reduce_add,
    store,
    stored,
    view,
)

FULL = gl.constexpr(13)
"""The first of the named barriers at which a warp that delivers waits until both warpgroups have handed their tiles
over."""


@gluon.jit
def spread(x):
    """[64, 64] of dQ, its rows in the order in which they are kept as sums.

    Of eight rows, those four that half a warp writes to shared memory at once are two apart, and so in different banks.
    (One behind the other they share banks in pairs: a 12th of the backward's work for shared memory, which bounds it.)
    """
    return x.reshape([8, 2, 4, 64]).permute((0, 2, 1, 3)).reshape([64, 64])


@gluon.jit
def gathered(x):
    """Back in their own order."""
    return x.reshape([8, 4, 2, 64]).permute((0, 2, 1, 3)).reshape([64, 64])


@gluon.jit
def hand_over(rings, part, number, first, last, scale, ME: gl.constexpr):
    """A warpgroup's [64, 64] of dQ, the program's `number`-th, to the warp that delivers; the program is the first or
    the last, or both, that adds to it."""
    mbarrier.wait(rings.dq_ready, number & 1)
    tile = rings.dq.index(ME)
    KEPT: gl.constexpr = layout_of(spread(part))
    if not last:
        tile.store(spread(part))
    else:
        if not first:
            part += gl.convert_layout(gathered(tile.load(KEPT)), layout_of(part))
        final = view(tile, rings.k.dtype, [64, 64], rings.k.layout)
        final.store((part * scale).to(rings.k.dtype))
    fence_async_shared()
    bar_arrive(FULL + number % 2, 288)


@gluon.jit
def deliver(sums, dq, counts, rings, n, ME: gl.constexpr, MASK: gl.constexpr, KEYS: gl.constexpr,
            BLOCK_T: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """A warp that adds, to `sums` fp32, or that stores what the last program hands over as dQ. Every other tile is
    ME's: while one warp waits until its tile is there and counts it, the other has the next one on its way."""
    PARTS: gl.constexpr = W // 128 if W > 128 else 1  # which a tile is handed over in
    DOWN: gl.constexpr = 64 if W == 64 else 0  # how far the second warpgroup's part is from the first one's
    RIGHT: gl.constexpr = 0 if W == 64 else W // 2
    block, key_head = locate(gl.program_id(0), gl.cdiv(n.S, KEYS), n.key_heads, n.together, False)
    start, _, _, end = query_tiles(block, n, BLOCK_T, KEYS, MASK)
    earlier, later = shared_tiles(block, n, BLOCK_T, KEYS, MASK)
    b = key_head // n.G
    tiles = gl.cdiv(n.T, BLOCK_T)
    one, two = rings.dq.index(0), rings.dq.index(1)
    for number in range(ME, (end - start) * n.group * PARTS, 2):
        member = number // (PARTS * (end - start))
        head = key_head * n.group + member
        i = end - 1 - (number // PARTS - member * (end - start))
        row, column = i * BLOCK_T, number % PARTS * 64
        first, last = i >= earlier, i < later
        count = counts + (head * tiles + i)
        before = PARTS * blocks_before(block, i, n, BLOCK_T, KEYS, MASK)
        if not last and n.ordered == 0:
            before = min(before, PARTS)
        if last and not first:
            await_count(count, before)
        if number > 0:
            mbarrier.wait(rings.dq_left, (number - 1) & 1)
        if last and not first:
            mbarrier.expect(rings.dq_ready, 2 * sums.block_type.nbytes)
            load(sums, [0, head, row, column], rings.dq_ready, view(one, gl.float32, [1, 1, 64, 64], sums.layout))
            load(sums, [0, head, row + DOWN, column + RIGHT], rings.dq_ready,
                 view(two, gl.float32, [1, 1, 64, 64], sums.layout))  # fmt: skip
        else:
            mbarrier.arrive(rings.dq_ready)
            if not first:
                await_count(count, before)
        bar_sync(FULL + ME, 288)
        if last:
            h = head - b * n.G * n.group
            store(dq, [b, h, row, column], view(one, dq.dtype, [1, 1, 64, 64], dq.layout))
            store(dq, [b, h, row + DOWN, column + RIGHT], view(two, dq.dtype, [1, 1, 64, 64], dq.layout))
        elif first:
            store(sums, [0, head, row, column], view(one, gl.float32, [1, 1, 64, 64], sums.layout))
            store(sums, [0, head, row + DOWN, column + RIGHT],
                  view(two, gl.float32, [1, 1, 64, 64], sums.layout))  # fmt: skip
        else:
            reduce_add(sums, [0, head, row, column], view(one, gl.float32, [1, 1, 64, 64], sums.layout))
            reduce_add(sums, [0, head, row + DOWN, column + RIGHT],
                       view(two, gl.float32, [1, 1, 64, 64], sums.layout))  # fmt: skip
        tma.store_wait(0)
        mbarrier.arrive(rings.dq_left)
        if not last:
            stored()
            add_one(count)
