"""The cross-entropy of a linear layer's logits, without ever holding all of them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from flash_train.ops.choice import TRITON_DTYPES, triton_obstacle
from flash_train.ops.cross_entropy_checks import autocasts, check_options, check_tensors, checked_classes


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_rows: int = 2048,
    reduction: str = "mean",
    ignore_index: int = -100,
    classes: int | None = None,
    soft_cap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight), targets)``, whose logits exist for ``chunk_rows`` rows at a time.

    The same loss and gradients, from the same three products of matrices. The gradients are computed with the loss,
    while a chunk's logits are there (as by Liger Kernel, Hsu et al. 2024, arXiv 2410.10989, section 3.2), and kept for
    the backward, which multiplies them by the one that it gets: of the sum of the losses, so that fp16 holds them
    before any loss scale. The weight's is summed up in fp32. On a GPU one Triton kernel makes losses and gradients of a
    chunk's logits in their place; elsewhere torch's operators do. A backward can run more than once
    (``retain_graph``). ``torch.func``'s vmap, grad and jacrev take it in eager mode.

    >>> import torch
    >>> hidden, head = torch.randn(512, 64), torch.nn.Linear(64, 1000, bias=False)
    >>> loss = chunked_cross_entropy(hidden, head.weight, torch.randint(1000, (512,)), chunk_rows=128)
    >>> loss.backward()

    Args:
        hidden: ``[..., C]``, in the weight's dtype; under autocast both are taken in autocast's.
        weight: ``[V, C]``.
        targets: ``[...]`` int64, from 0 to ``classes`` - 1, or ``ignore_index``: that row counts for nothing. Any other
            is an IndexError on a CPU, and on a GPU, where nobody waits for it, a loss that is NaN.
        chunk_rows: of the rows of ``hidden``; a chunk takes V numbers a row in its dtype on a GPU.
        reduction: ``"mean"`` over the targets that count, or ``"sum"``.
        classes: how many rows of ``weight``, from the first on, are classes (default V): further ones are padding,
            which has no part in the loss and a gradient of 0.
        soft_cap: logits are ``soft_cap * tanh(logits / soft_cap)``; 0 leaves them alone.
        z_loss: so many times the square of each row's log-sum-exp is added to its loss (Chowdhery et al. 2022, arXiv
            2204.02311, section 5).

    Returns:
        The loss in nats, a scalar in fp32 (float64 for float64). A mean over no target is NaN, its gradient 0.

    Raises:
        RuntimeError: a second derivative is taken, or one in forward mode.
        TypeError: what is no tensor, or a ``soft_cap`` or ``z_loss`` that is no Python number.
        ValueError: shapes, dtypes or devices that do not fit, a ``chunk_rows`` below 1, ``classes`` out of range, an
            unknown reduction, a ``soft_cap`` or ``z_loss`` that is negative or not finite.
    """
    check_tensors(hidden, weight, targets)
    check_options(chunk_rows, reduction, ignore_index, soft_cap=soft_cap, z_loss=z_loss)
    classes = checked_classes(classes, len(weight))
    dtype = hidden.dtype
    if autocasts(hidden) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    rows, flat = hidden.flatten(0, -2).to(dtype), targets.flatten()
    derives = torch.is_grad_enabled()
    total, _, _ = _call(
        rows, weight, flat, chunk_rows, ignore_index, classes, float(soft_cap), float(z_loss),
        derives and rows.requires_grad, derives and weight.requires_grad,
    )  # fmt: skip
    if reduction == "sum":
        return total
    counts = (flat != ignore_index).sum()
    return (total / counts.clamp(min=1)).masked_fill(counts == 0, math.nan)  # whose gradient would be 0 / 0


_library = torch.library.Library("flash_train", "FRAGMENT")
_library.define(
    # (sum of the losses, its derivatives; an empty tensor where one is not wanted)
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int chunk_rows, int ignored, int classes, "
    "float soft_cap, float z_loss, bool wants_hidden, bool wants_weight) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_operator = torch.ops.flash_train.linear_cross_entropy.default


def _sum_of_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_rows: int,
    ignored: int,
    classes: int,
    soft_cap: float,
    z_loss: float,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator on every device. The weight is cast in here, where its gradient is still fp32."""
    gradient = wants_hidden or wants_weight
    rows = _by_kernel if _has_kernel(hidden) else _by_torch
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(hidden.dtype)
        total = hidden.new_zeros((), dtype=_exact(hidden.dtype))
        d_hidden = torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0)
        d_weight = weight.new_zeros(weight.shape if wants_weight else 0, dtype=_exact(weight.dtype))
        for first in range(0, len(hidden), chunk_rows):
            chunk = slice(first, first + chunk_rows)
            h = hidden[chunk]
            losses, d = rows(functional.linear(h, w), targets[chunk], ignored, classes, soft_cap, z_loss, gradient)
            total += losses.sum()
            if wants_hidden:
                torch.mm(d, w, out=d_hidden[chunk])
            if wants_weight:
                _add_product(d_weight, d.T, h)
            del losses, d
        return total, d_hidden, d_weight.to(_kept(weight.dtype))


def _by_kernel(
    logits: Tensor, targets: Tensor, ignored: int, classes: int, soft_cap: float, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """(losses, the gradient of the logits, in their place)"""
    from flash_train.ops.kernels.cross_entropy import cross_entropy_rows

    return cross_entropy_rows(logits, targets, ignored, classes, soft_cap, z_loss, gradient=gradient), logits


def _by_torch(
    logits: Tensor, targets: Tensor, ignored: int, classes: int, soft_cap: float, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """As `_by_kernel`, but the gradient is a tensor of its own."""
    counts = targets != ignored
    known = (targets >= 0) & (targets < classes)
    if logits.device.type == "cpu" and not (known | ~counts).all():
        raise IndexError(
            f"targets must be from 0 to {classes - 1} or ignore_index = {ignored}, "
            f"got {int(targets[counts & ~known][0])}: mask what is no class, or give a weight with a row for it"
        )
    dtype, x = logits.dtype, logits.to(_exact(logits.dtype))
    if soft_cap:
        x.div_(soft_cap).tanh_().mul_(soft_cap)
    if classes < x.shape[1]:
        x[:, classes:] = -math.inf
    lse, index = x.logsumexp(1), targets.where(known, 0)[:, None]
    own = x.gather(1, index)[:, 0].where(known, math.nan)
    losses = torch.where(counts, lse - own + z_loss * lse * lse, 0)
    if not gradient:
        return losses, logits
    d = (x - lse[:, None]).exp_().mul_((1 + 2 * z_loss * lse)[:, None])
    d.scatter_add_(1, index, torch.full_like(index, -1, dtype=d.dtype))
    if soft_cap:  # the derivative of its tanh
        known, d_known = x[:, :classes].div_(soft_cap), d[:, :classes]
        d_known.addcmul_(d_known, known.square_(), value=-1)
    return losses, d.mul_(counts[:, None]).to(dtype)


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """to += a @ b, summed up in `to`'s dtype."""
    if to.dtype == a.dtype:
        to.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)  # pyright: ignore[reportCallIssue]
    else:
        to += torch.mm(a, b)


def _has_kernel(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in TRITON_DTYPES and triton_obstacle(hidden.device) is None


_library.impl("linear_cross_entropy", _sum_of_losses, "CompositeExplicitAutograd")


@torch.library.register_fake("flash_train::linear_cross_entropy", lib=_library)
def _fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wants_hidden, wants_weight = rest[-2:]
    return (
        hidden.new_empty((), dtype=_exact(hidden.dtype)),
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        weight.new_empty(weight.shape if wants_weight else 0, dtype=_kept(weight.dtype)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [x.dtype if wanted else None for x, wanted in zip(inputs[:2], inputs[-2:], strict=True)]
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, grad: Tensor | None, *of_derivatives: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in of_derivatives):  # they are results of the operator, and take part in create_graph
        raise RuntimeError(
            "chunked_cross_entropy has one derivative, and a second was asked for (create_graph=True): "
            "use cross_entropy of the whole logits"
        )
    if grad is None:
        return (None,) * 10
    grad = grad.reshape(1)  # a scalar would be rounded to a half before it multiplies one, and with it the gradient
    saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *(None if dtype is None else (x * grad).to(dtype) for x, dtype in saved), *[None] * 8


torch.library.register_autograd("flash_train::linear_cross_entropy", _derive, setup_context=_keep, lib=_library)


class _Transformed(torch.autograd.Function):
    """The operator for `torch.func`, which takes none whose formula is registered as above."""

    generate_vmap_rule = True
    forward = staticmethod(_operator)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_derive)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "chunked_cross_entropy has no forward-mode derivative, which jvp, jacfwd and hessian take: use reverse "
            "mode (grad, jacrev) or cross_entropy of the whole logits"
        )


def _call(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return _Transformed.apply(*args)
    return _operator(*args)


def _workspace(
    capability: tuple[int, int] | None, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, *rest: Any
) -> int:
    """Bytes that the operator holds while it runs, beside its results: a chunk, the cast weight, the fp32 sums."""
    wants_hidden, wants_weight = rest[-2:]
    size, exact = hidden.element_size(), max(4, hidden.element_size())
    rows, logit, row = min(chunk_rows, len(hidden)), size, 4  # bytes of a logit, and of a row's few numbers
    if capability is None or hidden.dtype == torch.float64:  # `_by_torch`
        gradient, rounded = wants_hidden or wants_weight, exact > size
        logit += exact + (exact if rounded else 0) + (size if rounded and gradient else 0)
        row = (22 if rounded else 30) if gradient else 10
    chunk = rows * (len(weight) * logit + row)
    cast = weight.numel() * size if weight.dtype != hidden.dtype else 0
    if not wants_weight or _kept(weight.dtype) == _exact(weight.dtype):
        return chunk + cast
    sums = weight.numel() * 4  # which the result follows in the end
    return cast + sums + max(0, chunk - weight.numel() * weight.element_size())


_operator.workspace_bytes = _workspace  # pyright: ignore[reportAttributeAccessIssue]


@register_flop_formula(torch.ops.flash_train.linear_cross_entropy)
def _flops(hidden: torch.Size, weight: torch.Size, *rest: Any, out_shape: object = None) -> int:
    """The logits, and a product as large for each gradient that is wanted."""
    return 2 * hidden[0] * weight[0] * weight[1] * (1 + sum(rest[-2:]))


def _kept(dtype: torch.dtype) -> torch.dtype:
    """Of the weight's gradient until the backward: a sum over all rows may be too large for fp16."""
    return torch.float32 if dtype == torch.float16 else dtype


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
