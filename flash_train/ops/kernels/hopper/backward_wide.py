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

from flash_train.ops.kernels.hopper.backward import BOTH, NEVER, probabilities
from flash_train.ops.kernels.hopper.backward_deliver import deliver, hand_over
from flash_train.ops.kernels.hopper.backward_fetch import (
    FREE,
    KEYS_FREE,
    Inputs,
    Numbers,
    head_of,
    inside,
    make_rings,
    produce,
)
from flash_train.ops.kernels.hopper.copies import store_rows
from flash_train.ops.kernels.hopper.places import documents_of, query_tiles, shared_tiles, span_of, tile_in
from flash_train.ops.kernels.hopper.shim import bar_arrive, bar_sync


@gluon.jit
def _step(rings, done, i, first, last, masked, low, high, dk, dv, n, ME: gl.constexpr, MASK: gl.constexpr,
          DOCUMENTS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, DQ: gl.constexpr,
          SOFT_CAP: gl.constexpr):  # fmt: skip
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
    one = warpgroup_mma(ds_tile, k_tile.slice(ME * HALF, 64, 1), gl.zeros([64, 64], gl.float32, DQ), use_acc=False,
                          is_async=True)  # fmt: skip
    dv = warpgroup_mma(p_tile.permute((1, 0)), do_tile.slice(ME * HALF, HALF, 1), dv, is_async=True)
    one = warpgroup_mma_wait(1, deps=(one,))
    hand_over(rings, one, 2 * done, first, last, n.scale, ME, DOCUMENTS)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    bar_arrive(FREE + STAGES, 288)
    two = warpgroup_mma(ds_tile, k_tile.slice(ME * HALF + 64, 64, 1), gl.zeros([64, 64], gl.float32, DQ),
                        use_acc=False, is_async=True)  # fmt: skip
    dk = warpgroup_mma(ds_tile.permute((1, 0)), q_tile.slice(ME * HALF, HALF, 1), dk, is_async=True)
    two = warpgroup_mma_wait(1, deps=(two,))
    hand_over(rings, two, 2 * done + 1, first, last, n.scale, ME, DOCUMENTS)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    bar_arrive(FREE + stage, 288)
    return dk, dv


@gluon.jit
def _consume(dk, dv, bounds, document, rings, n, ME: gl.constexpr, MASK: gl.constexpr, DOCUMENTS: gl.constexpr,
             W: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr):  # fmt: skip
    """A warpgroup that computes."""
    block, key_head, b, g = head_of(n, 64)
    done = 0
    if DOCUMENTS:
        turn = 0
        number, end = documents_of(document, b, block, n.S, 64)
        while number < end:
            span = span_of(bounds, number, n)
            own, is_there = tile_in(block, span.first_key, span.S, 64)
            if is_there:
                done = _consume_keys(dk, dv, rings, own, b, g, turn, done, inside(n, span), ME, MASK, DOCUMENTS,
                                     W, STAGES, SOFT_CAP)  # fmt: skip
                bar_arrive(KEYS_FREE, 288)
                turn += 1
            number += 1
    else:
        _consume_keys(dk, dv, rings, block, b, g, 0, done, n, ME, MASK, DOCUMENTS, W, STAGES, SOFT_CAP)


@gluon.jit
def _consume_keys(dk, dv, rings, block, b, g, turn, done, n, ME: gl.constexpr, MASK: gl.constexpr,
                  DOCUMENTS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr):  # fmt: skip
    """The 64 keys of a block. Returns how many query tiles the rings have seen."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W // 2, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    start, full, full_end, end = query_tiles(block, n, 64, 64, MASK)
    earlier, later = shared_tiles(block, n, 64, 64, MASK)
    keys = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    low = gl.where(keys < n.S, keys - n.shift - n.right, NEVER)
    high = keys - n.shift + n.left + 1
    dk_acc = gl.zeros([64, W // 2], gl.float32, ACC)
    dv_acc = gl.zeros([64, W // 2], gl.float32, ACC)
    mbarrier.wait(rings.k_full, turn & 1)
    mbarrier.wait(rings.v_full, turn & 1)
    i = end - 1
    for number in range(0, (end - start) * n.group):
        masked = (i < full) | (i >= full_end)
        first, last = i >= earlier, i < later
        dk_acc, dv_acc = _step(rings, done + number, i, first, last, masked, low, high, dk_acc, dv_acc, n, ME, MASK,
                               DOCUMENTS, W, STAGES, SCORES, DQ, SOFT_CAP)  # fmt: skip
        i -= 1
        if i < start:
            i = end - 1
    bar_sync(BOTH, 256)  # nobody reads keys and values any more
    k_tile, v_tile = rings.k.index(0), rings.v.index(0)
    v_tile.slice(ME * (W // 2), W // 2, 1).store(dv_acc.to(dv.dtype))
    k_tile.slice(ME * (W // 2), W // 2, 1).store((dk_acc * n.scale).to(dk.dtype))
    fence_async_shared()
    bar_sync(BOTH, 256)
    if ME == 0:
        store_rows(dv, b, g, block * 64, 0, n.first_key, n.S, v_tile)
    else:
        store_rows(dk, b, g, block * 64, 0, n.first_key, n.S, k_tile)
    tma.store_wait(0)
    return done + (end - start) * n.group


@gluon.jit(
    do_not_specialize=["key_heads", "G", "group", "T", "S", "left", "right", "shift", "ordered", "together", "split"]
)
def hopper_wide_backward_kernel(q, k, v, do, near_q, near_k, near_v, near_do, starts, sums, dq, dk, dv, counts, bounds,
                                document, key_heads, G, group, T, S, left, right, shift, log2_scale, scale, inner,
                                ordered, together, split, MASK: gl.constexpr, DOCUMENTS: gl.constexpr,
                                BLOCK_T: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr,
                                REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr):  # fmt: skip
    """One program: 64 keys of one key head, against every query that sees them, BLOCK_T = 64 at a time."""
    rings = make_rings(q, k, v, do, starts, 1, 64, W, STAGES, 1)
    inputs, near = Inputs(q, k, v, do), Inputs(near_q, near_k, near_v, near_do)
    n = Numbers(key_heads, G, group, T, S, left, right, shift, log2_scale, scale, inner, ordered, together, split, 0, 0)
    gl.warp_specialize([
        (_consume, (dk, dv, bounds, document, rings, n, gl.constexpr(0), MASK, DOCUMENTS, W, STAGES, SOFT_CAP)),
        (_consume, (dk, dv, bounds, document, rings, n, gl.constexpr(1), MASK, DOCUMENTS, W, STAGES, SOFT_CAP)),
        (produce, (inputs, near, starts, bounds, document, rings, n, MASK, DOCUMENTS, 64, 64, STAGES, 1)),
        (deliver, (sums, dq, counts, bounds, document, rings, n, gl.constexpr(0), MASK, DOCUMENTS, 64, 64, W)),
        (deliver, (sums, dq, counts, bounds, document, rings, n, gl.constexpr(1), MASK, DOCUMENTS, 64, 64, W)),
    ], [4, 1, 1, 1], [REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS])  # fmt: skip
