"""A feed-forward network's activation and second linear layer, as one operator that keeps the activation's input."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from flash_train.ops.checks import DTYPES, check_tensor
from flash_train.ops.choice import triton_obstacle
from flash_train.ops.cross_entropy_checks import autocasts

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
"""The names that `activation_linear` takes."""
_HALVES = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


def activation_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    """``linear(act(x), weight, bias)``, whose backward computes ``act(x)`` again instead of finding it kept.

    The same products of matrices. What is kept is x and the weight, half of what plain PyTorch keeps of the hidden
    layer. On a GPU (fp16, bf16) one Triton kernel makes act(x), and in the backward another makes it together with the
    gradient of x, in one pass over x and the gradient of act(x), whose memory one of the two takes; elsewhere torch's
    operators do, and the results are those of the composed formula, bit for bit. Second derivatives, ``torch.func``'s
    transforms in eager mode and forward mode take the composed formula.

    >>> import torch
    >>> hidden, projection = torch.randn(512, 256), torch.nn.Linear(256, 64)
    >>> activation_linear(hidden, projection.weight, projection.bias).shape
    torch.Size([512, 64])

    Args:
        x: ``[..., F]``; for ``"swiglu"`` ``[..., 2 F]``, the gate's half first.
        weight: ``[C, F]``.
        bias: ``[C]``, or None. All have one dtype; under autocast they are taken in autocast's.
        activation: ``"gelu"`` (exact), ``"gelu_tanh"`` (its approximation) or ``"swiglu"`` (silu(gate) * up).

    Returns:
        ``[..., C]``, in the dtype of the inputs, or in autocast's.

    Raises:
        TypeError: what is no tensor.
        ValueError: shapes, dtypes or devices that do not fit, or an unknown activation.
    """
    _check(x, weight, bias, activation)
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    _check_dtypes(x, weight, bias)
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return functional.linear(_composed(x, activation), weight, bias)
    return _operator(x, weight, bias, activation)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(dtype)  # autocast leaves float64 alone


def _composed(x: Tensor, activation: str) -> Tensor:
    """act(x) by torch's operators."""
    if activation != "swiglu":
        return functional.gelu(x, approximate=_approximate(activation))
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _approximate(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


_library = torch.library.Library("flash_train", "FRAGMENT")
for _schema in (
    "activation_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    # of x, of the weight, of the bias; an empty tensor where one is not wanted
    "activation_linear_backward(Tensor grad, Tensor x, Tensor weight, str activation, bool wants_x, bool wants_weight, "
    "bool wants_bias) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_operator = torch.ops.flash_train.activation_linear.default
_backward_operator = torch.ops.flash_train.activation_linear_backward.default


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(_activate(x, activation), weight, bias)


def _activate(x: Tensor, activation: str) -> Tensor:
    """act(x), with no other memory than its own."""
    if _has_kernel(x):
        from flash_train.ops.kernels.activation import activate

        return activate(_rows(x), activation).view(*x.shape[:-1], -1)
    if activation != "swiglu":
        return _composed(x, activation)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, activation: str, wants_x: bool, wants_weight: bool, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, of_weight, of_bias = grad.new_empty(0), grad.new_empty(0), grad.new_empty(0)
    g, rows = grad.reshape(-1, len(weight)), _rows(x)
    with torch.autocast(x.device.type, enabled=False):
        if wants_x and _has_kernel(x):
            from flash_train.ops.kernels.activation import derive

            of_x, activated = derive(torch.mm(g, weight), rows, activation, output=wants_weight)
            if activated is not None:
                of_weight = torch.mm(g.T, activated)
        else:  # one after the other: what both need at once is not there
            if wants_weight:
                of_weight = torch.mm(g.T, _activate(rows, activation))
            if wants_x:
                of_x = _derive(torch.mm(g, weight), rows, activation)
        if wants_bias:
            of_bias = g.sum(0)
    return of_x.view(x.shape) if wants_x else of_x, of_weight, of_bias


def _derive(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x [N, F] or [N, 2F] by torch's operators, from that of act(x), in whose memory it works."""
    if activation != "swiglu":
        return aten.gelu_backward.grad_input(grad, x, approximate=_approximate(activation), grad_input=grad)
    gate, up = x.chunk(2, dim=-1)
    of_x = torch.empty_like(x)
    of_gate, of_up = of_x.chunk(2, dim=-1)
    aten.silu.out(gate, out=of_up).mul_(grad)
    aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=of_gate)
    return of_x


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _HALVES and triton_obstacle(x.device) is None


_library.impl("activation_linear", _forward, "CompositeExplicitAutograd")
_library.impl("activation_linear_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("flash_train::activation_linear", lib=_library)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("flash_train::activation_linear_backward", lib=_library)
def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, activation: str, wants_x: bool, wants_weight: bool, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if wants_x else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
        weight.new_empty(weight.shape[0] if wants_bias else 0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.activation = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # they are to be differentiated in their turn
        return *_differentiable(grad, x, weight, ctx.activation, *wanted), None
    results = _backward_operator(grad, x, weight, ctx.activation, *wanted)
    return *(y if needed else None for y, needed in zip(results, wanted, strict=True)), None


def _differentiable(
    grad: Tensor, x: Tensor, weight: Tensor, activation: str, wants_x: bool, wants_weight: bool, wants_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`_backward` by torch's operators, each with a derivative."""
    of_x = of_weight = None
    if wants_x:
        of_act = grad @ weight
        if activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            s = torch.sigmoid(gate)
            of_gate = of_act * up * s * (1 + gate * (1 - s))
            of_x = torch.cat((of_gate, of_act * gate * s), dim=-1)
        else:
            of_x = aten.gelu_backward(of_act, x, approximate=_approximate(activation))
    g = grad.reshape(-1, len(weight))
    if wants_weight:
        activated = _composed(x, activation)
        of_weight = g.T @ activated.reshape(-1, activated.shape[-1])
    return of_x, of_weight, g.sum(0) if wants_bias else None


torch.library.register_autograd("flash_train::activation_linear", _gradients, setup_context=_keep, lib=_library)


def _workspace(
    capability: tuple[int, int] | None, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> int:
    """Bytes that the operator holds while it runs, beside its result: act(x)."""
    return _activated(x, weight)


def _backward_workspace(
    capability: tuple[int, int] | None,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    activation: str,
    wants_x: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> int:
    """Bytes that the backward holds beside its results: act(x), or its gradient where that is no result.

    Torch's operators make act(x) before there is a gradient of x, which for GELU is as large, in its own memory.
    """
    if activation == "swiglu" or not wants_x:
        return _activated(x, weight) if wants_x or wants_weight else 0
    by_kernel = capability is not None and x.dtype in _HALVES
    return _activated(x, weight) if by_kernel and wants_weight else 0


def _activated(x: Tensor, weight: Tensor) -> int:
    return math.prod(x.shape[:-1]) * weight.shape[1] * x.element_size()


_operator.workspace_bytes = _workspace  # pyright: ignore[reportAttributeAccessIssue]
_backward_operator.workspace_bytes = _backward_workspace  # pyright: ignore[reportAttributeAccessIssue]


@register_flop_formula(torch.ops.flash_train.activation_linear)
def _flops(x: torch.Size, weight: torch.Size, *rest: object, out_shape: object = None) -> int:
    """The product's, as torch counts a linear layer."""
    return 2 * math.prod(x[:-1]) * weight[0] * weight[1]


@register_flop_formula(torch.ops.flash_train.activation_linear_backward)
def _backward_flops(
    grad: object, x: torch.Size, weight: torch.Size, activation: str, wants_x: bool, wants_weight: bool,
    wants_bias: bool, out_shape: object = None,
) -> int:  # fmt: skip
    return (wants_x + wants_weight) * _flops(x, weight)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, y in tensors.items():
        check_tensor(name, y)
        if y.device != x.device:
            raise ValueError(
                f"x, weight and bias must be on one device, got {name} on {y.device} and x on {x.device}: "
                "move it with .to(x.device)"
            )
        if y.dtype not in DTYPES:
            raise ValueError(f"{name} must be fp16, bf16, fp32 or float64, got {y.dtype}: cast it to one of these")
    times = 2 if activation == "swiglu" else 1
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != times * weight.shape[1]:
        raise ValueError(
            f"x must be [..., {'2 F' if times == 2 else 'F'}] and weight [C, F], got {list(x.shape)} and "
            f"{list(weight.shape)}: give the weight of the linear layer behind the activation"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{len(weight)}], one number a row of weight, got {list(bias.shape)}")


def _check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    dtypes = [y.dtype for y in (x, weight, bias) if y is not None]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"x, weight and bias must have one dtype outside of autocast, got {', '.join(map(str, dtypes))}: cast them"
        )
