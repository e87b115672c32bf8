"""The operators as torch sees them: schema, kernels, fake tensors, autograd, FLOP formulas.

Two operators, `flash_train::attention` and `flash_train::attention_backward`. Their kernels choose between the Triton
launchers and the tiled path when they run, so that a step down can be logged under `torch.compile` as well.

The autograd formula is an `autograd.Function` under the dispatcher's Autograd key: 20 microseconds of host time a call
with an empty kernel, where `torch.library.custom_op` with `register_autograd` takes 37 (torch 2.13, one CPU core).
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from flash_train.ops.choice import choose_implementation
from flash_train.ops.reference import tiled_attention, tiled_attention_backward

_log = logging.getLogger(__name__)
_library = torch.library.Library("flash_train", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, str implementation) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor? grad_output, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor output, "
    "Tensor lse, bool causal, float scale, str implementation) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention = torch.ops.flash_train.attention.default
attention_backward = torch.ops.flash_train.attention_backward.default


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> tuple[Tensor, Tensor]:
    if _chosen(implementation, q, k, v) == "triton":
        from flash_train.ops.kernels.forward import attention_forward  # Triton is imported when a kernel first runs

        return attention_forward(q, k, v, causal=causal, scale=scale)
    with torch.autocast(q.device.type, enabled=False):  # it would cast the tiles, which are float32 on purpose
        return tiled_attention(q, k, v, causal=causal, scale=scale)


def _backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if grad_output is None:  # only the log-sum-exp was used
        grad_output = torch.zeros((), dtype=output.dtype, device=output.device).expand(output.shape)
    if _chosen(implementation, q, k, v) == "triton":
        from flash_train.ops.kernels.backward import attention_backward as launch

        return launch(grad_output, grad_lse, q, k, v, output, lse, causal=causal, scale=scale)
    with torch.autocast(q.device.type, enabled=False):
        return tiled_attention_backward(grad_output, grad_lse, q, k, v, output, lse, causal=causal, scale=scale)


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _device)
    _library.impl("attention_backward", _backward, _device)


@torch.library.register_fake("flash_train::attention", lib=_library)
def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2), q.new_empty(B, H, T, dtype=lse_dtype)


@torch.library.register_fake("flash_train::attention_backward", lib=_library)
def _fake_backward(
    grad_output: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output, lse = attention(q, k, v, causal, scale, implementation)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.options = (causal, scale, implementation)
        ctx.set_materialize_grads(False)  # an unused log-sum-exp costs no gradient of zeros
        return output, lse

    @staticmethod
    @once_differentiable  # whose wrapper takes `ctx` by position only
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_output, grad_lse = gradients
        if grad_output is None and grad_lse is None:
            return None, None, None, None, None, None
        return *attention_backward(grad_output, grad_lse, *ctx.saved_tensors, *ctx.options), None, None, None


def _autograd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> Any:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, causal, scale, implementation)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(q, k, v, causal, scale, implementation)


_library.impl("attention", _autograd, "Autograd")


@register_flop_formula(torch.ops.flash_train.attention)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, out_shape: object = None) -> int:
    """torch's own count for SDPA: 2 B H T S (D + E), not halved when causal."""
    return sdpa_flop_count(q, k, v)


@register_flop_formula(torch.ops.flash_train.attention_backward)
def _backward_flops(
    grad_output: object,
    grad_lse: object,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    *_: object,
    out_shape: object = None,
) -> int:
    """torch's own count: five products of the forward's size, the recomputed scores among them."""
    return sdpa_backward_flop_count(torch.Size((*q[:3], v[3])), q, k, v)


def _chosen(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    name, reason = choose_implementation(implementation, q, k, v)
    if reason is not None:
        _log_once(f"attention: {name} runs instead of {implementation}: {reason}")
    return name


@cache
def _log_once(message: str) -> None:
    _log.warning(message)
