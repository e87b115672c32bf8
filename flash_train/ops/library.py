"""The operators as torch sees them: schema, kernels, fake tensors, autograd, vmap, FLOP formulas.

Three operators: `flash_train::attention`, its derivative `attention_backward`, and the derivative of that. The kernels
of the first two choose between the Triton launchers and the tiled path when they run, so that a step down can be
logged under `torch.compile` as well; the third is tiled. Whatever they take beside q, k and v is `features.Terms`,
flat, at the end.

The autograd formula is an `autograd.Function` under the dispatcher's Autograd key: 20 microseconds of host time a call
with an empty kernel, where `torch.library.custom_op` with `register_autograd` takes 37 (torch 2.13, one CPU core).
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from flash_train.ops.choice import choose_implementation
from flash_train.ops.double_backward import tiled_double_backward
from flash_train.ops.features import SCHEMA, Terms
from flash_train.ops.tiled import tiled_attention, tiled_attention_backward

_log = logging.getLogger(__name__)
_library = torch.library.Library("flash_train", "DEF")
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse"
for _schema in (
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)",
    # (dQ, dK, dV, d bias, d sinks); of the last two an empty tensor where it is not needed
    f"attention_backward(Tensor? grad_output, Tensor? grad_lse, {_SAVED}, bool needs_bias, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # of sum(w * backward) for (dO, dL, q, k, v, bias, sinks)
    "attention_double_backward(Tensor? w_dq, Tensor? w_dk, Tensor? w_dv, Tensor? w_dbias, Tensor? w_dsinks, "
    f"Tensor? grad_output, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
attention = torch.ops.flash_train.attention.default
attention_backward = torch.ops.flash_train.attention_backward.default
attention_double_backward = torch.ops.flash_train.attention_double_backward.default


def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Any:
    """(output, log-sum-exp)."""
    return _call(attention, _Attention, _TransformableAttention, q, k, v, *terms)


def _call(operator: Callable[..., Any], function: Any, transformable: Any, *args: Any) -> Any:
    """The operator by the shortest way: in eager mode its Function, without asking torch's dispatcher for it."""
    if torch.compiler.is_compiling():
        return operator(*args)
    if torch._C._are_functorch_transforms_active():
        return transformable.apply(*args)
    return _autograd(operator, function, *args)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    terms = Terms(*rest)
    if q.numel() and k.numel() and _chosen(terms.implementation, q, k, v) == "triton":
        from flash_train.ops.kernels.forward import attention_forward  # Triton is imported when a kernel first runs

        return attention_forward(q, k, v, terms)
    with torch.autocast(q.device.type, enabled=False):  # it would cast the tiles, which are float32 on purpose
        return tiled_attention(q, k, v, terms)


def _backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    needs_bias: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    terms = Terms(*rest)
    if grad_output is None:  # only the log-sum-exp was used
        grad_output = torch.zeros((), dtype=output.dtype, device=output.device).expand(output.shape)
    saved = grad_output, grad_lse, q, k, v, output, lse
    if q.numel() and k.numel() and _chosen(terms.implementation, q, k, v) == "triton":
        from flash_train.ops.kernels.backward import attention_backward as launch

        gradients = launch(*saved, terms, needs_bias=needs_bias)
    else:
        with torch.autocast(q.device.type, enabled=False):
            gradients = tiled_attention_backward(*saved, terms, needs_bias=needs_bias)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _double_backward(*args: Any) -> tuple[Tensor, ...]:
    *cotangents, grad_output, grad_lse, q, k, v = args[:10]
    terms = Terms(*args[10:])
    with _every_dispatch_key(), torch.autocast(q.device.type, enabled=False):
        results = tiled_double_backward(cotangents, grad_output, grad_lse, q, k, v, terms)
    present = (terms.bias is not None, terms.sinks is not None)
    return *results[:5], *(x if there else q.new_empty(0) for x, there in zip(results[5:], present, strict=True))


def _every_dispatch_key() -> Any:
    """Inside, a kernel may use `torch.func`, whose dispatch keys are switched off below a `TorchDispatchMode`."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded - excluded)


# every device: the choice is made inside
_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_library.impl("attention_double_backward", _double_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("flash_train::attention", lib=_library)
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    output = q.new_empty(B, T, H, v.shape[-1], dtype=Terms(*rest).output_dtype or q.dtype)
    return output.transpose(1, 2), q.new_empty(B, H, T, dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_of(q: Tensor, *likes: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in likes)


@torch.library.register_fake("flash_train::attention_backward", lib=_library)
def _fake_backward(grad_output: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs_bias, terms = rest[2], Terms(*rest[3:])
    return _fake_of(q, q, k, v, terms.bias if needs_bias else None, terms.sinks)


@torch.library.register_fake("flash_train::attention_double_backward", lib=_library)
def _fake_double_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_output, grad_lse, q, k, v = args[5:10]
    terms = Terms(*args[10:])
    wide = torch.promote_types(q.dtype, torch.float32)
    if grad_output is None:
        grad_output = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide)
    if grad_lse is None:
        grad_lse = q.new_empty(q.shape[:3], dtype=wide)
    return _fake_of(q, grad_output, grad_lse, q, k, v, terms.bias, terms.sinks)


def _below_autograd(operator: Callable[..., Any], *args: Any) -> Any:
    if _nobody_watches(args):
        return _KERNELS[operator](*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _nobody_watches(args: tuple[Any, ...]) -> bool:
    """Whether the kernel may be called without torch's dispatcher, which takes 15 microseconds for 20 arguments."""
    return (
        torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        and _are_plain(args)
    )


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Whether there is no subclass of Tensor, and no tensor whose numbers are not what lies in its memory."""
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            if x.is_neg() or x.is_meta or x._is_zerotensor():  # is_neg: negated when it is read
                return False
        elif kind not in _NO_TENSOR:
            return False
    return True


_NO_TENSOR = {type(None), bool, int, float, str, torch.dtype}
_KERNELS: dict[Any, Callable[..., Any]] = {
    attention: _forward,
    attention_backward: _backward,
    attention_double_backward: _double_backward,
}


_TENSORS = slice(Terms._fields.index("bias"), Terms._fields.index("left"))
"""Where `Terms` has its tensors."""
_BIAS, _SINKS = Terms._fields.index("bias"), Terms._fields.index("sinks")


def _save(ctx: Any, tensors: tuple[Tensor | None, ...], terms: Terms) -> None:
    ctx.save_for_backward(*tensors, *terms[_TENSORS])
    ctx.options = terms[: _TENSORS.start], terms[_TENSORS.stop :]
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs no gradient of zeros


def _saved(ctx: Any) -> tuple[tuple[Any, ...], Terms]:
    """(tensors, terms) as they were saved."""
    saved = ctx.saved_tensors  # once: activation checkpointing gives each of them out a single time
    count = len(saved) - (_TENSORS.stop - _TENSORS.start)
    before, after = ctx.options
    return saved[:count], Terms(*before, *saved[count:], *after)


def _gradients_of_terms(dbias: Tensor, dsinks: Tensor) -> tuple[Tensor | None, ...]:
    """For each of the terms; an empty tensor stands for none, and bias and sinks have more than one dimension."""
    gradients: list[Tensor | None] = [None] * len(Terms._fields)
    gradients[_BIAS] = dbias if dbias.dim() > 1 else None
    gradients[_SINKS] = dsinks if dsinks.dim() > 1 else None
    return tuple(gradients)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *terms = inputs
    _save(ctx, (q, k, v, *output), Terms(*terms))


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    grad_output, grad_lse, q, k, v, _, _, _, *terms = inputs
    _save(ctx, (grad_output, grad_lse, q, k, v), Terms(*terms))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _below_autograd(attention, *inputs)
        _save_attention(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if gradients[0] is None and gradients[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors, terms = _saved(ctx)
        args = (*gradients, *tensors, ctx.needs_input_grad[3 + _BIAS], *terms)
        dq, dk, dv, dbias, dsinks = _call(attention_backward, _Backward, _TransformableBackward, *args)
        return dq, dk, dv, *_gradients_of_terms(dbias, dsinks)


class _Backward(torch.autograd.Function):
    """`attention_backward`, which can be differentiated in its turn."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _below_autograd(attention_backward, *inputs)
        _save_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        tensors, terms = _saved(ctx)
        weights = [None if w is None or w.numel() == 0 else w for w in cotangents]
        operator, function = attention_double_backward, _DoubleBackward
        do, dl, dq, dk, dv, dbias, dsinks = _call(
            operator, function, _TransformableDoubleBackward, *weights, *tensors, *terms
        )
        gradients = [x if y is not None else None for x, y in zip((do, dl), tensors[:2], strict=True)]
        # output and log-sum-exp are functions of q, k and v, whose gradients hold their share
        return *gradients, dq, dk, dv, None, None, None, *_gradients_of_terms(dbias, dsinks)


class _DoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        return _below_autograd(attention_double_backward, *inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("flash_attention has no third derivative; use implementation='naive' or 'sdpa_math' for it")


# The forms that `torch.func` asks for, 10 microseconds slower a call, so used under its transforms alone.
class _TransformableAttention(_Attention):
    generate_vmap_rule = True
    forward = staticmethod(partial(_below_autograd, attention))  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(_save_attention)


class _TransformableBackward(_Backward):
    generate_vmap_rule = True
    forward = staticmethod(partial(_below_autograd, attention_backward))  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(_save_backward)


class _TransformableDoubleBackward(_DoubleBackward):
    generate_vmap_rule = True
    forward = staticmethod(partial(_below_autograd, attention_double_backward))  # pyright: ignore[reportAssignmentType]
    setup_context = staticmethod(lambda ctx, inputs, output: None)


def _autograd(operator: Callable[..., Any], function: Any, *args: Any) -> Any:
    """The operator, recorded where a derivative of it may be asked for."""
    recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    if recorded or forward_ad._current_level >= 0:  # which has no formula here: the Function says so
        return function.apply(*args)
    return _below_autograd(operator, *args)


def _vmap(operator: Callable[..., Any], q_at: int, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """The vmapped dimension, N long, becomes part of the batch: [N, B, ...] is computed as [N * B, ...]."""
    N = info.batch_size
    q, q_dim = args[q_at], in_dims[q_at]
    B = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
    first_term = len(args) - len(Terms._fields)
    names = (*("" for _ in range(first_term)), *Terms._fields)
    alone = {}  # results that a batch of one shares

    def fold(name: str, x: Any, dimension: int | None) -> Any:
        if not isinstance(x, Tensor) or (name == "bounds" and dimension is None):
            return x
        x = x.expand(N, *x.shape) if dimension is None else x.movedim(dimension, 0)
        if name == "bounds":
            return x.flatten(0, 1)
        if name in ("query_document", "key_document") and in_dims[names.index("bounds")] is not None:
            count = args[names.index("bounds")].movedim(in_dims[names.index("bounds")], 0).shape[1]
            x = x + (torch.arange(N, device=x.device, dtype=x.dtype) * count)[:, None, None]
        if x.shape[1] != B:  # a bias of one for the whole batch
            alone[name] = True
            x = x.expand(N, B, *x.shape[2:])
        return x.flatten(0, 1)

    outputs = operator(*(fold(*each) for each in zip(names, args, in_dims, strict=True)))
    bias_at = {2: 3, 7: 5}.get(q_at)  # where a gradient of the bias stands among the results
    results = [x if x.dim() == 1 else x.unflatten(0, (N, -1)) for x in outputs]
    if bias_at is not None and "bias" in alone:
        results[bias_at] = results[bias_at].sum(1, keepdim=True) if outputs[bias_at].dim() > 1 else results[bias_at]
    return tuple(results), tuple(None if x.dim() == 1 else 0 for x in outputs)


for _operator, _function, _q_at in (
    (attention, _Attention, 0),
    (attention_backward, _Backward, 2),
    (attention_double_backward, _DoubleBackward, 7),
):
    _name = _operator._schema.name.removeprefix("flash_train::")
    _library.impl(_name, partial(_autograd, _operator, _function), "Autograd")
    torch.library.register_vmap(_operator, partial(_vmap, _operator, _q_at), lib=_library)


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
