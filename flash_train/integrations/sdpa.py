"""`scaled_dot_product_attention` with torch's signature and semantics, by this package's kernels."""

import math

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from flash_train.ops.attention import flash_attention
from flash_train.ops.checks import check_dropout, check_flag, check_number, check_tensor
from flash_train.ops.features import Mask, Score


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale query key^T + attn_mask) value, as `torch.nn.functional.scaled_dot_product_attention` defines it.

    Args:
        query: [..., H, T, D], or [T, D]. What stands before T broadcasts among the three.
        key: [..., H, S, D]; with `enable_gqa` [..., G, S, D], H a multiple of G.
        value: [..., H, S, E], or [..., G, S, E]. All three are fp16, bf16, fp32 or float64 alike.
        attn_mask: broadcastable to [..., H, T, S]. Boolean: True where the pair takes part; a query without any gives
            0. Floating: added to the scores, with a gradient. `torch.nn.attention.bias.causal_lower_right` and
            `causal_upper_left` are taken by their meaning, without a T x S matrix.
        dropout_p: in [0, 1), and applied whenever it is not 0, as there. Other elements are dropped than by torch.
        is_causal: query t sees key s only if s <= t: the first stands beside the first, whatever T and S are, where
            `flash_attention(causal=True)` puts the last beside the last.
        scale: any finite number; 1 / sqrt(D) if None.
        enable_gqa: whether query heads share key heads, h reading h // (H / G), without a copy.

    Returns:
        [..., H, T, E].

    Raises:
        ValueError: `attn_mask` together with `is_causal`, shapes that do not fit together, a nested tensor, and what
            `flash_attention` does not take.
        TypeError: an argument that is of another class than the signature says.
    """
    _check_options(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    _check_tensors(query, key, value, enable_gqa)
    if scale is not None and scale <= 0:  # flash_attention takes positive ones
        query, scale = query * scale, 1.0
    outer = _broadcast([x.shape[: -3 if enable_gqa else -2] for x in (query, key, value)])
    if enable_gqa:
        outer = (*outer, query.shape[-3])
    has_heads = enable_gqa or (outer[1:] != () and outer[-1] > 0)  # else they are a batch of single heads
    *batch, heads = outer if has_heads else (*outer, 1)
    mask, bias = _mask_and_bias(attn_mask, is_causal, (*outer, query.shape[-2], key.shape[-2]), tuple(batch))
    q, k, v = (x if has_heads else x.unsqueeze(-3) for x in (query, key, value))
    own_heads = (x.shape[-3] if enable_gqa else heads for x in (q, k, v))
    q, k, v = (
        x.expand(*batch, n, *x.shape[-2:]).reshape(math.prod(batch), n, *x.shape[-2:])
        for x, n in zip((q, k, v), own_heads, strict=True)
    )
    output = flash_attention(q, k, v, mask=mask, score=Score(bias=bias), scale=scale, dropout=dropout_p)
    return output.reshape(*outer, *output.shape[-2:])


def _check_options(
    attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> None:
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_dropout("dropout_p", dropout_p)
    if scale is not None:
        check_number("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}; None is 1 / sqrt(D)")
    if attn_mask is None:
        return
    check_tensor("attn_mask", attn_mask)
    if is_causal:
        raise ValueError(
            "attn_mask must be None beside is_causal=True, as in torch; use flash_attention with "
            "Mask(causal=True, allowed=...) or Score(bias=...)"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Dtypes and devices are the operator's to check."""
    least = 3 if enable_gqa else 2
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.is_nested:
            raise ValueError(f"{name} must be dense, got a nested tensor; use flash_attention_packed for documents")
        if x.dim() < least:
            raise ValueError(
                f"{name} must have at least {least} dimensions, {'H, ' * enable_gqa}T and D, got {x.dim()}; "
                "add the missing ones with unsqueeze"
            )
    got = f"got query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have one length S, {got}; cut the longer one")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have one head size D, {got}; pad the smaller one with zeros")
    if enable_gqa:
        H, G = query.shape[-3], key.shape[-3]
        if value.shape[-3] != G or G == 0 or H % G != 0:
            raise ValueError(
                f"key and value must have one number of heads, of which query's is a multiple, {got}; "
                "repeat_interleave(..., dim=-3) gives the heads that are missing"
            )


def _broadcast(shapes: list[torch.Size]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise ValueError(
            f"query, key and value must broadcast before their last dimensions, got {[list(x) for x in shapes]}; "
            "enable_gqa=True lets query heads share key heads"
        ) from error


def _mask_and_bias(
    attn_mask: Tensor | None, is_causal: bool, whole: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[Mask | None, Tensor | None]:
    """What `flash_attention` takes for these; `whole` is [..., T, S], and `batch` what stands before its heads."""
    if attn_mask is None:
        return (Mask(causal=True, alignment="top_left") if is_causal else None), None
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != whole[-2:]:
            raise ValueError(
                f"attn_mask must be made for T, S = {whole[-2:]}, got {(attn_mask.seq_len_q, attn_mask.seq_len_kv)}; "
                "make one of query.shape[-2] and key.shape[-2]"
            )
        upper_left = attn_mask.variant == CausalVariant.UPPER_LEFT
        return Mask(causal=True, alignment="top_left" if upper_left else "bottom_right"), None
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"attn_mask must be boolean or floating, got {attn_mask.dtype}; cast it with .bool()")
    pairs = zip(reversed(attn_mask.shape), reversed(whole), strict=False)
    if attn_mask.dim() > len(whole) or any(a != 1 and a != b for a, b in pairs):
        raise ValueError(
            f"attn_mask must broadcast to [..., H, T, S] = {list(whole)}, got {list(attn_mask.shape)}; "
            "put the missing dimensions in with unsqueeze"
        )
    full = attn_mask[(None,) * (len(whole) - attn_mask.dim())]
    full = full.unsqueeze(-3) if len(batch) == len(whole) - 2 else full
    batch = batch if any(n != 1 for n in full.shape[:-3]) else (1,) * len(batch)
    full = full.expand(*batch, -1, -1, -1).reshape(math.prod(batch), *full.shape[-3:])
    return (Mask(allowed=full), None) if full.dtype == torch.bool else (None, full)
