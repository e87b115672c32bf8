"""The operators as torch sees them: schema, kernels, fake tensors, FLOP formulas; `derivatives.py` adds the rest.

Three operators: `flash_train::attention`, its derivative `attention_backward`, and the derivative of that. The kernels
of the first two choose between the Triton launchers and the tiled path when they run, so that a step down can be
logged under `torch.compile` as well; the third is tiled. Whatever they take beside q, k and v is `features.Terms`,
flat, at the end.

`qkv_attention` and `qkv_attention_backward` are the first two for queries, keys and values that lie in one tensor, as a
fused projection makes them: its gradient is one tensor too, which the Hopper kernels write. The gradients of three
views would be put together by a pass of its own, over all of them.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportMissingModuleSource]
from torch.utils.flop_counter import register_flop_formula

from flash_train.ops.choice import choose_implementation
from flash_train.ops.double_backward import tiled_double_backward
from flash_train.ops.features import SCHEMA, Terms, join_heads, pack, split_heads, unpack
from flash_train.ops.kernels.again import repeat
from flash_train.ops.tiled import tiled_attention, tiled_attention_backward
from flash_train.ops.workspace import (
    backward_workspace,
    forward_workspace,
    qkv_backward_workspace,
    qkv_forward_workspace,
)

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
    f"qkv_attention(Tensor qkv, int heads, {SCHEMA}) -> (Tensor, Tensor)",
    # (d qkv, d bias, d sinks)
    "qkv_attention_backward(Tensor? grad_output, Tensor? grad_lse, Tensor qkv, Tensor output, Tensor lse, int heads, "
    f"bool needs_bias, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
attention = torch.ops.flash_train.attention.default
attention_backward = torch.ops.flash_train.attention_backward.default
attention_double_backward = torch.ops.flash_train.attention_double_backward.default
qkv_attention = torch.ops.flash_train.qkv_attention.default
qkv_attention_backward = torch.ops.flash_train.qkv_attention_backward.default
for _operator, _workspace in (
    (attention, forward_workspace),
    (attention_backward, backward_workspace),
    (qkv_attention, qkv_forward_workspace),
    (qkv_attention_backward, qkv_backward_workspace),
):
    _operator.workspace_bytes = _workspace  # pyright: ignore[reportAttributeAccessIssue]


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return repeat(_attend, (q, k, v), unpack(rest))


def _attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    chosen = _chosen(q, k, v, terms)
    if chosen != "tiled" and q.numel() and k.numel():  # Triton is imported when a kernel first runs
        if chosen == "hopper":
            from flash_train.ops.kernels.hopper.forward import hopper_forward as launch
        else:
            from flash_train.ops.kernels.forward import attention_forward as launch

        return launch(q, k, v, terms)
    with torch.autocast(q.device.type, enabled=False):  # it would cast the tiles, which are float32 on purpose
        return tiled_attention(q, k, v, terms)


def _backward(*args: Any) -> tuple[Tensor | None, ...]:
    saved, needs_bias, terms = args[:7], args[7], unpack(args[8:])
    if needs_bias:
        return _derive(*saved, terms=terms, needs_bias=True)
    return repeat(_derive, saved, terms)


def _derive(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    needs_bias: bool = False,
    joint: bool = False,
) -> tuple[Tensor | None, ...]:
    """`joint`: dQ, dK and dV in one tensor, for which the Hopper kernels must be those that run."""
    if grad_output is None:  # only the log-sum-exp was used
        grad_output = torch.zeros((), dtype=output.dtype, device=output.device).expand(output.shape)
    saved = grad_output, grad_lse, q, k, v, output, lse
    chosen = _chosen(q, k, v, terms, backward=True)
    if chosen == "hopper" and q.numel() and k.numel():
        from flash_train.ops.kernels.hopper.derivative import hopper_backward

        return *hopper_backward(*saved, terms, joint=joint), None, None  # it takes neither biases nor sinks
    if chosen != "tiled" and q.numel() and k.numel():
        from flash_train.ops.kernels.backward import attention_backward as launch

        return launch(*saved, terms, needs_bias=needs_bias)
    with torch.autocast(q.device.type, enabled=False):
        return tiled_attention_backward(*saved, terms, needs_bias=needs_bias)


def _qkv_forward(qkv: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return _forward(*split_heads(qkv, heads), *rest)


_derive_jointly = partial(_derive, joint=True)


def _qkv_backward(*args: Any) -> tuple[Tensor | None, ...]:
    (grad_output, grad_lse, qkv, output, lse, heads, needs_bias), terms = args[:7], unpack(args[7:])
    q, k, v = split_heads(qkv, heads)
    saved = grad_output, grad_lse, q, k, v, output, lse
    if qkv.numel() and _chosen(q, k, v, terms, backward=True) == "hopper":
        return repeat(_derive_jointly, saved, terms)
    dq, dk, dv, dbias, dsinks = _backward(*saved, needs_bias, *pack(terms))
    assert dq is not None and dk is not None and dv is not None
    return join_heads(dq, dk, dv), dbias, dsinks


def _as_declared(kernel: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """With an empty tensor where `kernel` answers None: a schema knows no result that may be absent."""

    def declared(*args: Any) -> tuple[Tensor, ...]:
        results = kernel(*args)
        return tuple([results[0].new_empty(0) if x is None else x for x in results])

    return declared


def _double_backward(*args: Any) -> tuple[Tensor, ...]:
    *cotangents, grad_output, grad_lse, q, k, v = args[:10]
    terms = unpack(args[10:])
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
_library.impl("attention_backward", _as_declared(_backward), "CompositeExplicitAutograd")
_library.impl("attention_double_backward", _double_backward, "CompositeExplicitAutograd")
_library.impl("qkv_attention", _qkv_forward, "CompositeExplicitAutograd")
_library.impl("qkv_attention_backward", _as_declared(_qkv_backward), "CompositeExplicitAutograd")


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


@torch.library.register_fake("flash_train::qkv_attention", lib=_library)
def _fake_qkv(qkv: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake(*split_heads(qkv, heads), *rest)


@torch.library.register_fake("flash_train::qkv_attention_backward", lib=_library)
def _fake_qkv_backward(grad_output: Any, grad_lse: Any, qkv: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs_bias, terms = rest[3], Terms(*rest[4:])
    return _fake_of(qkv, qkv, terms.bias if needs_bias else None, terms.sinks)


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


def below_autograd(operator: Callable[..., Any], *args: Any) -> Any:
    """`Terms` come last, as by `features.pack`."""
    if _nobody_watches(args):
        return _KERNELS[operator](*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*flat(args))


def flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments as its schema has them."""
    return (*args[:-1], *args[-1]) if type(args[-1]) is Terms else args


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
            # is_neg: negated when it is read; the last: under torch.autograd.grad(is_grads_batched=True)
            if x.is_neg() or x.is_meta or x._is_zerotensor() or is_legacy_batchedtensor(x):
                return False
        elif kind not in _NO_TENSOR:
            return False
    return True


_NO_TENSOR = {type(None), bool, int, float, str, torch.dtype, Terms}  # `Terms` in one piece have no tensors
_KERNELS: dict[Any, Callable[..., Any]] = {
    attention: _forward,
    attention_backward: _backward,
    attention_double_backward: _double_backward,
    qkv_attention: _qkv_forward,
    qkv_attention_backward: _qkv_backward,
}


def register(operator: Any, *, autograd: Callable[..., Any], vmap: Callable[..., Any]) -> None:
    """Give an operator its kernel under the Autograd key and its batching rule."""
    _library.impl(operator._schema.name.removeprefix("flash_train::"), _as_declared(autograd), "Autograd")
    torch.library.register_vmap(operator, vmap, lib=_library)


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


def _sizes_of(qkv: torch.Size, heads: int) -> tuple[torch.Size, torch.Size]:
    """(q's, k's and v's)"""
    B, T, count, D = qkv
    return torch.Size((B, heads, T, D)), torch.Size((B, (count - heads) // 2, T, D))


@register_flop_formula(torch.ops.flash_train.qkv_attention)
def _qkv_flops(qkv: torch.Size, heads: int, *_: object, out_shape: object = None) -> int:
    q, k = _sizes_of(qkv, heads)
    return _flops(q, k, k)


@register_flop_formula(torch.ops.flash_train.qkv_attention_backward)
def _qkv_backward_flops(
    grad_output: object,
    grad_lse: object,
    qkv: torch.Size,
    output: object,
    lse: object,
    heads: int,
    *_: object,
    out_shape: object = None,
) -> int:
    q, k = _sizes_of(qkv, heads)
    return _backward_flops(None, None, q, k, k)


def _chosen(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, backward: bool = False) -> str:
    name, reason = choose_implementation(terms.implementation, q, k, v, terms, backward=backward)
    if reason is not None:
        what = "attention's backward" if backward else "attention"
        _log_once(f"{what}: {name} runs instead of {terms.implementation}: {reason}")
    return name


@cache
def _log_once(message: str) -> None:
    _log.warning(message)
