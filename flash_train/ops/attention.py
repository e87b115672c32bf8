"""`flash_attention`: what the operation means, what it accepts, and which implementation runs."""

from typing import Any

import torch
from torch import Tensor

from flash_train.ops.checks import (
    DTYPES,
    check_attended,
    check_dense,
    check_device,
    check_dropout,
    check_flag,
    check_scale,
    check_tensor,
    whole_number,
)
from flash_train.ops.choice import IMPLEMENTATIONS, Choice, choose_implementation
from flash_train.ops.derivatives import attend, attend_jointly
from flash_train.ops.documents import Documents
from flash_train.ops.features import NO_MASK, NO_SCORE, Mask, Score, Terms, flatten, has_tensors, split_heads
from flash_train.ops.kept import keep
from flash_train.ops.reference import default_scale, naive_attention, safe_attention
from flash_train.ops.sdpa import sdpa_attention

__all__ = [
    "IMPLEMENTATIONS",
    "Choice",
    "Documents",
    "Mask",
    "Score",
    "choose_implementation",
    "flash_attention",
    "flash_attention_packed",
    "flash_attention_qkv",
    "flash_attention_with_lse",
]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    deterministic: bool | None = None,
    implementation: str = "flash",
) -> Tensor:
    """softmax(scale q k^T) v, exact, without the T x S matrix.

    Args:
        q: queries [B, H, T, D], of any strides: a [B, T, H, D] projection is passed as `.transpose(1, 2)`, uncopied.
            The kernels copy a tensor only where its rows are no runs of whole vectors: if the last stride is not 1, or
            the head size, the address or another stride is no multiple of 16 bytes.
            D is 1 to 256 in the Triton kernels; B, T and S may be 0.
        k: keys [B, G, S, D], H a multiple of G; query head h reads key head h // (H / G).
        v: values [B, G, S, E]. All three are fp16, bf16, fp32 or float64 alike; under autocast they are cast to its
            dtype first, and may differ before.
        causal: `Mask(causal=True)`: query t sees key s only if s <= t + S - T, the last query being aligned with the
            last key. A query that sees nothing gives output 0, log-sum-exp minus infinity and gradient 0.
        mask: `Mask`: causal, sliding windows, packed documents, any boolean mask. It has its own `causal`.
        score: `Score`: soft cap, ALiBi, an additive bias with its gradient, attention sinks.
        scale: a positive factor on the scores; 1 / sqrt(D) if None.
        dropout: the probability with which a softmax probability is dropped, in [0, 1). Torch's generator of q's
            device draws one number a call; which elements are dropped is a function of it, the batch row or document,
            the head and the positions in the document alone.
        deterministic: whether every run gives the same bits in the backward, too; None is torch's own switch. The
            Triton kernels and the tiled path sum in a fixed order, with or without it; so do the Hopper kernels but for
            dQ, to which their programs add in any order, and with it one after the other: on an H200, bf16, causal,
            T = 8,192 at 553 against 563 TFLOP/s for D = 128, 450 against 486 for D = 64 and 333 against 354 for
            D = 256 (medians of three rounds in turns, torch 2.11.0+cu130, triton 3.6.0, 2026-11-30).
        implementation: one of `IMPLEMENTATIONS`. "flash" is this package's: the Triton kernels on a GPU, those
            written for compute capability 9.0 where they are faster and known to work, else the tiled path, each step
            down logged once with its reason; "triton", "hopper" and "tiled" ask for one of them. "sdpa" is
            `torch.nn.functional.scaled_dot_product_attention` pinned to its flash back end ("sdpa_cudnn",
            "sdpa_efficient", "sdpa_math" to another), which knows few of the features and refuses the others. "naive"
            is the definition with all its memory, and "naive_reversed" the same with the keys visited from last to
            first. `choose_implementation` tells what runs.

    Returns:
        The output [B, H, T, E] in the inputs' dtype, stored as [B, T, H, E] by this package's implementations, so that
        `.transpose(1, 2).reshape(B, T, H * E)` is a view.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, numbers out of their range, or an
            implementation that does not take what is asked.
        TypeError: an argument that is of another class than the signature says.
        RuntimeError: a third or a forward-mode derivative of this package's implementations, which have the first (in
            reverse mode, `torch.func.grad` and `vmap` included) and the second.

    Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691, section 3); for the features see `reference.py`.
    """
    q, k, v = _autocast(q=q, k=k, v=v)
    terms = _terms(
        q, k, v, causal=causal, mask=mask, score=score, scale=scale, dropout=dropout, deterministic=deterministic,
        output_dtype=None, implementation=implementation,
    )  # fmt: skip
    if implementation in _OWN:
        return attend(q, k, v, terms)[0]
    return _attend_otherwise(q, k, v, terms)


_OWN = ("flash", "hopper", "triton", "tiled")


def _attend_otherwise(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    if terms.implementation.startswith("sdpa"):
        return sdpa_attention(q, k, v, terms)
    return naive_attention(q, k, v, terms, reverse_keys=terms.implementation == "naive_reversed")


def flash_attention_qkv(
    qkv: Tensor,
    heads: int,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    deterministic: bool | None = None,
    implementation: str = "flash",
) -> Tensor:
    """`flash_attention` of one tensor that holds queries, keys and values, as a fused projection makes it.

    Its gradient is one tensor too, and the kernels for compute capability 9.0 write it as it stands, where the
    gradients of three views are put together by a pass of its own.

    Args:
        qkv: [B, T, H + 2 G, D], of any strides: H heads of queries, then G of keys and G of values.
        heads: H, a multiple of G.

    Returns:
        The output [B, H, T, D], stored as [B, T, H, D] by this package's implementations.

    Raises:
        ValueError: a shape that is none of these, and as `flash_attention`; TypeError likewise.
    """
    (qkv,) = _autocast(qkv=qkv)
    check_dense("qkv", qkv)
    own = whole_number(heads)
    rest = qkv.shape[2] - own if qkv.dim() == 4 and own is not None and own > 0 else 0
    if rest < 2 or rest % 2:
        raise ValueError(
            f"qkv must be [B, T, H + 2 G, D] with H = heads, got {list(qkv.shape)} and heads={heads}; "
            "a projection [B, T, C] is qkv.unflatten(-1, (-1, D))"
        )
    q, k, v = split_heads(qkv, heads)
    terms = _terms(
        q, k, v, causal=causal, mask=mask, score=score, scale=scale, dropout=dropout, deterministic=deterministic,
        output_dtype=None, implementation=implementation,
    )  # fmt: skip
    if implementation in _OWN:
        return attend_jointly(qkv, heads, terms)[0]
    return _attend_otherwise(q, k, v, terms)


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    deterministic: bool | None = None,
    output_dtype: torch.dtype | None = None,
    implementation: str = "flash",
) -> tuple[Tensor, Tensor]:
    """As `flash_attention`, and the log-sum-exp of each row's scores: the log of the softmax's denominator.

    Args:
        output_dtype: the output's, if not the inputs', and no narrower: `torch.float32` keeps partial results from
            being rounded before `merge` puts them together.

    Returns:
        (output [B, H, T, E], log-sum-exp [B, H, T]): natural logarithm, fp32 (float64 for float64 inputs), a sink
        counted in, dropout not. Both carry gradients.

    Raises:
        ValueError: as `flash_attention`, and for the implementations that return no log-sum-exp ("sdpa...",
            "naive_reversed").
    """
    q, k, v = _autocast(q=q, k=k, v=v)
    terms = _terms(
        q, k, v, causal=causal, mask=mask, score=score, scale=scale, dropout=dropout, deterministic=deterministic,
        output_dtype=output_dtype, implementation=implementation,
    )  # fmt: skip
    if implementation == "naive":
        output, lse = safe_attention(q, k, v, terms)
        return output.to(output_dtype or q.dtype), lse.to(torch.promote_types(lse.dtype, torch.float32))
    if implementation not in _OWN:
        raise ValueError(
            f"implementation={implementation!r} returns no log-sum-exp; use 'flash', 'triton', 'tiled' or 'naive'"
        )
    return attend(q, k, v, terms)


def flash_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    deterministic: bool | None = None,
    output_dtype: torch.dtype | None = None,
    implementation: str = "flash",
) -> tuple[Tensor, Tensor]:
    """`flash_attention_with_lse` of documents of different lengths that lie one behind the other, without padding.

    Args:
        q: [total_q, H, D]: document n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1.
        k: [total_k, G, D], likewise by cu_seqlens_k; a document may have other lengths here, or none.
        v: [total_k, G, E].
        cu_seqlens_q: [N + 1] int32 or int64 on q's device, rising from 0; so is cu_seqlens_k. Rows behind the last
            document give output 0, log-sum-exp minus infinity (with a sink, the sink) and gradient 0.
        mask: as `flash_attention`: alignment and window inside each document. `documents` must be None; `allowed`, and
            the bias of `score`, are broadcastable to [1, H, total_q, total_k].

    Returns:
        (output [total_q, H, E], log-sum-exp [H, total_q]).

    Raises:
        ValueError: as `flash_attention_with_lse`, and for offsets as `Documents.from_cu_seqlens`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(
                f"packed {name} must be [total, heads, head size], got {list(x.shape)}; "
                "a batch [B, H, T, D] goes to flash_attention"
            )
    mask = _one_mask(causal, mask)
    if mask.documents is not None:
        raise ValueError(
            f"packed documents come by cu_seqlens: documents must be None, got {type(mask.documents).__name__}; "
            "leave it out, or use flash_attention"
        )
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, x)
        check_device(name, x, q)
    documents = Documents.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    output, lse = flash_attention_with_lse(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        mask=Mask(mask.causal, mask.window, mask.alignment, documents, mask.allowed),
        score=score,
        scale=scale,
        dropout=dropout,
        deterministic=deterministic,
        output_dtype=output_dtype,
        implementation=implementation,
    )
    return output.squeeze(0).transpose(0, 1), lse.squeeze(0)


def _one_mask(causal: bool, mask: Mask | None) -> Mask:
    check_flag("causal", causal)
    if mask is None:
        return Mask(causal=True) if causal else NO_MASK
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, got {type(mask).__name__}; a boolean tensor is Mask(allowed=...)")
    if causal and not mask.causal:
        raise ValueError(
            "causal=True must agree with the mask, got one with causal=False; write Mask(causal=True, ...)"
        )
    return mask


def _terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Mask | None,
    score: Score | None,
    scale: float | None,
    dropout: float,
    deterministic: bool | None,
    output_dtype: torch.dtype | None,
    implementation: str,
) -> Terms:
    """The arguments, checked and flat; a ValueError for what no implementation takes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = causal, scale, dropout, deterministic, output_dtype, implementation
    if mask is not None or score is not None or torch.compiler.is_compiling():
        return _checked_terms(q, k, v, mask, score, *options)
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options,
        *map(type, options),  # as 1 == True == 1.0
    )  # fmt: skip
    try:
        terms = _KNOWN.get(key)
    except TypeError:  # an option that has no hash, which is refused now, or a length that is a symbol
        return _checked_terms(q, k, v, None, None, *options)
    if terms is None:
        terms = _checked_terms(q, k, v, None, None, *options)
        if not has_tensors(terms):
            keep(_KNOWN, key, terms)
    return terms


_KNOWN: dict[Any, Terms] = {}
"""By shapes, dtypes, devices and options: what calls with no tensor beside q, k and v were flattened to."""


def _checked_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    score: Score | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    deterministic: bool,
    output_dtype: torch.dtype | None,
    implementation: str,
) -> Terms:
    check_attended(q, k, v)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"score must be a Score, got {type(score).__name__}; an additive tensor is Score(bias=...)")
    if scale is not None:
        check_scale("scale", scale)
    check_dropout("dropout", dropout)
    if output_dtype is not None and output_dtype not in DTYPES:
        raise ValueError(f"output_dtype must be fp16, bf16, fp32 or float64, got {output_dtype}; None is the inputs'")
    if output_dtype is not None and torch.promote_types(q.dtype, output_dtype) != output_dtype:
        raise ValueError(
            f"output_dtype must hold what the inputs' holds, {q.dtype}, got {output_dtype}, and the backward reads the "
            "output; cast the result instead"
        )
    check_flag("deterministic", deterministic)
    return flatten(
        q, k, _one_mask(causal, mask), NO_SCORE if score is None else score,
        scale=default_scale(q) if scale is None else float(scale), dropout=dropout, output_dtype=output_dtype,
        deterministic=deterministic, implementation=implementation,
    )  # fmt: skip


def _autocast(**named: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on for their device; float64 is left alone, as torch does.

    Not `torch.library.register_autocast`: it fixes one dtype at registration.
    """
    for name, x in named.items():
        check_tensor(name, x)
    tensors = tuple(named.values())
    device = tensors[0].device.type
    if tensors[0].is_meta or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors])
