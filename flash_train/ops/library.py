"""The operators as torch sees them: schema, kernels, fake tensors, autograd, FLOP formulas.

Two operators, `flash_train::attention` and `flash_train::attention_backward`. Their kernels choose between the Triton
launchers and the tiled path when they run, so that a step down can be logged under `torch.compile` as well.

The autograd formula is an `autograd.Function` under the dispatcher's Autograd key: 20 microseconds of host time a call
with an empty kernel, where `torch.library.custom_op` with `register_autograd` takes 37 (torch 2.13, one CPU core).
"""

import logging
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

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


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> Any:
    """(output, log-sum-exp) by the operator, or by the form of it that `torch.func`'s transforms take."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return _TransformableAttention.apply(q, k, v, causal, scale, implementation)
    return attention(q, k, v, causal, scale, implementation)


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


_library.impl("attention", _forward, "CompositeExplicitAutograd")  # every device: the choice is made inside
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")


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


def _below_autograd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str
) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return attention(q, k, v, causal, scale, implementation)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs no gradient of zeros


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _below_autograd(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        grad_output, grad_lse = gradients
        if grad_output is None and grad_lse is None:
            return None, None, None, None, None, None
        with torch.no_grad():
            results = attention_backward(grad_output, grad_lse, *ctx.saved_tensors, *ctx.options)
        if torch.is_grad_enabled():  # create_graph=True: a second derivative must fail, not be left out of the sum
            differentiable = [x for x in (grad_output, grad_lse, *ctx.saved_tensors[:3]) if x is not None]
            results = _NoSecondDerivative.apply(*results, *differentiable)
        return *results, None, None, None


class _TransformableAttention(_Attention):
    """The form that `torch.func` asks for; 10 microseconds slower a call, so it is used under its transforms alone."""

    generate_vmap_rule = True
    forward = staticmethod(_below_autograd)  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(_save)


class _NoSecondDerivative(torch.autograd.Function):
    """Passes (dQ, dK, dV) on, and makes them depend on what they were computed from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dq: Tensor, dk: Tensor, dv: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq.clone(), dk.clone(), dv.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("flash_attention has no second derivative; use implementation='naive' or 'sdpa_math' for it")


def _autograd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, implementation: str) -> Any:
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if recorded or forward_ad._current_level >= 0:  # which has no formula here: the Function says so
        return _Attention.apply(q, k, v, causal, scale, implementation)
    return _below_autograd(q, k, v, causal, scale, implementation)


_library.impl("attention", _autograd, "Autograd")


def _fold_batch(x: Any, dimension: int | None, size: int) -> Any:
    """A vmapped [B, ...] as [size * B, ...]; what is no tensor stays."""
    if not isinstance(x, Tensor):
        return x
    x = x.expand(size, *x.shape) if dimension is None else x.movedim(dimension, 0)
    return x.flatten(0, 1)


def _vmap(operator: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], Any]:
    folded = (_fold_batch(x, dimension, info.batch_size) for x, dimension in zip(args, in_dims, strict=True))
    outputs = tuple(x.unflatten(0, (info.batch_size, -1)) for x in operator(*folded))
    return outputs, (0,) * len(outputs)


for _operator in (attention, attention_backward):
    torch.library.register_vmap(_operator, partial(_vmap, _operator), lib=_library)


@register_flop_formula(torch.ops.flash_train.attention)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, out_shape: object = None) -> int:
    """torch's own count for SDPA, 2 B H T S (D + E), not halved when causal (2.11's function refuses grouped heads)."""
    B, H, T, D = q
    S, E = v[2:]
    return 2 * B * H * T * S * (D + E)


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
    """torch's own count: five products, the recomputed scores among them, three of them over D and two over E."""
    B, H, T, D = q
    S, E = v[2:]
    return 2 * B * H * T * S * (3 * D + 2 * E)


def _chosen(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    name, reason = choose_implementation(implementation, q, k, v)
    if reason is not None:
        _log_once(f"attention: {name} runs instead of {implementation}: {reason}")
    return name


@cache
def _log_once(message: str) -> None:
    _log.warning(message)
