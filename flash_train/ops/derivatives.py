"""The operators' derivatives, and what `torch.func` asks for: autograd Functions under the Autograd key, vmap rules.

The autograd formula is an `autograd.Function` under the dispatcher's Autograd key: 20 microseconds of host time a call
with an empty kernel, where `torch.library.custom_op` with `register_autograd` takes 37 (torch 2.13, one CPU core).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_train.ops.batching import fold_batch
from flash_train.ops.features import TENSORS, Terms, has_tensors, join_heads, pack, split_heads, unpack
from flash_train.ops.library import (
    attention,
    attention_backward,
    attention_double_backward,
    below_autograd,
    flat,
    qkv_attention,
    qkv_attention_backward,
    register,
)


def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Any:
    """(output, log-sum-exp)."""
    return _call(attention, q, k, v, *pack(terms))


def _call(operator: Callable[..., Any], *args: Any) -> Any:
    """The operator by the shortest way: in eager mode its Function, without asking torch's dispatcher for it.

    `Terms` come last, as by `features.pack`.
    """
    if torch.compiler.is_compiling():
        return operator(*flat(args))
    if torch._C._are_functorch_transforms_active():
        return _FUNCTIONS[operator][1](*flat(args))
    return _autograd(operator, *args)


def _autograd(operator: Callable[..., Any], *args: Any) -> Any:
    """The operator, recorded where a derivative of it may be asked for."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "flash_attention takes torch.func's transforms in eager mode only: take implementation='naive' or 'sdpa' "
            "where torch.compile surrounds them, or torch.autograd.grad instead of torch.func.grad"
        )
    recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    if recorded or forward_ad._current_level >= 0:  # which has no formula here: the Function says so
        return _FUNCTIONS[operator][0](*args)
    return below_autograd(operator, *args)


def attend_jointly(qkv: Tensor, heads: int, terms: Terms) -> Any:
    """(output, log-sum-exp) of what `features.split_heads` makes of qkv."""
    return _call(qkv_attention, qkv, heads, *pack(terms))


_BIAS, _SINKS = Terms._fields.index("bias"), Terms._fields.index("sinks")


def _save(ctx: Any, tensors: tuple[Any, ...], terms: Terms) -> None:
    if has_tensors(terms):
        tensors = *tensors, *terms[TENSORS]
        terms = _with_tensors(terms, (None,) * (TENSORS.stop - TENSORS.start))
    ctx.save_for_backward(*tensors)
    ctx.terms = terms
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs no gradient of zeros


def _saved(ctx: Any, count: int = 5) -> tuple[tuple[Any, ...], Terms]:
    """(so many tensors, terms) as they were saved."""
    saved = ctx.saved_tensors  # once: activation checkpointing gives each of them out a single time
    return saved[:count], _with_tensors(ctx.terms, saved[count:]) if len(saved) > count else ctx.terms


def _with_tensors(terms: Terms, tensors: tuple[Any, ...]) -> Terms:
    fields: list[Any] = [*terms]
    fields[TENSORS] = tensors
    return Terms(*fields)


def _gradients_of_terms(dbias: Tensor | None, dsinks: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """For each of `count` arguments: the terms, flat or in one piece (`features.pack`). None or an empty tensor stands
    for no gradient; bias and sinks have more than one dimension."""
    if count == 1:
        return (None,)
    gradients: list[Tensor | None] = [None] * len(Terms._fields)
    gradients[_BIAS] = dbias if dbias is not None and dbias.dim() > 1 else None
    gradients[_SINKS] = dsinks if dsinks is not None and dsinks.dim() > 1 else None
    return tuple(gradients)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *terms = inputs
    _save(ctx, (q, k, v, *output), unpack(terms))


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    grad_output, grad_lse, q, k, v, _, _, _, *terms = inputs
    _save(ctx, (grad_output, grad_lse, q, k, v), unpack(terms))


class _ReverseMode(torch.autograd.Function):
    """Without a derivative in forward mode."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "flash_attention has no forward-mode derivative, which jvp, jacfwd and hessian take; use reverse mode "
            "(grad, jacrev), or implementation='naive' or 'sdpa_math'"
        )


class _Attention(_ReverseMode):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below_autograd(attention, *inputs)
        _save_attention(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if gradients[0] is None and gradients[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors, terms = _saved(ctx)
        needs_bias = terms.bias is not None and ctx.needs_input_grad[3 + _BIAS]
        dq, dk, dv, dbias, dsinks = _call(attention_backward, *gradients, *tensors, needs_bias, *pack(terms))
        return dq, dk, dv, *_gradients_of_terms(dbias, dsinks, len(ctx.needs_input_grad) - 3)


class _Backward(_ReverseMode):
    """`attention_backward`, which can be differentiated in its turn."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below_autograd(attention_backward, *inputs)
        _save_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        tensors, terms = _saved(ctx)
        weights = [None if w is None or w.numel() == 0 else w for w in cotangents]
        do, dl, dq, dk, dv, dbias, dsinks = _call(attention_double_backward, *weights, *tensors, *pack(terms))
        gradients = [x if y is not None else None for x, y in zip((do, dl), tensors[:2], strict=True)]
        # output and log-sum-exp are functions of q, k and v, whose gradients hold their share
        of_terms = _gradients_of_terms(dbias, dsinks, len(ctx.needs_input_grad) - 8)
        return *gradients, dq, dk, dv, None, None, None, *of_terms


class _DoubleBackward(_ReverseMode):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        return below_autograd(attention_double_backward, *inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("flash_attention has no third derivative; use implementation='naive' or 'sdpa_math' for it")


class _QkvAttention(_ReverseMode):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below_autograd(qkv_attention, *inputs)
        qkv, ctx.heads, *terms = inputs
        _save(ctx, (qkv, *output), unpack(terms))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if gradients[0] is None and gradients[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors, terms = _saved(ctx, 3)
        needs_bias = terms.bias is not None and ctx.needs_input_grad[2 + _BIAS]
        given = *gradients, *tensors, ctx.heads, needs_bias
        dqkv, dbias, dsinks = _call(qkv_attention_backward, *given, *pack(terms))
        return dqkv, None, *_gradients_of_terms(dbias, dsinks, len(ctx.needs_input_grad) - 2)


# With derivatives of their own where theirs are asked for: of three tensors.
def _apart(qkv: Tensor, heads: int, *terms: Any) -> Any:
    return _call(attention, *split_heads(qkv, heads), *terms)


def _backward_apart(grad_output: Any, grad_lse: Any, qkv: Tensor, output: Tensor, lse: Tensor, heads: int,
                    needs_bias: bool, *terms: Any) -> Any:  # fmt: skip
    saved = grad_output, grad_lse, *split_heads(qkv, heads), output, lse
    dq, dk, dv, dbias, dsinks = _call(attention_backward, *saved, needs_bias, *terms)
    return join_heads(dq, dk, dv), dbias, dsinks


# The forms that `torch.func` asks for, 10 microseconds slower a call, so used under its transforms alone.
class _TransformableAttention(_Attention):
    generate_vmap_rule = True
    forward = staticmethod(partial(below_autograd, attention))  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(_save_attention)


class _TransformableBackward(_Backward):
    generate_vmap_rule = True
    forward = staticmethod(partial(below_autograd, attention_backward))  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(_save_backward)


class _TransformableDoubleBackward(_DoubleBackward):
    generate_vmap_rule = True
    forward = staticmethod(partial(below_autograd, attention_double_backward))  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(lambda ctx, inputs, output: None)


# what records an operator: in eager mode, and under `torch.func`
_FUNCTIONS: dict[Any, tuple[Any, Any]] = {
    attention: (_Attention.apply, _TransformableAttention.apply),
    attention_backward: (_Backward.apply, _TransformableBackward.apply),
    attention_double_backward: (_DoubleBackward.apply, _TransformableDoubleBackward.apply),
    qkv_attention: (_QkvAttention.apply, _apart),
    qkv_attention_backward: (_backward_apart, _backward_apart),
}
for _operator, _q_at, _dbias_at in (
    (attention, 0, None),
    (attention_backward, 2, 3),
    (attention_double_backward, 7, 5),
    (qkv_attention, 0, None),
    (qkv_attention_backward, 2, 1),
):
    register(_operator, autograd=partial(_autograd, _operator), vmap=partial(fold_batch, _operator, _q_at, _dbias_at))
