"""The gradient of a bias: dS, summed over what the bias was broadcast over, in a fixed order.

No T x S matrix exists that is larger than the bias itself: a program holds one tile of the bias's gradient and visits
every tile of dS that belongs to it, of other batch rows and heads, and of other queries or keys where the bias has a
dimension of 1 there. Few tiles are shared among more programs, each with a part of the batch rows and heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import Call, blocks, empty
from flash_train.ops.kernels.scores import drop, dropout_base, key_keys, log2_unit, modify, place_of, query_keys
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import (
    ALIGNMENT_TOLD,
    NOT_SPECIALIZED,
    Constants,
    Extras,
    Numbers,
    is_seen,
    load_tile,
    multiply,
    row_numbers,
    span_of,
    visible_keys,
    whole,
)

PROGRAMS = 512
"""As many are started where the bias is small: a few for each multiprocessor of a large GPU."""


@triton.jit
def _spans(document, b, positions, length, n, x, c):
    """The spans of positions, elementwise."""
    if c.MASK == "documents":
        row = document + b.to(tl.int64) * length
        return span_of(tl.load(row + positions, mask=positions < length, other=0), n, x)
    else:
        return whole(n)


@triton.jit
def _dS(q, k, v, do, lse, delta, q_strides, k_strides, v_strides, do_strides, b, h, first, first_key, n, x, c):
    """[BLOCK_T, BLOCK_S] of the gradient of the scores that the bias was added to; 0 where nothing is seen."""
    g = h // (n.H // n.G)
    t = first + tl.arange(0, c.BLOCK_T)
    rows, keys = t[:, None], first_key + tl.arange(0, c.BLOCK_S)[None, :]
    span, key_span = _spans(x.query_document, b, rows, n.T, n, x, c), _spans(x.key_document, b, keys, n.S, n, x, c)
    low, high = visible_keys(rows, span, n, c)
    seen = is_seen(keys, low, high, c) & (rows < n.T)
    ds = tl.zeros([c.BLOCK_T, c.BLOCK_S], tl.float32)
    if tl.max(seen.to(tl.int32)) > 0:
        q_tile = load_tile(q, q_strides, b, h, first, n.T, c.D, c.BLOCK_T, c.BLOCK_D, c.WIDTH, False)
        k_tile = load_tile(k, k_strides, b, g, first_key, n.S, c.D, c.BLOCK_S, c.BLOCK_D, c.WIDTH, False)
        at = place_of(b, h, span, n, x, c)
        s, _ = modify(multiply(q_tile, k_tile.T, c), first, first_key, rows, keys, at, span, n, x, c)
        L, delta_rows = row_numbers(lse, delta, at.head, t, n.T, n)
        p = tl.exp2(s * log2_unit(n, c) - L[:, None])
        do_tile = load_tile(do, do_strides, b, h, first, n.T, c.E, c.BLOCK_T, c.BLOCK_E, c.WIDTH, False)
        v_tile = load_tile(v, v_strides, b, g, first_key, n.S, c.E, c.BLOCK_S, c.BLOCK_E, c.WIDTH, False)
        query_bits = query_keys(at.base, rows, span, c)
        key_bits = key_keys(dropout_base(b, h, key_span, x, c), keys, key_span, c)
        dp = drop(multiply(do_tile, v_tile.T, c), query_bits, key_bits, n, c)
        if c.DROPOUT:
            dp *= n.keep_scale
        ds = tl.where(seen, p * (dp - delta_rows[:, None]), 0.0)
    return ds


@triton.jit
def _bias_program(q, k, v, do, lse, delta, dbias, q_strides, k_strides, v_strides, do_strides, n, x, c, BATCHES,
                  HEADS, parts, ALL_ROWS: tl.constexpr, ALL_KEYS: tl.constexpr):  # fmt: skip
    """One program: a tile of `dbias` [parts, BATCHES, HEADS, T or 1, S or 1] fp32; ALL_ROWS and ALL_KEYS mean the 1."""
    row_blocks, key_blocks = tl.cdiv(n.T, c.BLOCK_T), tl.cdiv(n.S, c.BLOCK_S)
    own_rows, own_keys = 1 if ALL_ROWS else row_blocks, 1 if ALL_KEYS else key_blocks
    rest = tl.program_id(0)
    key_block, rest = rest % own_keys, rest // own_keys
    row_block, rest = rest % own_rows, rest // own_rows
    own_h, rest = rest % HEADS, rest // HEADS
    own_b, part = rest % BATCHES, rest // BATCHES
    more_heads = n.H // HEADS  # HEADS is n.H or 1, and so is BATCHES
    pairs = n.heads // n.H // BATCHES * more_heads

    total = tl.zeros([c.BLOCK_T, c.BLOCK_S], tl.float32)
    for pair in tl.range(part, pairs, parts):
        b = own_b + pair // more_heads
        h = own_h + pair % more_heads
        for i in tl.range(0, row_blocks if ALL_ROWS else 1):
            for j in tl.range(0, key_blocks if ALL_KEYS else 1):
                total += _dS(q, k, v, do, lse, delta, q_strides, k_strides, v_strides, do_strides, b, h,
                             (row_block + i) * c.BLOCK_T, (key_block + j) * c.BLOCK_S, n, x, c)  # fmt: skip

    rows, keys = row_block * c.BLOCK_T + tl.arange(0, c.BLOCK_T), key_block * c.BLOCK_S + tl.arange(0, c.BLOCK_S)
    height, width = 1 if ALL_ROWS else n.T, 1 if ALL_KEYS else n.S
    at = dbias + ((part * BATCHES + own_b) * HEADS + own_h).to(tl.int64) * height * width
    if ALL_ROWS and ALL_KEYS:
        tl.store(at, tl.sum(total))
    elif ALL_ROWS:
        tl.store(at + keys, tl.sum(total, 0), mask=keys < n.S)
    elif ALL_KEYS:
        tl.store(at + rows, tl.sum(total, 1), mask=rows < n.T)
    else:
        tl.store(at + rows.to(tl.int64)[:, None] * n.S + keys[None, :], total,
                 mask=(rows < n.T)[:, None] & (keys < n.S)[None, :])  # fmt: skip


@triton.jit(
    do_not_specialize=[*NOT_SPECIALIZED, "BATCHES", "HEADS", "parts"], do_not_specialize_on_alignment=ALIGNMENT_TOLD
)
def bias_kernel(q, k, v, do, lse, delta, dbias, q_strides, k_strides, v_strides, do_strides, bias, bias_strides,
                allowed, allowed_strides, slopes, sinks, seed, bounds, query_document, key_document, heads, H, G, T,
                S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale, threshold, BATCHES, HEADS,
                parts, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr,
                SOFT_CAP: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr,
                PRECISION: tl.constexpr, UPCAST: tl.constexpr, ALL_ROWS: tl.constexpr,
                ALL_KEYS: tl.constexpr):  # fmt: skip
    """`_bias_program`, its arguments flat."""
    _bias_program(q, k, v, do, lse, delta, dbias, q_strides, k_strides, v_strides, do_strides,
                  Numbers(heads, H, G, T, S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale,
                          threshold),
                  Extras(bias, bias_strides, allowed, allowed_strides, slopes, sinks, seed, bounds, query_document,
                         key_document),
                  Constants(D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E, MASK, MODIFIED, SOFT_CAP, DENSE, DROPOUT,
                            WIDTH, PRECISION, UPCAST), BATCHES, HEADS, parts, ALL_ROWS, ALL_KEYS)  # fmt: skip


def bias_gradient(call: Call, inputs: list[Tensor], lse: Tensor, delta: Tensor, bias: Tensor) -> Tensor:
    """The bias's gradient, in its shape [B or 1, H or 1, T or 1, S or 1] and dtype. `inputs`: q, k, v, dO."""
    (B, H, T, _), S = inputs[0].shape, inputs[1].shape[2]
    batches, heads, rows, keys = bias.shape
    pairs = B // batches * (H // heads)
    partials: list[Tensor] = []

    def rest(launch: Launch) -> tuple[int, tuple[Tensor, ...], tuple[int, ...]]:
        tiles = batches * heads * (1 if rows < T else blocks(T, launch.block_t))
        tiles *= 1 if keys < S else blocks(S, launch.block_s)
        parts = max(1, min(pairs, PROGRAMS // tiles))
        partials[:] = [empty(lse, parts, *bias.shape)]
        return parts * tiles, (lse, delta, partials[0]), (batches, heads, parts)

    # a tile of queries by a tile of keys, as for dQ
    call.start("dq", bias_kernel, inputs, B * H, rest, flags=(rows < T, keys < S), by_copy_engine=False)
    return partials[0].sum(0).to(bias.dtype)
