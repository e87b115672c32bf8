"""The forward kernel for Hopper (sm_90): one warp fetches, two or three warpgroups multiply and exponentiate.

The design is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608, sections 3.1 and 3.2), written in Gluon. A
producer warp fills rings of key and value tiles through the copy engine; each consumer warpgroup holds 64 queries. It
starts S = Q K^T of one tile and O += P V of the tile before, and computes the softmax of S while P V is still running.
Named barriers let the warpgroups take turns at the tensor cores. Key tiles that the mask cuts come first, in a loop of
their own, and the main loop has no mask.

Where programs walk, the main loop looks for no maxima either (FIXED_MAX): a row keeps the one that its first tiles gave
it, and nothing is ever rescaled. A later score that is too far above it shows in the row's sum (`tiles.MANY` says why
few are), and the tile is computed again with every maximum.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_train.ops.features import Terms
from flash_train.ops.kernels.hopper.copies import first_rows, store_rows
from flash_train.ops.kernels.hopper.forward_fetch import Numbers, Rings, head_of, inside, produce, told, told_document
from flash_train.ops.kernels.hopper.masks import hide
from flash_train.ops.kernels.hopper.places import key_tile, key_tiles, shift_of
from flash_train.ops.kernels.hopper.shim import (
    bar_arrive,
    bar_sync,
    describe,
    describe_cut,
    exp2,
    in_pairs,
    rescale,
    stored,
    tanh,
    wide,
)
from flash_train.ops.kernels.hopper.tables import FORWARD, SHARED_BYTES, Forward, tile_width
from flash_train.ops.kernels.launch import blocks, empty, kind_of_bounds, kinds_of, run, zeros
from flash_train.ops.kernels.operands import readable
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import LN_2, LOG2_E, LOWEST, MANY

SLACK = gl.constexpr(8.0)
"""A row's maximum is replaced by a larger one, and older sums made smaller, only if that is larger by more than this in
log2: exponentials are at most 2^8 then, which fp16 holds, and most steps rescale nothing."""
TURNS = gl.constexpr(8)
"""The first of the named barriers at which consumers wait for their turn."""


@gluon.jit
def _row_sum(p, BLOCK_S: gl.constexpr):
    """[64, 4]: each of the four threads that share a row adds up its own columns."""
    return gl.sum(gl.sum(p.reshape([64, BLOCK_S // 8, 4, 2]), 3), 1)


@gluon.jit
def _beside(x, l):
    """A number of each row, [64, 1], where `l` has its columns."""
    return gl.convert_layout(x, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _rows_of(lse, head, n):
    """Where the head's row 0 stands: more than 32 bits may count."""
    return lse + wide(head) * n.T


@gluon.jit
def _maxima(s, m, n):
    """(m, what older sums shrink by): the tile counted in the rows' maxima m, in log2."""
    larger = gl.maximum(m, gl.max(s, 1) * n.scale)
    larger = gl.where(larger - m > SLACK, larger, m)
    return larger, exp2(m - larger)


@gluon.jit
def _softmax(s, m, shrink, l, n, BLOCK_S: gl.constexpr):
    """(exp(s - m), l): the tile counted in the rows' sums l."""
    new = exp2(s * n.scale - m[:, None])
    return new, l * _beside(shrink, l) + _row_sum(new, BLOCK_S)


@gluon.jit
def _scores(q_tile, rings, i, m, l, low, high, first_key, n, ME: gl.constexpr, BLOCK_S: gl.constexpr,
            MASK: gl.constexpr, SOFT_CAP: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
            SCORES: gl.constexpr):  # fmt: skip
    """`_softmax` of key tile i of the rings, masked, with no other product under way."""
    stage = i % STAGES
    mbarrier.wait(rings.k_full.index(stage), (i // STAGES) & 1)
    bar_sync(TURNS + ME, 256)
    s = warpgroup_mma(q_tile, rings.k.index(stage).permute((1, 0)), gl.zeros([64, BLOCK_S], gl.float32, SCORES),
                      use_acc=False, is_async=True)  # fmt: skip
    bar_arrive(TURNS + (ME + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(rings.k_empty.index(stage))
    if SOFT_CAP:
        s = tanh(s * n.inner)
    s = hide(s, low, high, first_key, BLOCK_S, MASK == "window", True)
    m, shrink = _maxima(s, m, n)
    new, l = _softmax(s, m, shrink, l, n, BLOCK_S)
    return new, shrink, m, l


@gluon.jit
def _step(q_tile, rings, i, p, acc, m, l, low, high, first_key, MASKED: gl.constexpr, FIXED_MAX: gl.constexpr, n,
          ME: gl.constexpr, BLOCK_S: gl.constexpr, MASK: gl.constexpr, SOFT_CAP: gl.constexpr, CONSUMERS: gl.constexpr,
          STAGES: gl.constexpr, SCORES: gl.constexpr, ACC: gl.constexpr, PROBABILITIES: gl.constexpr):  # fmt: skip
    """Key tile i of the rings: its scores and softmax, and P V of the tile before it."""
    stage, before = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(rings.k_full.index(stage), (i // STAGES) & 1)
    bar_sync(TURNS + ME, 256)
    s = warpgroup_mma(q_tile, rings.k.index(stage).permute((1, 0)), gl.zeros([64, BLOCK_S], gl.float32, SCORES),
                      use_acc=False, is_async=True)  # fmt: skip
    mbarrier.wait(rings.v_full.index(before), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, rings.v.index(before), acc, is_async=True)
    bar_arrive(TURNS + (ME + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(rings.k_empty.index(stage))
    if SOFT_CAP:
        s = tanh(s * n.inner)
    if MASKED:
        s = hide(s, low, high, first_key, BLOCK_S, MASK == "window", True)
    if FIXED_MAX:
        new = exp2(s * n.scale - m[:, None])
        l += _row_sum(new, BLOCK_S)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(rings.v_empty.index(before))
    else:
        m, shrink = _maxima(s, m, n)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(rings.v_empty.index(before))
        acc = rescale(acc, gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None])
        new, l = _softmax(s, m, shrink, l, n, BLOCK_S)
    return in_pairs(gl.convert_layout(new.to(rings.v.dtype), PROBABILITIES)), acc, m, l


@gluon.jit
def _consume_tile(output, lse, rings, block, b, h, done, again, n, ME: gl.constexpr, MASK: gl.constexpr,
                  SOFT_CAP: gl.constexpr, BLOCK_S: gl.constexpr, E: gl.constexpr, CONSUMERS: gl.constexpr,
                  STAGES: gl.constexpr, PERSISTENT: gl.constexpr, FIXED_MAX: gl.constexpr,
                  OWN_OUTPUT: gl.constexpr):  # fmt: skip
    """64 queries of a tile, those from 64 ME on. `lse` stands where the head's numbers begin. Returns how many tiles of
    keys the rings have seen."""
    BLOCK_T: gl.constexpr = CONSUMERS * 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, BLOCK_S, 16])  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16])
    PROBABILITIES: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    q_tile, out_tile = rings.q.index(ME), rings.output.index(ME)
    tiles = key_tiles(block, n, BLOCK_T, BLOCK_S, MASK)
    count = tiles[3]
    masked = tiles[1] + tiles[2]
    if FIXED_MAX:  # again: with every maximum, in the loop that has a mask
        masked = gl.where(again, count, masked)
    first = block * BLOCK_T + ME * 64
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    low = rows + (n.shift - n.left)
    if MASK == "full":
        high = rows * 0 + n.S
    else:
        high = gl.minimum(rows + (n.shift + n.right + 1), n.S)
    acc = gl.zeros([64, E], gl.float32, ACC)
    m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    l = _row_sum(gl.zeros([64, BLOCK_S], gl.float32, SCORES), BLOCK_S)
    new, shrink, m, l = _scores(q_tile, rings, done, m, l, low, high, (tiles[0] - 1) * BLOCK_S, n, ME,
                                BLOCK_S, MASK, SOFT_CAP, CONSUMERS, STAGES, SCORES)  # fmt: skip
    p = in_pairs(gl.convert_layout(new.to(rings.v.dtype), PROBABILITIES))
    # a loop for each kind of tile, so that the one that matters has no mask
    for i in range(1, masked):
        p, acc, m, l = _step(q_tile, rings, done + i, p, acc, m, l, low, high, key_tile(i, tiles, MASK) * BLOCK_S, True,
                             False, n, ME, BLOCK_S, MASK, SOFT_CAP, CONSUMERS, STAGES, SCORES, ACC,
                             PROBABILITIES)  # fmt: skip
    for i in range(masked, count):
        p, acc, m, l = _step(q_tile, rings, done + i, p, acc, m, l, low, high, 0, False, FIXED_MAX, n, ME, BLOCK_S,
                             MASK, SOFT_CAP, CONSUMERS, STAGES, SCORES, ACC, PROBABILITIES)  # fmt: skip
    done += count
    l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, SCORES))
    if FIXED_MAX:
        rings.sums.index(ME).store(l_row)
    if PERSISTENT and OWN_OUTPUT:
        mbarrier.arrive(rings.q_empty.index(ME))
    before = (done - 1) % STAGES
    mbarrier.wait(rings.v_full.index(before), ((done - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, rings.v.index(before), acc, is_async=True)
    empty_row = l_row == 0.0  # which saw nothing: output 0, log-sum-exp minus infinity
    l_safe = gl.where(empty_row, 1.0, l_row)
    gl.store(
        lse + n.first_query + rows,
        gl.where(empty_row, float("-inf"), m * LN_2 + gl.log(l_safe)),
        mask=rows < n.T,
    )
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    if PERSISTENT:
        mbarrier.arrive(rings.v_empty.index(before))
        stored()  # what a tile that is done again has stored, too
    acc = acc * gl.convert_layout(1.0 / l_safe, gl.SliceLayout(1, ACC))[:, None]
    out_tile.store(acc.to(output.dtype))
    fence_async_shared()
    store_rows(output, b, h, first, 0, n.first_query, n.T, out_tile)
    if PERSISTENT and not OWN_OUTPUT:
        tma.store_wait(0)
        mbarrier.arrive(rings.q_empty.index(ME))
    return done


@gluon.jit
def _next_tile(rings, turn, ME: gl.constexpr):
    """The tile whose queries are there."""
    mbarrier.wait(rings.q_full.index(ME), turn & 1)
    return told(rings, 0)


@gluon.jit
def _consume(output, lse, rings, n, ME: gl.constexpr, MASK: gl.constexpr, DOCUMENTS: gl.constexpr,
             SOFT_CAP: gl.constexpr, BLOCK_S: gl.constexpr, E: gl.constexpr, CONSUMERS: gl.constexpr,
             STAGES: gl.constexpr, PERSISTENT: gl.constexpr, FIXED_MAX: gl.constexpr,
             OWN_OUTPUT: gl.constexpr):  # fmt: skip
    """A warpgroup that computes."""
    BLOCK_T: gl.constexpr = CONSUMERS * 64
    if ME == CONSUMERS - 1:
        bar_arrive(TURNS, 256)
    if PERSISTENT:
        done = 0
        turn = 0
        tile = _next_tile(rings, turn, ME)
        while tile < gl.cdiv(n.T, BLOCK_T) * n.heads:
            block, head, b, h = head_of(gl.where(tile < 0, -1 - tile, tile), n, BLOCK_T, MASK)
            numbers = _rows_of(lse, head, n)
            if DOCUMENTS:
                span, own = told_document(rings)
                done = _consume_tile(output, numbers, rings, own, b, h, done, False, inside(n, span), ME, MASK,
                                     SOFT_CAP, BLOCK_S, E, CONSUMERS, STAGES, PERSISTENT, FIXED_MAX,
                                     OWN_OUTPUT)  # fmt: skip
            else:
                done = _consume_tile(output, numbers, rings, block, b, h, done, tile < 0, n, ME, MASK, SOFT_CAP,
                                     BLOCK_S, E, CONSUMERS, STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)  # fmt: skip
            turn += 1
            tile = _next_tile(rings, turn, ME)
    else:
        block, head, b, h = head_of(gl.program_id(0), n, BLOCK_T, MASK)
        mbarrier.wait(rings.q_full.index(ME), 0)
        _consume_tile(output, _rows_of(lse, head, n), rings, block, b, h, 0, False, n, ME, MASK, SOFT_CAP, BLOCK_S, E,
                      CONSUMERS, STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)  # fmt: skip
    if ME == 0:
        bar_sync(TURNS, 256)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "H", "group", "T", "S", "left", "right", "shift"])
def hopper_forward_kernel(q, k, v, near, output, lse, counter, bounds, document, heads, H, group, T, S, left, right,
                          shift, scale, inner, MASK: gl.constexpr, DOCUMENTS: gl.constexpr, SOFT_CAP: gl.constexpr,
                          BLOCK_S: gl.constexpr, D: gl.constexpr, E: gl.constexpr, CONSUMERS: gl.constexpr,
                          STAGES: gl.constexpr, PERSISTENT: gl.constexpr, FIXED_MAX: gl.constexpr,
                          OWN_OUTPUT: gl.constexpr, REGISTERS: gl.constexpr, FEW_REGISTERS: gl.constexpr):  # fmt: skip
    """A program has a tile of CONSUMERS x 64 queries or, PERSISTENT, takes one after another, the next one that no
    other program has: `counter` counts from 0."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 64, D], SHARED)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_S, D], SHARED)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_S, E], SHARED)
    if OWN_OUTPUT:
        out_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 64, E], SHARED)
    else:
        out_tiles = q_tiles
    rings = Rings(
        gl.allocate_shared_memory(gl.int32, [7, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        q_tiles, k_tiles, v_tiles, out_tiles,
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )  # fmt: skip
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(rings.q_full.index(i), count=1)
        mbarrier.init(rings.q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(rings.k_full.index(i), count=1)
        mbarrier.init(rings.k_empty.index(i), count=CONSUMERS)
        mbarrier.init(rings.v_full.index(i), count=1)
        mbarrier.init(rings.v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    n = Numbers(heads, H, group, T, S, left, right, shift, scale, inner, 0, 0)
    # each list of arguments in its place: a name would turn the constants into tensors
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (output, lse, rings, n, gl.constexpr(0), MASK, DOCUMENTS, SOFT_CAP, BLOCK_S, E, CONSUMERS,
                        STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)),
            (_consume, (output, lse, rings, n, gl.constexpr(1), MASK, DOCUMENTS, SOFT_CAP, BLOCK_S, E, CONSUMERS,
                        STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)),
            (produce, (q, k, v, near, counter, bounds, document, rings, n, MASK, DOCUMENTS, BLOCK_S, CONSUMERS, STAGES,
                       PERSISTENT, FIXED_MAX)),
        ], [4, 1], [REGISTERS, FEW_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (output, lse, rings, n, gl.constexpr(0), MASK, DOCUMENTS, SOFT_CAP, BLOCK_S, E, CONSUMERS,
                        STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)),
            (_consume, (output, lse, rings, n, gl.constexpr(1), MASK, DOCUMENTS, SOFT_CAP, BLOCK_S, E, CONSUMERS,
                        STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)),
            (_consume, (output, lse, rings, n, gl.constexpr(2), MASK, DOCUMENTS, SOFT_CAP, BLOCK_S, E, CONSUMERS,
                        STAGES, PERSISTENT, FIXED_MAX, OWN_OUTPUT)),
            (produce, (q, k, v, near, counter, bounds, document, rings, n, MASK, DOCUMENTS, BLOCK_S, CONSUMERS, STAGES,
                       PERSISTENT, FIXED_MAX)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, FEW_REGISTERS])  # fmt: skip


def owns_output(row: Forward, d: int, e: int, persistent: bool) -> bool:
    """Whether the output has tiles beside the others: the next queries can then arrive early. Else it takes the place
    of its queries, if that has the same shape."""
    tiles = 64 * row.consumers * (d + e) + row.stages * row.block_s * (d + e)
    return d != e or (persistent and 2 * tiles + 2048 <= SHARED_BYTES)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, E] stored as [B, T, H, E], log-sum-exp [B, H, T] fp32). Shapes as `flash_attention`.

    What it takes: `choice.choose_implementation`.
    """
    (B, H, T, D), (G, S, E) = q.shape, v.shape[1:]
    documents = terms.bounds is not None
    output = empty(q, B, T, H, E, before=64 * H * E if documents else 0).transpose(1, 2)
    lse = empty(q, B, H, T, dtype=torch.float32)
    d, e = tile_width(D), tile_width(E)
    row = FORWARD[max(d, e)]
    block_t = 64 * row.consumers
    mask, cap = kind_of_bounds(terms), terms.soft_cap
    tiles = blocks(T, block_t) * B * H
    programs = min(tiles, multiprocessors(q.device))
    persistent = programs < tiles or documents
    fixed_max = persistent and not documents and torch.finfo(q.dtype).max > MANY.value
    counter = zeros(q, 1, dtype=torch.int32) if persistent else lse  # which then is not read
    q, k, v = readable(q), readable(k), readable(v)
    tables, near = (lse, lse), lse  # which then are not read
    values, answer = describe(v, row.block_s, e), describe(output, 64, e)
    if documents:
        tables = terms.bounds.contiguous(), terms.query_document.contiguous()
        (first,) = first_rows(q, k, v, None, 64, row.block_s)
        near = describe_cut(first, row.block_s, e, rows_before=True)
        values = describe_cut(v, row.block_s, e, rows_before=False)
        answer = describe_cut(output, 64, e, rows_before=True)
    run(
        hopper_forward_kernel, q.device, programs, Launch(block_t, row.block_s, 4, row.stages),
        ("hopper forward", q.device, q.dtype, D, E, mask, cap > 0, persistent, documents, kinds_of(tables)),
        describe(q, 64, d), describe(k, row.block_s, d), values, near, answer, lse, counter, *tables, B * H, H, H // G,
        T, S, terms.left, terms.right, shift_of(terms, T, S), (cap or terms.scale) * LOG2_E.value,
        terms.scale / (cap or 1.0), mask, documents, cap > 0, row.block_s, d, e, row.consumers, row.stages, persistent,
        fixed_max, owns_output(row, d, e, persistent), row.registers, row.few_registers,
    )  # fmt: skip
    return output, lse
