"""The backward kernels (rung 5 of the ladder on the chip) and their launcher.

Two kernels, each recomputing P = exp(S - L): one holds a tile of keys while the queries that see it pass by (dK, dV),
one holds a tile of queries while their keys pass by (dQ). Seven products where one pass with atomic additions needs
five, and the same bits on every run. The heads of a group are a loop inside the first kernel, so dK and dV are never
expanded. The gradient of a bias is a pass of its own, made where it is asked for (`bias.py`).
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.features import Terms
from flash_train.ops.kernels.bias import bias_gradient
from flash_train.ops.kernels.launch import Call, block_size, blocks, empty, run
from flash_train.ops.kernels.operands import as_numbers, large, readable, vector
from flash_train.ops.kernels.scores import drop, key_keys, log2_unit, modify, place_of, queries_of, query_keys
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import (
    ALIGNMENT_TOLD,
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
    query_tiles,
    row_deltas,
    row_numbers,
    span_of,
    store_tile,
    visible_keys,
    whole,
)
from flash_train.ops.tiled import sinks_gradient

DELTA = Launch(block_t=64, block_s=0, warps=4, stages=1)
"""`delta_kernel` reads each element once."""


@triton.jit(do_not_specialize=["H", "T", "dl_b", "dl_h", "dl_t"], do_not_specialize_on_alignment=["do", "output"])
def delta_kernel(do, output, grad_lse, delta, do_strides, o_strides, dl_b, dl_h, dl_t, H, T,
                 E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, WIDTH: tl.constexpr,
                 HAS_GRAD_LSE: tl.constexpr):  # fmt: skip
    """delta = rowsum(dO * O) - dL, [B, H, T] fp32: one program, BLOCK_T rows of one head."""
    blocks = tl.cdiv(T, BLOCK_T)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) - head * blocks) * BLOCK_T
    b = head // H
    h = head - b * H
    rows = first + tl.arange(0, BLOCK_T)
    found = row_deltas(do, output, grad_lse, do_strides, o_strides, dl_b, dl_h, dl_t, b, h, first, T, E, BLOCK_T,
                       BLOCK_E, WIDTH, HAS_GRAD_LSE)  # fmt: skip
    tl.store(delta + head.to(tl.int64) * T + rows, found, mask=rows < T)


@triton.jit
def _fold_queries(dk, dv, k_tile, v_tile, first_key, keys, q, do, lse, delta, q_strides, do_strides, start, end, at,
                  span, n, x, c, MASKED: tl.constexpr):  # fmt: skip
    """Adds what queries start to end of one head give to dK and dV of a tile of keys; tiles are transposed: [S, T]."""
    CUT: tl.constexpr = MASKED and c.MASK == "documents"
    unit = log2_unit(n, c)
    key_bits = key_keys(at.base, keys, span, c)
    for first in tl.range(start, end, c.BLOCK_T):
        t = first + tl.arange(0, c.BLOCK_T)
        rows = t[None, :]
        q_tile = load_tile(q, q_strides, at.b, at.h, first, span.end_query, c.D, c.BLOCK_T, c.BLOCK_D, c.WIDTH,
                           CUT)  # fmt: skip
        L, delta_rows = row_numbers(lse, delta, at.head, t, span.end_query, n)
        s = multiply(k_tile, q_tile.T, c)  # [BLOCK_S, BLOCK_T]
        s, derivative = modify(s, first, first_key, rows, keys, at, span, n, x, c)
        p = tl.exp2(s * unit - L[None, :])
        if MASKED:
            low, high = visible_keys(rows, span, n, c)
            if CUT:  # what the bias has for a neighbour's rows may be NaN, and L = inf makes no 0 of it
                high = tl.where(rows < span.end_query, high, low)
            p = tl.where(is_seen(keys, low, high, c), p, 0.0)
        do_tile = load_tile(do, do_strides, at.b, at.h, first, span.end_query, c.E, c.BLOCK_T, c.BLOCK_E, c.WIDTH,
                            CUT)  # fmt: skip
        query_bits = query_keys(at.base, rows, span, c)
        dv = multiply_add(drop(p, query_bits, key_bits, n, c).to(do_tile.dtype), do_tile, dv, c)  # [BLOCK_S, BLOCK_E]
        dp = drop(multiply(v_tile, do_tile.T, c), query_bits, key_bits, n, c)  # [BLOCK_S, BLOCK_T]
        if c.DROPOUT:
            dp *= n.keep_scale
        ds = p * (dp - delta_rows[None, :]) * derivative
        dk = multiply_add(ds.to(q_tile.dtype), q_tile, dk, c)  # [BLOCK_S, BLOCK_D]
    return dk, dv


@triton.jit
def _gather(k_tile, v_tile, q, do, lse, delta, dk, dv, q_strides, do_strides, b, g, first, span, n, x, c):
    """One tile of keys against all queries of the span that see it; writes the keys that belong to the span."""
    keys = (first + tl.arange(0, c.BLOCK_S))[:, None]
    start, full, full_end, end = query_tiles(first, span, n, c)
    dk_acc = tl.zeros([c.BLOCK_S, c.BLOCK_D], tl.float32)
    dv_acc = tl.zeros([c.BLOCK_S, c.BLOCK_E], tl.float32)
    for member in tl.range(0, n.H // n.G):
        at = place_of(b, g * (n.H // n.G) + member, span, n, x, c)
        if c.MASK != "full":
            dk_acc, dv_acc = _fold_queries(dk_acc, dv_acc, k_tile, v_tile, first, keys, q, do, lse, delta, q_strides,
                                           do_strides, start, full, at, span, n, x, c, True)  # fmt: skip
        if not c.DENSE:
            dk_acc, dv_acc = _fold_queries(dk_acc, dv_acc, k_tile, v_tile, first, keys, q, do, lse, delta, q_strides,
                                           do_strides, full, full_end, at, span, n, x, c, False)  # fmt: skip
            if c.MASK == "window" or c.MASK == "documents":
                dk_acc, dv_acc = _fold_queries(dk_acc, dv_acc, k_tile, v_tile, first, keys, q, do, lse, delta,
                                               q_strides, do_strides, full_end, end, at, span, n, x, c,
                                               True)  # fmt: skip
    if c.DROPOUT:
        dv_acc *= n.keep_scale
    row = (b.to(tl.int64) * n.G + g) * n.S  # of [B, G, S, D] and [B, G, S, E]
    dk_acc *= n.scale
    store_tile(dk, row * c.D, c.D, first, span.first_key, span.end_key, dk_acc, c.D, c.BLOCK_S, c.BLOCK_D)
    store_tile(dv, row * c.E, c.E, first, span.first_key, span.end_key, dv_acc, c.E, c.BLOCK_S, c.BLOCK_E)


@triton.jit
def _dkdv_program(q, k, v, do, lse, delta, dk, dv, q_strides, k_strides, v_strides, do_strides, n, x, c):
    """One program: BLOCK_S keys of one key head against every query that sees them, of all the group's heads."""
    block, key_head = locate(tl.cdiv(n.S, c.BLOCK_S), n.heads, False)  # causal: the first keys have most rows
    b = key_head // n.G
    g = key_head - b * n.G
    first = block * c.BLOCK_S
    k_tile = load_tile(k, k_strides, b, g, first, n.S, c.D, c.BLOCK_S, c.BLOCK_D, c.WIDTH, False)
    v_tile = load_tile(v, v_strides, b, g, first, n.S, c.E, c.BLOCK_S, c.BLOCK_E, c.WIDTH, False)
    if c.MASK == "documents":
        number, end = documents_of(x.key_document, b, first, n.S, c.BLOCK_S)
        for document in tl.range(number, end):
            _gather(k_tile, v_tile, q, do, lse, delta, dk, dv, q_strides, do_strides, b, g, first,
                    span_of(document, n, x), n, x, c)  # fmt: skip
    else:
        _gather(k_tile, v_tile, q, do, lse, delta, dk, dv, q_strides, do_strides, b, g, first, whole(n), n, x, c)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ALIGNMENT_TOLD)
def dkdv_kernel(q, k, v, do, lse, delta, dk, dv, q_strides, k_strides, v_strides, do_strides, bias, bias_strides,
                allowed, allowed_strides, slopes, sinks, seed, bounds, query_document, key_document, heads, H, G, T,
                S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale, threshold, D: tl.constexpr,
                E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_E: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFT_CAP: tl.constexpr,
                DENSE: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
                UPCAST: tl.constexpr):  # fmt: skip
    """`_dkdv_program`, its arguments flat."""
    _dkdv_program(q, k, v, do, lse, delta, dk, dv, q_strides, k_strides, v_strides, do_strides,
                  Numbers(heads, H, G, T, S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale,
                          threshold),
                  Extras(bias, bias_strides, allowed, allowed_strides, slopes, sinks, seed, bounds, query_document,
                         key_document),
                  Constants(D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E, MASK, MODIFIED, SOFT_CAP, DENSE, DROPOUT,
                            WIDTH, PRECISION, UPCAST))  # fmt: skip


@triton.jit
def _fold_keys(dq, q_tile, do_tile, L, delta_rows, queries, k, v, k_strides, v_strides, start, end, at, span, n, x, c,
               MASKED: tl.constexpr):  # fmt: skip
    """Adds what keys start to end give to dQ of a tile of queries."""
    CUT: tl.constexpr = MASKED and c.MASK == "documents"
    unit = log2_unit(n, c)
    for first in tl.range(start, end, c.BLOCK_S):
        keys = first + tl.arange(0, c.BLOCK_S)[None, :]
        k_tile = load_tile(k, k_strides, at.b, at.g, first, span.end_key, c.D, c.BLOCK_S, c.BLOCK_D, c.WIDTH, CUT)
        s = multiply(q_tile, k_tile.T, c)  # [BLOCK_T, BLOCK_S]
        s, derivative = modify(s, queries.first, first, queries.rows, keys, at, span, n, x, c)
        p = tl.exp2(s * unit - L[:, None])
        if MASKED:
            p = tl.where(is_seen(keys, queries.low, queries.high, c), p, 0.0)
        v_tile = load_tile(v, v_strides, at.b, at.g, first, span.end_key, c.E, c.BLOCK_S, c.BLOCK_E, c.WIDTH, CUT)
        dp = drop(multiply(do_tile, v_tile.T, c), queries.bits, key_keys(at.base, keys, span, c), n, c)
        if c.DROPOUT:
            dp *= n.keep_scale
        ds = p * (dp - delta_rows[:, None]) * derivative  # [BLOCK_T, BLOCK_S]
        dq = multiply_add(ds.to(k_tile.dtype), k_tile, dq, c)  # [BLOCK_T, BLOCK_D]
    return dq


@triton.jit
def _collect(q_tile, do_tile, k, v, lse, delta, dq, k_strides, v_strides, b, h, first, span, n, x, c):
    """dQ of one tile of queries from all keys of the span that they see; writes the rows that belong to the span."""
    at = place_of(b, h, span, n, x, c)
    queries = queries_of(first, at, span, n, c)
    start, full, full_end, end = key_tiles(first, span, n, c, False)
    L, delta_rows = row_numbers(lse, delta, at.head, first + tl.arange(0, c.BLOCK_T), span.end_query, n)
    acc = tl.zeros([c.BLOCK_T, c.BLOCK_D], tl.float32)
    if c.MASK == "window" or c.MASK == "documents":
        acc = _fold_keys(acc, q_tile, do_tile, L, delta_rows, queries, k, v, k_strides, v_strides, start, full, at,
                         span, n, x, c, True)  # fmt: skip
    if not c.DENSE:
        acc = _fold_keys(acc, q_tile, do_tile, L, delta_rows, queries, k, v, k_strides, v_strides, full, full_end, at,
                         span, n, x, c, False)  # fmt: skip
        acc = _fold_keys(acc, q_tile, do_tile, L, delta_rows, queries, k, v, k_strides, v_strides, full_end, end, at,
                         span, n, x, c, True)  # fmt: skip
    row = at.head.to(tl.int64) * n.T  # of [B, H, T, D]
    acc *= n.scale
    store_tile(dq, row * c.D, c.D, first, span.first_query, span.end_query, acc, c.D, c.BLOCK_T, c.BLOCK_D)


@triton.jit
def _dq_program(q, k, v, do, lse, delta, dq, q_strides, k_strides, v_strides, do_strides, n, x, c):
    """One program: BLOCK_T queries of one head against all keys that they see."""
    block, head = locate(tl.cdiv(n.T, c.BLOCK_T), n.heads, c.MASK != "full")
    b = head // n.H
    h = head - b * n.H
    first = block * c.BLOCK_T
    q_tile = load_tile(q, q_strides, b, h, first, n.T, c.D, c.BLOCK_T, c.BLOCK_D, c.WIDTH, False)
    do_tile = load_tile(do, do_strides, b, h, first, n.T, c.E, c.BLOCK_T, c.BLOCK_E, c.WIDTH, False)
    if c.MASK == "documents":
        number, end = documents_of(x.query_document, b, first, n.T, c.BLOCK_T)
        for document in tl.range(number, end):
            _collect(q_tile, do_tile, k, v, lse, delta, dq, k_strides, v_strides, b, h, first,
                     span_of(document, n, x), n, x, c)  # fmt: skip
    else:
        _collect(q_tile, do_tile, k, v, lse, delta, dq, k_strides, v_strides, b, h, first, whole(n), n, x, c)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=ALIGNMENT_TOLD)
def dq_kernel(q, k, v, do, lse, delta, dq, q_strides, k_strides, v_strides, do_strides, bias,
              bias_strides, allowed, allowed_strides, slopes, sinks, seed, bounds, query_document, key_document,
              heads, H, G, T, S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale, threshold,
              D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK_E: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFT_CAP: tl.constexpr,
              DENSE: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
              UPCAST: tl.constexpr):  # fmt: skip
    """`_dq_program`, its arguments flat."""
    _dq_program(q, k, v, do, lse, delta, dq, q_strides, k_strides, v_strides, do_strides,
                Numbers(heads, H, G, T, S, left, right, shift, head_stride, flags, scale, soft_cap, keep_scale,
                        threshold),
                Extras(bias, bias_strides, allowed, allowed_strides, slopes, sinks, seed, bounds, query_document,
                       key_document),
                Constants(D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E, MASK, MODIFIED, SOFT_CAP, DENSE, DROPOUT,
                          WIDTH, PRECISION, UPCAST))  # fmt: skip


def attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    needs_bias: bool,
    launches: tuple[Launch | None, Launch | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dQ, dK, dV, d bias, d sinks) as the inputs; None where there is no such input or it is not needed.

    Shapes as `flash_attention_with_lse`; the gradients may have any strides. `launches` overrides the launch table for
    (dK and dV, dQ), for tuning.
    """
    B, H, T, _ = q.shape
    G, S = k.shape[1:3]
    lse = lse.contiguous()  # under vmap it may be one that was expanded
    call = Call(q, v, terms, lse)
    inputs = [readable(x) for x in (q, k, v, grad_output.to(q.dtype))]
    delta = _delta(inputs[3], output, grad_lse, lse)  # of the dO that dP is made of: dP - delta cancels
    dq, dk, dv = (empty(x, *x.shape) for x in (q, k, v))
    call.start(
        "dkdv", dkdv_kernel, inputs, B * G,
        lambda launch: (blocks(S, launch.block_s) * B * G, (lse, delta, dk, dv), ()), override=launches[0],
    )  # fmt: skip
    call.start(
        "dq", dq_kernel, inputs, B * H,
        lambda launch: (blocks(T, launch.block_t) * B * H, (lse, delta, dq), ()), override=launches[1],
    )  # fmt: skip
    dbias = None
    if needs_bias and terms.bias is not None:
        dbias = bias_gradient(call, inputs, lse, delta, terms.bias)
    return dq, dk, dv, dbias, sinks_gradient(terms.sinks, lse, delta)


def _delta(grad_output: Tensor, output: Tensor, grad_lse: Tensor | None, lse: Tensor) -> Tensor:
    """[B, H, T] fp32: rowsum(dO * O) - dL."""
    B, H, T, E = output.shape
    delta = empty(lse, B, H, T)
    dl = lse if grad_lse is None else grad_lse
    do, o = grad_output, readable(output)
    width = vector(o.element_size())  # the output is no narrower than its gradient
    strides = as_numbers(do.stride()), as_numbers(o.stride())
    key = (
        "delta", output.device, do.dtype, o.dtype, dl.dtype, E, width, grad_lse is not None, dl.data_ptr() % 16 == 0,
        *(large(x) for x in (*strides, dl.stride())),
    )  # fmt: skip
    run(
        delta_kernel, output.device, blocks(T, DELTA.block_t) * B * H, DELTA, key,
        do, o, dl, delta, *strides, *dl.stride(), H, T, E, DELTA.block_t, block_size(E), width, grad_lse is not None,
    )  # fmt: skip
    return delta
