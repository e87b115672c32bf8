"""The backward kernel for Hopper (sm_90): one pass over keys, one warp fetches, two warpgroups multiply.

The design is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608, section 3.1 and appendix B), written in Gluon. A
program holds 128 keys of one key head, 64 a warpgroup, while the queries that see them pass by, of all the heads of
the group: dK and dV are sums in registers. All five products are made once. S^T = K Q^T and dP^T = V dO^T have keys as
rows, so that P^T and dS^T are operands of dV += P^T dO and dK += dS^T Q where they stand, in registers; dS^T goes
through shared memory for dQ = dS K alone, which two other warps add up in global memory: `backward_deliver.py`.

The sums of S^T and dP^T have -L / scale and -delta in them. Both differ from column to column, and were a tenth of what
shared memory, whose throughput bounds this kernel, has to do when each thread read those of its columns. So they come
as products: ones times three bf16 numbers a query, whose sum is the fp32 number (`rows.py`).
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
from flash_train.ops.kernels.hopper.masks import hide
from flash_train.ops.kernels.hopper.places import documents_of, query_tiles, shared_tiles, span_of, tile_in
from flash_train.ops.kernels.hopper.shim import bar_arrive, bar_sync, exp2, seam, tanh

BOTH = gl.constexpr(8)
"""The named barrier at which the two warpgroups wait for each other."""
NEVER = gl.constexpr(2**31 - 1)
"""The first query that sees a key behind the last one."""


@gluon.jit
def ones(first: gl.constexpr, SCORES: gl.constexpr):
    """[64, 16] bf16, 1 in three columns from `first` on: its product with a tile of starts is what sums begin with."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2)
    columns = gl.arange(0, 16, gl.SliceLayout(0, OPERAND))[None, :]
    chosen = (columns >= first) & (columns < first + 3)
    full, _ = gl.broadcast(gl.where(chosen, 1.0, 0.0), gl.zeros([64, 16], gl.float32, OPERAND))
    return full.to(gl.bfloat16)


@gluon.jit
def probabilities(s, v_tile, do_tile, start, masked, low, high, first_query, n, N: gl.constexpr, WINDOW: gl.constexpr,
                  SOFT_CAP: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """(P^T, by what dP^T - delta is multiplied to dS^T, dP^T - delta under way), of S^T [64, N] under way."""
    if not SOFT_CAP:
        s = warpgroup_mma(ones(0, SCORES), start, s, is_async=True)
    dp = gl.zeros([64, N], gl.float32, SCORES)
    dp = warpgroup_mma(ones(3, SCORES), start, dp, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile, dp, is_async=True)
    if SOFT_CAP:  # wgmma wants no other product under way while its sums are written
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        capped = tanh(s * n.inner)
        s = warpgroup_mma(ones(0, SCORES), start, capped * n.log2_scale, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        s = warpgroup_mma_wait(2, deps=(s,))  # dP's two
    if masked:  # in one loop: with a loop for each kind of tile, more is spilled
        s = hide(s, low, high, first_query, N, True, WINDOW)
    if SOFT_CAP:
        p = exp2(s)
        factor = p * (1.0 - capped * capped)
    else:
        p = exp2(s * n.log2_scale)
        factor = p
    return p, factor, dp


@gluon.jit
def _step(rings, done, i, first, last, masked, low, high, dk, dv, n, ME: gl.constexpr, MASK: gl.constexpr,
          DOCUMENTS: gl.constexpr, BLOCK_T: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
          DQ: gl.constexpr, OPERAND: gl.constexpr, SOFT_CAP: gl.constexpr):  # fmt: skip
    """Query tile number `done` of the rings against this warpgroup's 64 keys.

    The comments count the products in flight: a wait for the others than the last n.
    """
    first_query = i * BLOCK_T
    stage = done % STAGES
    phase = (done // STAGES) & 1
    pair = done % 2 * 2
    q_tile, do_tile = rings.q.index(stage), rings.do.index(stage)
    start = rings.starts.index(stage).permute((1, 0))
    mbarrier.wait(rings.q_full.index(stage), phase)
    s = warpgroup_mma(rings.k.index(ME), q_tile.permute((1, 0)), gl.zeros([64, BLOCK_T], gl.float32, SCORES),
                      use_acc=False, is_async=True)  # fmt: skip
    mbarrier.wait(rings.do_full.index(stage), phase)
    p, factor, dp = probabilities(s, rings.v.index(ME), do_tile.permute((1, 0)), start, masked, low, high, first_query,
                                  n, BLOCK_T, MASK == "window", SOFT_CAP, SCORES)  # fmt: skip
    p_operand = gl.convert_layout(p.to(rings.k.dtype), OPERAND)
    seam()  # else P would wait for dP
    if not SOFT_CAP:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = (factor * dp).to(rings.k.dtype)
    rings.ds.index(pair + ME).store(ds)
    dv = warpgroup_mma(p_operand, do_tile, dv, is_async=True)
    fence_async_shared()
    bar_sync(BOTH, 256)  # both halves of dS^T are there
    if W == 128:  # dQ is [64, 128]: each warpgroup makes 64 columns
        dq_tile = warpgroup_mma(rings.ds.index(pair).permute((1, 0)), rings.k.index(0).slice(ME * 64, 64, 1),
                                gl.zeros([64, 64], gl.float32, DQ), use_acc=False, is_async=True)  # fmt: skip
        dq_tile = warpgroup_mma(rings.ds.index(pair + 1).permute((1, 0)), rings.k.index(1).slice(ME * 64, 64, 1),
                                dq_tile, is_async=True)  # fmt: skip
    else:  # it is [128, 64]: each makes 64 rows
        dq_tile = warpgroup_mma(rings.ds.index(pair).slice(ME * 64, 64, 1).permute((1, 0)), rings.k.index(0),
                                gl.zeros([64, 64], gl.float32, DQ), use_acc=False, is_async=True)  # fmt: skip
        dq_tile = warpgroup_mma(rings.ds.index(pair + 1).slice(ME * 64, 64, 1).permute((1, 0)), rings.k.index(1),
                                dq_tile, is_async=True)  # fmt: skip
    dv, p_operand = warpgroup_mma_wait(2, deps=(dv, p_operand))  # dQ's two
    bar_arrive(FREE + STAGES + stage, 288)
    ds_operand = gl.convert_layout(ds, OPERAND)
    dk = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
    dq_tile = warpgroup_mma_wait(1, deps=(dq_tile,))  # dK
    hand_over(rings, dq_tile, done, first, last, n.scale, ME, DOCUMENTS)
    dk, ds_operand = warpgroup_mma_wait(0, deps=(dk, ds_operand))
    bar_arrive(FREE + stage, 288)
    return dk, dv


@gluon.jit
def _consume(dk, dv, bounds, document, rings, n, ME: gl.constexpr, MASK: gl.constexpr, DOCUMENTS: gl.constexpr,
             BLOCK_T: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
             SOFT_CAP: gl.constexpr):  # fmt: skip
    """A warpgroup that computes."""
    block, key_head, b, g = head_of(n, 128)
    done = 0
    if DOCUMENTS:
        turn = 0
        number, end = documents_of(document, b, block, n.S, 128)
        while number < end:
            span = span_of(bounds, number, n)
            own, is_there = tile_in(block, span.first_key, span.S, 128)
            if is_there:
                done = _consume_keys(dk, dv, rings, own, b, g, turn, done, inside(n, span), ME, MASK, DOCUMENTS,
                                     BLOCK_T, W, STAGES, SOFT_CAP)  # fmt: skip
                bar_arrive(KEYS_FREE, 288)
                turn += 1
            number += 1
    else:
        _consume_keys(dk, dv, rings, block, b, g, 0, done, n, ME, MASK, DOCUMENTS, BLOCK_T, W, STAGES, SOFT_CAP)


@gluon.jit
def _consume_keys(dk, dv, rings, block, b, g, turn, done, n, ME: gl.constexpr, MASK: gl.constexpr,
                  DOCUMENTS: gl.constexpr, BLOCK_T: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
                  SOFT_CAP: gl.constexpr):  # fmt: skip
    """64 keys of the 128 of a block, those from 64 ME on. Returns how many query tiles the rings have seen."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, BLOCK_T, 16])  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    start, full, full_end, end = query_tiles(block, n, BLOCK_T, 128, MASK)
    earlier, later = shared_tiles(block, n, BLOCK_T, 128, MASK)
    first_key = block * 128 + ME * 64
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    low = gl.where(keys < n.S, keys - n.shift - n.right, NEVER)
    high = keys - n.shift + n.left + 1
    dk_acc = gl.zeros([64, W], gl.float32, ACC)
    dv_acc = gl.zeros([64, W], gl.float32, ACC)
    mbarrier.wait(rings.k_full, turn & 1)
    mbarrier.wait(rings.v_full, turn & 1)
    i = end - 1
    for number in range(0, (end - start) * n.group):
        masked = (i < full) | (i >= full_end)
        first, last = i >= earlier, i < later
        dk_acc, dv_acc = _step(rings, done + number, i, first, last, masked, low, high, dk_acc, dv_acc, n, ME, MASK,
                               DOCUMENTS, BLOCK_T, W, STAGES, SCORES, DQ, OPERAND, SOFT_CAP)  # fmt: skip
        i -= 1
        if i < start:
            i = end - 1
    bar_sync(BOTH, 256)  # nobody reads the keys any more
    k_tile, v_tile = rings.k.index(ME), rings.v.index(ME)
    v_tile.store(dv_acc.to(dv.dtype))
    k_tile.store((dk_acc * n.scale).to(dk.dtype))
    fence_async_shared()
    store_rows(dv, b, g, first_key, 0, n.first_key, n.S, v_tile)
    store_rows(dk, b, g, first_key, 0, n.first_key, n.S, k_tile)
    tma.store_wait(0)
    return done + (end - start) * n.group


@gluon.jit(
    do_not_specialize=["key_heads", "G", "group", "T", "S", "left", "right", "shift", "ordered", "together", "split"]
)
def hopper_backward_kernel(q, k, v, do, near_q, near_k, near_v, near_do, starts, sums, dq, dk, dv, counts, bounds,
                           document, key_heads, G, group, T, S, left, right, shift, log2_scale, scale, inner, ordered,
                           together, split, MASK: gl.constexpr, DOCUMENTS: gl.constexpr, BLOCK_T: gl.constexpr,
                           W: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr, REGISTERS: gl.constexpr,
                           FEW_REGISTERS: gl.constexpr):  # fmt: skip
    """One program: 128 keys of one key head, against every query that sees them."""
    rings = make_rings(q, k, v, do, starts, 2, BLOCK_T, W, STAGES, STAGES)
    inputs, near = Inputs(q, k, v, do), Inputs(near_q, near_k, near_v, near_do)
    n = Numbers(key_heads, G, group, T, S, left, right, shift, log2_scale, scale, inner, ordered, together, split, 0, 0)
    # each list of arguments in its place: a name would turn the constants into tensors
    gl.warp_specialize([
        (_consume, (dk, dv, bounds, document, rings, n, gl.constexpr(0), MASK, DOCUMENTS, BLOCK_T, W, STAGES,
                    SOFT_CAP)),
        (_consume, (dk, dv, bounds, document, rings, n, gl.constexpr(1), MASK, DOCUMENTS, BLOCK_T, W, STAGES,
                    SOFT_CAP)),
        (produce, (inputs, near, starts, bounds, document, rings, n, MASK, DOCUMENTS, 128, BLOCK_T, STAGES, STAGES)),
        (deliver, (sums, dq, counts, bounds, document, rings, n, gl.constexpr(0), MASK, DOCUMENTS, 128, BLOCK_T, W)),
        (deliver, (sums, dq, counts, bounds, document, rings, n, gl.constexpr(1), MASK, DOCUMENTS, 128, BLOCK_T, W)),
    ], [4, 1, 1, 1], [REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS])  # fmt: skip
