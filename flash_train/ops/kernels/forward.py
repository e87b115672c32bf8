"""The forward kernel (rung 4 of the ladder on the chip) and its launcher."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import block_size, choose_launch, describe, empty, near_rows, run, tile_constants
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import (
    LN_2,
    LOG2_E,
    keys_of,
    load_tile,
    locate_queries,
    multiply,
    multiply_add,
    store_tile,
)


@triton.jit
def _fold_keys(acc, m, l, q, n, k, v, k_strides, v_strides, b, g, low, high, S, scale_log2,
               D: tl.constexpr, E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
               MASKED: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
               UPCAST: tl.constexpr):  # fmt: skip
    """Keys low to high into the rows' state (m, l, acc), m in units of log2. Full and masked tiles share this body."""
    for start in tl.range(low, high, BLOCK_S):
        k_tile = load_tile(k, k_strides, b, g, start, S, D, BLOCK_S, BLOCK_D, DESCRIPTOR)  # [BLOCK_S, BLOCK_D]
        s = multiply(q, k_tile.T, PRECISION, UPCAST)  # [BLOCK_T, BLOCK_S]
        if MASKED:
            s = tl.where((start + tl.arange(0, BLOCK_S))[None, :] < n[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        reference = m_new
        if MASKED:  # a row that has seen nothing: exp2(-inf - 0) = 0
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - reference[:, None])  # [BLOCK_T, BLOCK_S]
        shrink = tl.exp2(m - reference)
        l = l * shrink + tl.sum(p, 1)
        v_tile = load_tile(v, v_strides, b, g, start, S, E, BLOCK_S, BLOCK_E, DESCRIPTOR)  # [BLOCK_S, BLOCK_E]
        acc = multiply_add(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], PRECISION, UPCAST)  # [BLOCK_T, BLOCK_E]
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["H", "G", "T", "S"])
def forward_kernel(q, k, v, output, lse, q_strides, k_strides, v_strides, output_strides, heads, H, G, T, S, scale,
                   D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr, DESCRIPTOR: tl.constexpr,
                   PRECISION: tl.constexpr, UPCAST: tl.constexpr, HEADS_TOGETHER: tl.constexpr):  # fmt: skip
    """One program: BLOCK_T queries of one head against all keys that they see."""
    b, h, g, head, first, rows = locate_queries(heads, H, G, T, BLOCK_T, CAUSAL, HEADS_TOGETHER)
    n, full, end = keys_of(rows, first, T, S, BLOCK_T, BLOCK_S, CAUSAL)
    scale_log2 = scale * LOG2_E

    q_tile = load_tile(q, q_strides, b, h, first, T, D, BLOCK_T, BLOCK_D, DESCRIPTOR)  # [BLOCK_T, BLOCK_D]
    m = tl.full([BLOCK_T], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    acc, m, l = _fold_keys(acc, m, l, q_tile, n, k, v, k_strides, v_strides, b, g, 0, full, S, scale_log2,
                           D, E, BLOCK_S, BLOCK_D, BLOCK_E, False, DESCRIPTOR, PRECISION, UPCAST)  # fmt: skip
    acc, m, l = _fold_keys(acc, m, l, q_tile, n, k, v, k_strides, v_strides, b, g, full, end, S, scale_log2,
                           D, E, BLOCK_S, BLOCK_D, BLOCK_E, True, DESCRIPTOR, PRECISION, UPCAST)  # fmt: skip
    l_safe = tl.where(l == 0.0, 1.0, l)  # a row that saw nothing: output 0, and m is minus infinity
    store_tile(output, output_strides, b, h, first, T, acc / l_safe[:, None], E, BLOCK_T, BLOCK_E)
    tl.store(lse + head.to(tl.int64) * T + rows, m * LN_2 + tl.log(l_safe), mask=rows < T)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, E] stored as [B, T, H, E], log-sum-exp [B, H, T] fp32). Shapes as `flash_attention`.

    `launch` overrides the launch table, for tuning.
    """
    q, k, v = near_rows(q), near_rows(k), near_rows(v)
    B, H, T, D = q.shape
    G, S, E = v.shape[1:]
    output = empty(q, B, T, H, E).transpose(1, 2)
    lse = empty(q, B, H, T, dtype=torch.float32)
    launch = choose_launch("forward", q, v, launch)
    t, s = launch.block_t, launch.block_s
    inputs, descriptor = describe([q, k, v], [(t, block_size(D)), (s, block_size(D)), (s, block_size(E))])
    run(
        forward_kernel, triton.cdiv(T, t) * B * H,
        *inputs, output, lse, q.stride(), k.stride(), v.stride(), output.stride(), B * H, H, G, T, S, scale,
        **tile_constants(q, v, launch, causal=causal, descriptor=descriptor),
    )  # fmt: skip
    return output, lse
