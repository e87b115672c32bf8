"""The forward kernel (rung 4 of the ladder on the chip) and its launcher."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.features import Terms
from flash_train.ops.kernels.launch import Call, blocks, empty
from flash_train.ops.kernels.operands import readable
from flash_train.ops.kernels.scores import drop, key_keys, log2_unit, modify, place_of, queries_of, sink_of
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import (
    ALIGNMENT_TOLD,
    LN_2,
    LOWEST,
    MANY,
    NOT_SPECIALIZED,
    Constants,
    Extras,
    Numbers,
    documents_of,
    is_seen,
    key_tiles,
    load_tile,
    locate,
    multiply,
    multiply_add,
    span_of,
    store_tile,
    whole,
)


@triton.jit
def _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, start, end, at, span, n, x, c,
               MASKED: tl.constexpr, FIXED_MAX: tl.constexpr = False):  # fmt: skip
    """Keys start to end into the rows' state (m, l, acc), m in units of log2. Full and masked tiles share this body.
    FIXED_MAX: m stays as it is."""
    CUT: tl.constexpr = MASKED and c.MASK == "documents"
    unit = log2_unit(n, c)
    for first in tl.range(start, end, c.BLOCK_S):
        keys = first + tl.arange(0, c.BLOCK_S)[None, :]
        k_tile = load_tile(k, k_strides, at.b, at.g, first, span.end_key, c.D, c.BLOCK_S, c.BLOCK_D, c.WIDTH,
                           False)  # fmt: skip
        s = multiply(q_tile, k_tile.T, c)  # [BLOCK_T, BLOCK_S]
        s, _ = modify(s, queries.first, first, queries.rows, keys, at, span, n, x, c)
        if MASKED:
            s = tl.where(is_seen(keys, queries.low, queries.high, c), s, float("-inf"))
        if FIXED_MAX:
            m_new = m
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - m_new[:, None])  # [BLOCK_T, BLOCK_S]
        if not FIXED_MAX:
            shrink = tl.exp2(m - m_new)
            l = l * shrink
            acc = acc * shrink[:, None]
        l += tl.sum(p, 1)
        p = drop(p, queries.bits, key_keys(at.base, keys, span, c), n, c)
        v_tile = load_tile(v, v_strides, at.b, at.g, first, span.end_key, c.E, c.BLOCK_S, c.BLOCK_E, c.WIDTH, CUT)
        acc = multiply_add(p.to(v_tile.dtype), v_tile, acc, c)  # [BLOCK_T, BLOCK_E]
        m = m_new
    return acc, m, l


@triton.jit
def _attend(q_tile, k, v, output, lse, k_strides, v_strides, b, h, first, span, n, x, c):
    """One tile of queries against all keys of the span that they see; writes the rows that belong to the span."""
    at = place_of(b, h, span, n, x, c)
    queries = queries_of(first, at, span, n, c)
    FIXED_MAX: tl.constexpr = (c.MASK == "full" or c.MASK == "causal") and q_tile.dtype != tl.float16
    start, full, full_end, end = key_tiles(first, span, n, c, FIXED_MAX)
    m = tl.full([c.BLOCK_T], LOWEST, tl.float32)
    l = tl.zeros([c.BLOCK_T], tl.float32)
    acc = tl.zeros([c.BLOCK_T, c.BLOCK_E], tl.float32)
    if c.MASK == "window" or c.MASK == "documents":
        acc, m, l = _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, start, full, at, span, n, x, c,
                               True)  # fmt: skip
    if FIXED_MAX:
        acc, m, l = _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, full_end, end, at, span, n, x,
                               c, True)  # fmt: skip
        acc, m, l = _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, full, full_end, at, span, n, x,
                               c, False, True)  # fmt: skip
        if tl.min((l < MANY).to(tl.int32), 0) == 0:  # a score was far above its row's first ones: with every maximum
            m = tl.full([c.BLOCK_T], LOWEST, tl.float32)
            l = tl.zeros([c.BLOCK_T], tl.float32)
            acc = tl.zeros([c.BLOCK_T, c.BLOCK_E], tl.float32)
            acc, m, l = _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, full, end, at, span, n, x,
                                   c, True)  # fmt: skip
    elif not c.DENSE:
        acc, m, l = _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, full, full_end, at, span, n, x,
                               c, False)  # fmt: skip
        acc, m, l = _fold_keys(acc, m, l, q_tile, queries, k, v, k_strides, v_strides, full_end, end, at, span, n, x,
                               c, True)  # fmt: skip
    # the sink, a key whose value is 0, comes last: without one (minus infinity) nothing changes
    sink = sink_of(b, h, n, x)
    m_new = tl.maximum(m, sink)
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.exp2(sink - m_new)
    m = tl.where(l == 0.0, float("-inf"), m_new)
    l_safe = tl.where(l == 0.0, 1.0, l)  # a row that saw nothing: output 0, log-sum-exp minus infinity
    acc = acc * shrink[:, None] / l_safe[:, None]
    if c.DROPOUT:
        acc *= n.keep_scale
    offset = (b.to(tl.int64) * n.T * n.H + h) * c.E  # of [B, T, H, E]
    store_tile(output, offset, n.H * c.E, first, span.first_query, span.end_query, acc, c.E, c.BLOCK_T, c.BLOCK_E)
    t = first + tl.arange(0, c.BLOCK_T)
    mine = (t >= span.first_query) & (t < span.end_query)
    tl.store(lse + at.head.to(tl.int64) * n.T + t, m * LN_2 + tl.log(l_safe), mask=mine)


@triton.jit
def _forward_program(q, k, v, output, lse, q_strides, k_strides, v_strides, n, x, c):
    """One program: BLOCK_T queries of one head against all keys that they see."""
    block, head = locate(tl.cdiv(n.T, c.BLOCK_T), n.heads, c.MASK != "full")
    b = head // n.H
    h = head - b * n.H
    first = block * c.BLOCK_T
    q_tile = load_tile(q, q_strides, b, h, first, n.T, c.D, c.BLOCK_T, c.BLOCK_D, c.WIDTH, False)
    if c.MASK == "documents":
        number, end = documents_of(x.query_document, b, first, n.T, c.BLOCK_T)
        for document in tl.range(number, end):
            _attend(q_tile, k, v, output, lse, k_strides, v_strides, b, h, first, span_of(document, n, x), n, x, c)
    else:
        _attend(q_tile, k, v, output, lse, k_strides, v_strides, b, h, first, whole(n), n, x, c)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ALIGNMENT_TOLD)
def forward_kernel(q, k, v, output, lse, q_strides, k_strides, v_strides, bias, bias_strides, allowed,
                   allowed_strides, slopes, sinks, seed, bounds, query_document, key_document, heads, H, G, T, S,
                   left, right, shift, head_stride, flags, scale, soft_cap, keep_scale, threshold, D: tl.constexpr,
                   E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_E: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFT_CAP: tl.constexpr,
                   DENSE: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
                   UPCAST: tl.constexpr):  # fmt: skip
    """`_forward_program`, its arguments flat."""
    _forward_program(q, k, v, output, lse, q_strides, k_strides, v_strides,
                     Numbers(heads, H, G, T, S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale,
                             threshold),
                     Extras(bias, bias_strides, allowed, allowed_strides, slopes, sinks, seed, bounds, query_document,
                            key_document),
                     Constants(D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E, MASK, MODIFIED, SOFT_CAP, DENSE, DROPOUT,
                               WIDTH, PRECISION, UPCAST))  # fmt: skip


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, E] stored as [B, T, H, E], log-sum-exp [B, H, T] fp32). Shapes as `flash_attention`.

    `launch` overrides the launch table, for tuning.
    """
    B, H, T, _ = q.shape
    output = empty(q, B, T, H, v.shape[-1], dtype=terms.output_dtype).transpose(1, 2)
    lse = empty(q, B, H, T, dtype=torch.float32)
    call = Call(q, v, terms, lse)
    call.start(
        "forward", forward_kernel, [readable(x) for x in (q, k, v)], B * H,
        lambda launch: (blocks(T, launch.block_t) * B * H, (output, lse), ()), override=launch,
    )  # fmt: skip
    return output, lse
