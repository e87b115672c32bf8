"""flash-attention's functions, by the names, arguments, layouts and return values of its release 2.8.

The whole migration is `from flash_train.integrations.flash_attn import flash_attn_func` in place of `from flash_attn
import flash_attn_func`; here it takes CPU tensors and fp32 as well, and can be differentiated twice. The arguments mean
the same in each of the functions:

- q [B, T, H, D], k [B, S, G, D], v [B, S, G, E], H a multiple of G; "varlen": [total_q, H, D], [total_k, G, D] and
  [total_k, G, E] with cu_seqlens [N + 1], int32 or int64: where each of the N sequences begins, and the last ends.
- max_seqlen, max_seqlen_q, max_seqlen_k: one number each, as there. Nothing depends on them here, so nothing is read.
- dropout_p: 0.0 outside training. Other elements are dropped than flash-attention drops for the same seed.
- softmax_scale: positive; 1 / sqrt(D) if None.
- causal, window_size: query t stands beside key t + S - T; it sees `left` keys before and `right` keys after that one,
  and none after it if causal. -1 is unbounded, and so is 2**30 or more. A query that sees nothing gives 0.
- softcap: the scores become softcap * tanh(score / softcap); 0.0 leaves them alone.
- alibi_slopes: [H], floating, without gradient. [B, H] costs a copy of q, k and v; the varlen functions refuse it.
- deterministic: True; or False, for what torch's own switch says.
- return_attn_probs: (out, softmax_lse, None) in place of out. softmax_lse is fp32, [B, H, T] or (varlen) [H, total_q],
  in natural logarithm, and has a gradient; where a query sees nothing it is minus infinity (there plus infinity).
  S_dmask, the third, serves flash-attention's own tests and has no counterpart here.
- block_table, a paged cache: refused.

A ValueError, or a TypeError for what is of another class, names what is not taken. The result is a Tensor unless
return_attn_probs makes it a tuple.

Source: flash_attn/flash_attn_interface.py in Dao-AILab/flash-attention.
"""

from typing import Any

from torch import Tensor

from flash_train.integrations.flash_attn_checks import (
    check_alibi_slopes,
    check_max_seqlen,
    check_q_k_v,
    mask_of,
    score_of,
    unpacked,
)
from flash_train.ops.attention import flash_attention_packed, flash_attention_with_lse
from flash_train.ops.checks import check_dropout, check_scale


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, T, H, D], k [B, S, G, D], v [B, S, G, E] -> [B, T, H, E]; the module says the rest."""
    check_q_k_v(q, k, v, 4)
    check_dropout("dropout_p", dropout_p)
    if softmax_scale is not None:
        check_scale("softmax_scale", softmax_scale)
    B, T, H, _ = q.shape
    check_alibi_slopes(alibi_slopes, B, H)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if alibi_slopes is not None and alibi_slopes.dim() == 2 and B == 0:
        alibi_slopes = alibi_slopes.new_zeros(H)  # no row has a slope
    elif alibi_slopes is not None and alibi_slopes.dim() == 2:
        # the rows become heads of a single one: query head b H + h reads key head b G + h // (H / G)
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
        alibi_slopes = alibi_slopes.flatten()
    out, lse = flash_attention_with_lse(
        q,
        k,
        v,
        mask=mask_of(causal, window_size),
        score=score_of(softcap, alibi_slopes),
        scale=softmax_scale,
        dropout=dropout_p,
        deterministic=deterministic or None,
    )
    if len(out) != B:
        out, lse = out.view(B, H, *out.shape[2:]), lse.view(B, H, T)
    out = out.transpose(1, 2).contiguous()  # it is, unless rows became heads
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [B, T, 3, H, D] -> [B, T, H, D]."""
    q, k, v = unpacked("qkv", qkv, 3, 5, "[B, T, 3, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q [B, T, H, D] and kv [B, S, 2, G, D] -> [B, T, H, D]."""
    k, v = unpacked("kv", kv, 2, 5, "[B, S, 2, G, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention in each of N sequences: q [total_q, H, D], k [total_k, G, D], v [total_k, G, E] -> [total_q, H, E]."""
    if block_table is not None:
        raise ValueError("block_table must be None: there is no paged cache here; gather the pages into k and v first")
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    check_q_k_v(q, k, v, 3)
    check_dropout("dropout_p", dropout_p)
    if softmax_scale is not None:
        check_scale("softmax_scale", softmax_scale)
    check_alibi_slopes(alibi_slopes, None, q.shape[1])
    out, lse = flash_attention_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        mask=mask_of(causal, window_size),
        score=score_of(softcap, alibi_slopes),
        scale=softmax_scale,
        dropout=dropout_p,
        deterministic=deterministic or None,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv [total, 3, H, D] -> [total, H, D]."""
    check_max_seqlen("max_seqlen", max_seqlen)
    q, k, v = unpacked("qkv", qkv, 3, 4, "[total, 3, H, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q [total_q, H, D] and kv [total_k, 2, G, D] -> [total_q, H, D]."""
    k, v = unpacked("kv", kv, 2, 4, "[total_k, 2, G, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
