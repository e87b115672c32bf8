"""The backward kernels (rung 5 of the ladder on the chip) and their launcher.

Two kernels, each recomputing P = exp(S - L): one holds a tile of keys while the queries that see it pass by (dK, dV),
one holds a tile of queries while their keys pass by (dQ). Seven products where one pass with atomic additions needs
five, and the same bits on every run. The heads of a group are a loop inside the first kernel, so dK and dV are never
expanded.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import block_size, choose_launch, describe, empty, near_rows, run, tile_constants
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import (
    LOG2_E,
    keys_of,
    load_tile,
    locate,
    locate_queries,
    multiply,
    multiply_add,
    store_tile,
    visible_keys,
)

DELTA_ROWS = 64
"""Rows of a program of `delta_kernel`, which reads each element once."""


@triton.jit(do_not_specialize=["H", "T"])
def delta_kernel(grad_output, output, grad_lse, delta, do_strides, o_strides, dl_strides, H, T,
                 E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
                 HAS_GRAD_LSE: tl.constexpr):  # fmt: skip
    """delta = rowsum(dO * O) - dL, [B, H, T] fp32: one program, BLOCK_T rows of one head."""
    blocks = tl.cdiv(T, BLOCK_T)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) - head * blocks) * BLOCK_T
    b = head // H
    h = head - b * H
    rows = first + tl.arange(0, BLOCK_T)
    do = load_tile(grad_output, do_strides, b, h, first, T, E, BLOCK_T, BLOCK_E, False).to(tl.float32)
    o = load_tile(output, o_strides, b, h, first, T, E, BLOCK_T, BLOCK_E, False).to(tl.float32)
    row = tl.sum(do * o, 1)
    if HAS_GRAD_LSE:
        pointers = grad_lse + b.to(tl.int64) * dl_strides[0] + h.to(tl.int64) * dl_strides[1]
        row -= tl.load(pointers + rows.to(tl.int64) * dl_strides[2], mask=rows < T, other=0.0)
    tl.store(delta + head.to(tl.int64) * T + rows, row, mask=rows < T)


@triton.jit
def _row_numbers(lse, delta, head, rows, T):
    """(L in units of log2, delta) of the rows; L of a row that saw nothing, or is none, is +inf: exp2(s - inf) = 0."""
    offsets = head.to(tl.int64) * T + rows
    L = tl.load(lse + offsets, mask=rows < T, other=float("inf"))
    L = tl.where(L == float("-inf"), float("inf"), L)
    return L * LOG2_E, tl.load(delta + offsets, mask=rows < T, other=0.0)


@triton.jit
def _fold_queries(dk, dv, k, v, q, do, lse, delta, q_strides, do_strides, b, h, head, first_key, low, high, T, S,
                  scale_log2, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
                  DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Adds what queries low to high of one head give to dK and dV of a tile of keys; tiles are transposed: [S, T]."""
    for start in tl.range(low, high, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        q_tile = load_tile(q, q_strides, b, h, start, T, D, BLOCK_T, BLOCK_D, DESCRIPTOR)  # [BLOCK_T, BLOCK_D]
        L, delta_rows = _row_numbers(lse, delta, head, rows, T)
        s = multiply(k, q_tile.T, PRECISION, UPCAST)  # [BLOCK_S, BLOCK_T]
        p = tl.exp2(s * scale_log2 - L[None, :])
        if MASKED:
            n = visible_keys(rows, T, S, CAUSAL)
            p = tl.where((first_key + tl.arange(0, BLOCK_S))[:, None] < n[None, :], p, 0.0)
        do_tile = load_tile(do, do_strides, b, h, start, T, E, BLOCK_T, BLOCK_E, DESCRIPTOR)  # [BLOCK_T, BLOCK_E]
        dv = multiply_add(p.to(do_tile.dtype), do_tile, dv, PRECISION, UPCAST)  # [BLOCK_S, BLOCK_E]
        dp = multiply(v, do_tile.T, PRECISION, UPCAST)  # [BLOCK_S, BLOCK_T]
        ds = p * (dp - delta_rows[None, :])
        dk = multiply_add(ds.to(q_tile.dtype), q_tile, dk, PRECISION, UPCAST)  # [BLOCK_S, BLOCK_D]
    return dk, dv


@triton.jit(do_not_specialize=["H", "G", "T", "S"])
def dkdv_kernel(q, k, v, do, lse, delta, dk, dv, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
                heads, H, G, T, S, scale, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr,
                BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
                DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
                HEADS_TOGETHER: tl.constexpr):  # fmt: skip
    """One program: BLOCK_S keys of one key head against every query that sees them, of all the group's heads."""
    block, key_head = locate(tl.cdiv(S, BLOCK_S), heads, False, HEADS_TOGETHER)  # causal: the first keys have most rows
    b = key_head // G
    g = key_head - b * G
    first_key = block * BLOCK_S
    # query t sees key s from t = s - (S - T) on; from `full` on, all rows see all of this tile's keys
    start, full = 0, 0
    if CAUSAL:
        start = tl.maximum(first_key - (S - T), 0) // BLOCK_T * BLOCK_T
        last_key = tl.minimum(first_key + BLOCK_S, S) - 1
        full = tl.cdiv(tl.maximum(last_key - (S - T), 0), BLOCK_T) * BLOCK_T
        full = tl.minimum(full, T)
    scale_log2 = scale * LOG2_E

    k_tile = load_tile(k, k_strides, b, g, first_key, S, D, BLOCK_S, BLOCK_D, DESCRIPTOR)  # [BLOCK_S, BLOCK_D]
    v_tile = load_tile(v, v_strides, b, g, first_key, S, E, BLOCK_S, BLOCK_E, DESCRIPTOR)  # [BLOCK_S, BLOCK_E]
    dk_acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_S, BLOCK_E], tl.float32)
    for member in tl.range(0, H // G):
        h = g * (H // G) + member
        head = b * H + h
        if CAUSAL:
            dk_acc, dv_acc = _fold_queries(
                dk_acc, dv_acc, k_tile, v_tile, q, do, lse, delta, q_strides, do_strides, b, h, head, first_key,
                start, full, T, S, scale_log2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E, CAUSAL, True,
                DESCRIPTOR, PRECISION, UPCAST)  # fmt: skip
        dk_acc, dv_acc = _fold_queries(
            dk_acc, dv_acc, k_tile, v_tile, q, do, lse, delta, q_strides, do_strides, b, h, head, first_key,
            full, T, T, S, scale_log2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E, CAUSAL, False,
            DESCRIPTOR, PRECISION, UPCAST)  # fmt: skip
    store_tile(dk, dk_strides, b, g, first_key, S, dk_acc * scale, D, BLOCK_S, BLOCK_D)
    store_tile(dv, dv_strides, b, g, first_key, S, dv_acc, E, BLOCK_S, BLOCK_E)


@triton.jit
def _fold_keys(dq, q, do, L, delta, n, k, v, k_strides, v_strides, b, g, low, high, S, scale_log2,
               D: tl.constexpr, E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
               MASKED: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
               UPCAST: tl.constexpr):  # fmt: skip
    """Adds what keys low to high give to dQ of a tile of queries."""
    for start in tl.range(low, high, BLOCK_S):
        k_tile = load_tile(k, k_strides, b, g, start, S, D, BLOCK_S, BLOCK_D, DESCRIPTOR)  # [BLOCK_S, BLOCK_D]
        s = multiply(q, k_tile.T, PRECISION, UPCAST)  # [BLOCK_T, BLOCK_S]
        p = tl.exp2(s * scale_log2 - L[:, None])
        if MASKED:
            p = tl.where((start + tl.arange(0, BLOCK_S))[None, :] < n[:, None], p, 0.0)
        v_tile = load_tile(v, v_strides, b, g, start, S, E, BLOCK_S, BLOCK_E, DESCRIPTOR)  # [BLOCK_S, BLOCK_E]
        dp = multiply(do, v_tile.T, PRECISION, UPCAST)  # [BLOCK_T, BLOCK_S]
        ds = p * (dp - delta[:, None])
        dq = multiply_add(ds.to(k_tile.dtype), k_tile, dq, PRECISION, UPCAST)  # [BLOCK_T, BLOCK_D]
    return dq


@triton.jit(do_not_specialize=["H", "G", "T", "S"])
def dq_kernel(q, k, v, do, lse, delta, dq, q_strides, k_strides, v_strides, do_strides, dq_strides, heads, H, G, T, S,
              scale, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr, DESCRIPTOR: tl.constexpr,
              PRECISION: tl.constexpr, UPCAST: tl.constexpr, HEADS_TOGETHER: tl.constexpr):  # fmt: skip
    """One program: BLOCK_T queries of one head against all keys that they see."""
    b, h, g, head, first, rows = locate_queries(heads, H, G, T, BLOCK_T, CAUSAL, HEADS_TOGETHER)
    n, full, end = keys_of(rows, first, T, S, BLOCK_T, BLOCK_S, CAUSAL)
    scale_log2 = scale * LOG2_E

    q_tile = load_tile(q, q_strides, b, h, first, T, D, BLOCK_T, BLOCK_D, DESCRIPTOR)  # [BLOCK_T, BLOCK_D]
    do_tile = load_tile(do, do_strides, b, h, first, T, E, BLOCK_T, BLOCK_E, DESCRIPTOR)  # [BLOCK_T, BLOCK_E]
    L, delta_rows = _row_numbers(lse, delta, head, rows, T)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    acc = _fold_keys(acc, q_tile, do_tile, L, delta_rows, n, k, v, k_strides, v_strides, b, g, 0, full, S, scale_log2,
                     D, E, BLOCK_S, BLOCK_D, BLOCK_E, False, DESCRIPTOR, PRECISION, UPCAST)  # fmt: skip
    acc = _fold_keys(acc, q_tile, do_tile, L, delta_rows, n, k, v, k_strides, v_strides, b, g, full, end, S, scale_log2,
                     D, E, BLOCK_S, BLOCK_D, BLOCK_E, True, DESCRIPTOR, PRECISION, UPCAST)  # fmt: skip
    store_tile(dq, dq_strides, b, h, first, T, acc * scale, D, BLOCK_T, BLOCK_D)


def attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    launches: tuple[Launch | None, Launch | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) as the inputs. Shapes as `flash_attention_with_lse`; the gradients may have any strides.

    `launches` overrides the launch table for (dK and dV, dQ), for tuning.
    """
    q, k, v, grad_output = near_rows(q), near_rows(k), near_rows(v), near_rows(grad_output)
    B, H, T, D = q.shape
    G, S, E = v.shape[1:]
    delta = empty(q, B, H, T, dtype=torch.float32)
    dl = lse if grad_lse is None else grad_lse
    run(
        delta_kernel, triton.cdiv(T, DELTA_ROWS) * B * H,
        grad_output, output, dl, delta, grad_output.stride(), output.stride(), dl.stride(), H, T,
        E=E, BLOCK_T=DELTA_ROWS, BLOCK_E=block_size(E), HAS_GRAD_LSE=grad_lse is not None, num_warps=4,
    )  # fmt: skip
    dq, dk, dv = (empty(x, *x.shape) for x in (q, k, v))

    def start(kernel: Any, direction: str, override: Launch | None, outputs: tuple[Tensor, ...], heads: int) -> None:
        launch = choose_launch(direction, q, v, override)
        t, s, d, e = launch.block_t, launch.block_s, block_size(D), block_size(E)
        inputs, descriptor = describe([q, k, v, grad_output], [(t, d), (s, d), (s, e), (t, e)])
        run(
            kernel, (triton.cdiv(S, s) if direction == "dkdv" else triton.cdiv(T, t)) * heads,
            *inputs, lse, delta, *outputs, q.stride(), k.stride(), v.stride(), grad_output.stride(),
            *(x.stride() for x in outputs), heads, H, G, T, S, scale,
            **tile_constants(q, v, launch, causal=causal, descriptor=descriptor),
        )  # fmt: skip

    start(dkdv_kernel, "dkdv", launches[0], (dk, dv), B * G)
    start(dq_kernel, "dq", launches[1], (dq,), B * H)
    return dq, dk, dv
