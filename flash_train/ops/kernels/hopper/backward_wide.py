"""The backward kernel for Hopper (sm_90) and head sizes above 128, where dK and dV of 128 keys fill too many registers.

As `backward.py`, but for this: a program holds 64 keys, and the two warpgroups share everything. Each makes S^T and
dP^T for half of a tile's queries, and P and dS go through shared memory; behind a barrier each makes half of the
columns of dV += P^T dO, dQ = dS K and dK += dS^T Q.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.ops.kernels.hopper.backward import BOTH, NEVER, await_turn, pass_turn, probabilities, spread
from flash_train.ops.kernels.hopper.backward_fetch import FREE, Numbers, make_rings, produce
from flash_train.ops.kernels.hopper.places import locate, query_tiles
from flash_train.ops.kernels.hopper.shim import bar_arrive, bar_sync, reduce_add, store, view


@gluon.jit
def _step(dq, counts, count, rings, done, block, head, i, masked, low, high, dk, dv, n, ME: gl.constexpr,
          MASK: gl.constexpr, ORDERED: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
          DQ: gl.constexpr, SOFT_CAP: gl.constexpr):  # fmt: skip
    """Query tile number `done` of the rings."""
    HALF: gl.constexpr = W // 2
    first_query = i * 64
    stage = done % STAGES
    q_tile, do_tile = rings.q.index(stage), rings.do.index(0)
    k_tile = rings.k.index(0)
    p_tile, ds_tile = rings.ds.index(done % 2 * 2), rings.ds.index(done % 2 * 2 + 1)  # queries by keys
    mbarrier.wait(rings.q_full.index(stage), (done // STAGES) & 1)
    start = rings.starts.index(0).slice(ME * 32, 32, 0).permute((1, 0))
    s = warpgroup_mma(k_tile, q_tile.slice(ME * 32, 32, 0).permute((1, 0)), gl.zeros([64, 32], gl.float32, SCORES),
                      use_acc=False, is_async=True)  # fmt: skip
    if ORDERED:
        if done > 0:
            pass_turn(count, ME)
    mbarrier.wait(rings.do_full.index(0), done & 1)
    p, factor, dp = probabilities(s, rings.v.index(0), do_tile.slice(ME * 32, 32, 0).permute((1, 0)), start, masked,
                                  low, high, first_query + ME * 32, n, 32, MASK == "window", SOFT_CAP,
                                  SCORES)  # fmt: skip
    p_tile.slice(ME * 32, 32, 0).permute((1, 0)).store(p.to(rings.k.dtype))
    if not SOFT_CAP:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    ds_tile.slice(ME * 32, 32, 0).permute((1, 0)).store((factor * dp).to(rings.k.dtype))
    fence_async_shared()
    bar_sync(BOTH, 256)  # P and dS are there
    first = warpgroup_mma(ds_tile, k_tile.slice(ME * HALF, 64, 1), gl.zeros([64, 64], gl.float32, DQ), use_acc=False,
                          is_async=True)  # fmt: skip
    dv = warpgroup_mma(p_tile.permute((1, 0)), do_tile.slice(ME * HALF, HALF, 1), dv, is_async=True)
    first = warpgroup_mma_wait(1, deps=(first,))
    if ORDERED:
        count = await_turn(counts, head, block, i, n, ME, 64, 64, MASK)
    _add(dq, rings, first, head, first_query, ME * HALF, ME)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    bar_arrive(FREE + STAGES, 288)
    second = warpgroup_mma(ds_tile, k_tile.slice(ME * HALF + 64, 64, 1), gl.zeros([64, 64], gl.float32, DQ),
                           use_acc=False, is_async=True)  # fmt: skip
    dk = warpgroup_mma(ds_tile.permute((1, 0)), q_tile.slice(ME * HALF, HALF, 1), dk, is_async=True)
    second = warpgroup_mma_wait(1, deps=(second,))
    _add(dq, rings, second, head, first_query, ME * HALF + 64, ME)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    bar_arrive(FREE + stage, 288)
    return count, dk, dv


@gluon.jit
def _add(dq, rings, part, head, first_query, column, ME: gl.constexpr):
    """64 columns of dQ on their way."""
    tma.store_wait(0)  # what lay here has left
    rings.dq.index(ME).store(spread(part))
    fence_async_shared()
    reduce_add(dq, [0, head, first_query, column], view(rings.dq.index(ME), gl.float32, [1, 1, 64, 64], dq.layout))


@gluon.jit
def _consume(dq, dk, dv, counts, rings, n, ME: gl.constexpr, MASK: gl.constexpr, ORDERED: gl.constexpr,
             W: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr):  # fmt: skip
    """A warpgroup that computes."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W // 2, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    block, key_head = locate(gl.program_id(0), gl.cdiv(n.S, 64), n.key_heads, ORDERED)
    b = key_head // n.G
    g = key_head - b * n.G
    start, full, full_end, end = query_tiles(block, n, 64, 64, MASK)
    keys = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    low = gl.where(keys < n.S, keys - n.shift - n.right, NEVER)
    high = keys - n.shift + n.left + 1
    dk_acc = gl.zeros([64, W // 2], gl.float32, ACC)
    dv_acc = gl.zeros([64, W // 2], gl.float32, ACC)
    mbarrier.wait(rings.k_full, 0)
    mbarrier.wait(rings.v_full, 0)
    head = key_head * n.group
    i = start
    count = counts
    for done in range(0, (end - start) * n.group):
        masked = (i < full) | (i >= full_end)
        count, dk_acc, dv_acc = _step(dq, counts, count, rings, done, block, head, i, masked, low, high, dk_acc,
                                      dv_acc, n, ME, MASK, ORDERED, W, STAGES, SCORES, DQ, SOFT_CAP)  # fmt: skip
        i += 1
        if i == end:
            i = start
            head += 1
    if ORDERED:
        if end > start:
            pass_turn(count, ME)
    bar_sync(BOTH, 256)  # nobody reads keys and values any more
    k_tile, v_tile = rings.k.index(0), rings.v.index(0)
    v_tile.slice(ME * (W // 2), W // 2, 1).store(dv_acc.to(dv.dtype))
    k_tile.slice(ME * (W // 2), W // 2, 1).store((dk_acc * n.scale).to(dk.dtype))
    fence_async_shared()
    bar_sync(BOTH, 256)
    if ME == 0:
        store(dv, [b, g, block * 64, 0], view(v_tile, dv.dtype, [1, 1, 64, W], dv.layout))
    else:
        store(dk, [b, g, block * 64, 0], view(k_tile, dk.dtype, [1, 1, 64, W], dk.layout))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["key_heads", "G", "group", "T", "S", "left", "right", "shift"])
def hopper_wide_backward_kernel(q, k, v, do, starts, dq, dk, dv, counts, key_heads, G, group, T, S, left, right,
                                shift, log2_scale, scale, inner, MASK: gl.constexpr, ORDERED: gl.constexpr,
                                BLOCK_T: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr,
                                REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr):  # fmt: skip
    """One program: 64 keys of one key head, against every query that sees them, BLOCK_T = 64 at a time."""
    rings = make_rings(q, k, v, do, starts, 1, 64, W, STAGES, 1)
    n = Numbers(key_heads, G, group, T, S, left, right, shift, log2_scale, scale, inner)
    gl.warp_specialize([
        (_consume, (dq, dk, dv, counts, rings, n, gl.constexpr(0), MASK, ORDERED, W, STAGES, SOFT_CAP)),
        (_consume, (dq, dk, dv, counts, rings, n, gl.constexpr(1), MASK, ORDERED, W, STAGES, SOFT_CAP)),
        (produce, (q, k, v, do, starts, rings, n, MASK, 64, 64, W, STAGES, 1, ORDERED)),
    ], [4, 1], [REGISTERS, FEW_REGISTERS])  # fmt: skip
