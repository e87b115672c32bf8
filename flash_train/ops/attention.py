"""`flash_attention`: what the operation means, what it accepts, and which implementation runs."""

import math

import torch
from torch import Tensor

from flash_train.ops import library
from flash_train.ops.choice import IMPLEMENTATIONS, Choice, choose_implementation
from flash_train.ops.reference import default_scale, naive_attention, safe_attention
from flash_train.ops.sdpa import sdpa_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
__all__ = ["IMPLEMENTATIONS", "Choice", "choose_implementation", "flash_attention", "flash_attention_with_lse"]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: str = "flash",
) -> Tensor:
    """softmax(scale q k^T) v, exact, without the T x S matrix.

    Args:
        q: queries [B, H, T, D], of any strides: a [B, T, H, D] projection is passed as `.transpose(1, 2)`, uncopied.
        k: keys [B, G, S, D], H a multiple of G; query head h reads key head h // (H / G).
        v: values [B, G, S, E]. All three are fp16, bf16, fp32 or float64 alike; under autocast they are cast to its
            dtype first, and may differ before.
        causal: query t sees key s only if s <= t + S - T: the last query is aligned with the last key. A query that
            sees nothing gives output 0, log-sum-exp minus infinity and gradient 0.
        scale: a positive factor on the scores; 1 / sqrt(D) if None.
        implementation: one of `IMPLEMENTATIONS`. "flash" is this package's: the Triton kernels on a GPU, else the
            tiled path, each step down logged once with its reason; "triton" and "tiled" ask for one of them. "sdpa"
            is `torch.nn.functional.scaled_dot_product_attention` pinned to its flash back end ("sdpa_cudnn",
            "sdpa_efficient", "sdpa_math" to another), "naive" is the definition with all its memory, and
            "naive_reversed" the same with the keys visited from last to first. `choose_implementation` tells what
            runs.

    Returns:
        The output [B, H, T, E] in the inputs' dtype, stored as [B, T, H, E] by this package's implementations, so that
        `.transpose(1, 2).reshape(B, T, H * E)` is a view.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a scale that is not positive, or an
            implementation that does not take these tensors.
        RuntimeError: a second or a forward-mode derivative of this package's implementations, which have the first in
            reverse mode alone (`torch.func.grad` and `vmap` included).

    Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691, section 3).
    """
    q, k, v = _autocast(q, k, v)
    scale = _check(q, k, v, scale, implementation)
    if implementation == "naive" or implementation == "naive_reversed":
        reverse_keys = implementation == "naive_reversed"
        return naive_attention(q, k, v, causal=causal, scale=scale, reverse_keys=reverse_keys)
    if implementation.startswith("sdpa"):
        return sdpa_attention(q, k, v, causal=causal, scale=scale, implementation=implementation)
    return library.attend(q, k, v, causal, scale, implementation)[0]


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: str = "flash",
) -> tuple[Tensor, Tensor]:
    """As `flash_attention`, and the log-sum-exp of each row's scaled scores.

    Returns:
        (output [B, H, T, E], log-sum-exp [B, H, T]): natural logarithm, fp32 (float64 for float64 inputs). Both carry
        gradients.

    Raises:
        ValueError: as `flash_attention`, and for the implementations that return no log-sum-exp ("sdpa...",
            "naive_reversed").
    """
    q, k, v = _autocast(q, k, v)
    scale = _check(q, k, v, scale, implementation)
    if implementation == "naive":
        output, lse = safe_attention(q, k, v, causal=causal, scale=scale)
        return output, lse.to(torch.promote_types(lse.dtype, torch.float32))
    if implementation not in ("flash", "triton", "tiled"):
        raise ValueError(
            f"implementation={implementation!r} returns no log-sum-exp; use 'flash', 'triton', 'tiled' or 'naive'"
        )
    return library.attend(q, k, v, causal, scale, implementation)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None, implementation: str) -> float:
    """The scale to use; a ValueError for what no implementation takes."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            "q, k and v must be [B, H, T, D], [B, G, S, D] and [B, G, S, E], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; add the missing dimensions with unsqueeze"
        )
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k and v must share B, G and S, and q's B: got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
            "is one of them laid out as [B, T, H, D]? Then pass .transpose(1, 2)"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q and k must have one head size D, got {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"query heads must be a multiple of key heads, got H={q.shape[1]} and G={k.shape[1]}; "
            "is one of them laid out as [B, T, H, D]? Then pass .transpose(1, 2)"
        )
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"no dimension may be empty, got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "q, k and v must share one dtype, fp16, bf16, fp32 or float64, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}; cast them with .to(dtype)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must lie on one device, got {q.device}, {k.device} and {v.device}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}; scale q instead")
    return default_scale(q) if scale is None else float(scale)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where autocast is on for their device; float64 is left alone, as torch does.

    Not `torch.library.register_autocast`: it fixes one dtype at registration.
    """
    device = q.device.type
    if q.is_meta or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
