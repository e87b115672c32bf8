"""The cross-entropy of a linear layer's logits, without ever holding all of them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

REDUCTIONS = ("mean", "sum")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_rows: int = 2048,
    reduction: str = "mean",
    ignore_index: int = -100,
    classes: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight), targets)``, whose logits exist for ``chunk_rows`` rows at a time.

    The same loss and gradients; what is kept for the backward are the arguments. A backward makes each chunk's logits
    again, which costs one product of matrices more, and adds up the weight's gradient in fp32. It can run more than
    once (``retain_graph``); a second derivative is refused (``RuntimeError``).

    >>> import torch
    >>> hidden, head = torch.randn(512, 64), torch.nn.Linear(64, 1000, bias=False)
    >>> loss = chunked_cross_entropy(hidden, head.weight, torch.randint(1000, (512,)), chunk_rows=128)
    >>> loss.backward()

    Args:
        hidden: ``[..., C]``, in the weight's dtype; under autocast both are taken in autocast's.
        weight: ``[V, C]``.
        targets: ``[...]`` int64, from 0 to ``classes`` - 1, or ``ignore_index``: that row counts for nothing.
        chunk_rows: of the rows of ``hidden``; at its peak a chunk takes 8 V (fp32) to 10 V bytes a row (bf16).
        reduction: ``"mean"`` over the targets that count, or ``"sum"``.
        classes: how many rows of ``weight``, from the first on, are classes (default V): further ones are padding,
            which has no part in the loss and a gradient of 0.

    Returns:
        The loss in nats, a scalar in fp32 (float64 for float64).

    Raises:
        ValueError: shapes or dtypes that do not fit, a ``chunk_rows`` below 1, ``classes`` out of range, an unknown
            reduction.
    """
    _check(hidden, weight, targets, chunk_rows, reduction)
    classes = _checked_classes(classes, len(weight))
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    rows, flat = hidden.flatten(0, -2).to(dtype), targets.flatten()
    total: Tensor = _ChunkedSum.apply(rows, weight, flat, chunk_rows, ignore_index, classes)  # pyright: ignore[reportAssignmentType]
    return total / (flat != ignore_index).sum() if reduction == "mean" else total


class _ChunkedSum(torch.autograd.Function):
    """The sum of the rows' losses. The weight is cast in here, where its gradient is still fp32.

    torch's own linear_cross_entropy (from 2.13) computes the gradients in the forward, where fp16 knows no loss scale,
    and is not compiled.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, ignored: int, classes: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk_rows, ctx.ignored, ctx.classes = chunk_rows, ignored, classes
        w = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=_exact(hidden.dtype), device=hidden.device)
        for h, t in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            logits = functional.linear(h, w).to(total.dtype)
            if classes < len(w):
                logits[:, classes:] = -math.inf
            total = total + functional.cross_entropy(logits, t, reduction="sum", ignore_index=ignored)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch's own guard misses a constant grad
            raise RuntimeError(
                "chunked_cross_entropy has one derivative, and create_graph=True asks for two: "
                "use cross_entropy of the whole logits"
            )
        hidden, weight, targets = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        w = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=_exact(weight.dtype)) if wants_weight else None
        for first in range(0, hidden.shape[0], ctx.chunk_rows):
            chunk = slice(first, first + ctx.chunk_rows)
            h, t = hidden[chunk], targets[chunk]
            # [V, rows], not [rows, V]: a compiler that met the forward's product here again would keep its result,
            # and with it all logits.
            p = torch.mm(w, h.T).to(grad.dtype)
            if ctx.classes < len(w):
                p[ctx.classes :] = -math.inf
            p = p.softmax(0)
            kept = t != ctx.ignored
            index = t.where(kept, 0)[None]
            p.scatter_add_(0, index, torch.full_like(index, -1, dtype=p.dtype))
            p = p.mul_(grad * kept).to(h.dtype)  # the gradient of the logits
            if d_hidden is not None:
                d_hidden[chunk] = torch.mm(p.T, w)
            if d_weight is not None:
                d_weight += torch.mm(p, h)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


def _checked_classes(classes: int | None, rows: int) -> int:
    if classes is None:
        return rows
    if not isinstance(classes, int) or isinstance(classes, bool) or not 1 <= classes <= rows:
        raise ValueError(f"classes must be a number of the weight's rows, from 1 to {rows}, got {classes!r}")
    return classes


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, reduction: str) -> None:
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., C] and weight [V, C], got {list(hidden.shape)} and {list(weight.shape)}: "
            "give the linear layer's own weight, and a row at least"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must give each of the rows {list(hidden.shape[:-1])} of hidden one, got {list(targets.shape)}"
            ": reshape them alike"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 indices, got {targets.dtype}: use targets.long()")
    if not torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden and weight must have one dtype outside of autocast, got {hidden.dtype} and {weight.dtype}: "
            "cast one of them"
        )
    if not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool) or chunk_rows < 1:
        raise ValueError(f"chunk_rows must be a number of rows from 1 on, got {chunk_rows!r}: 2048 is usual")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
