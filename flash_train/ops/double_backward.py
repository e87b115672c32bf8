"""The derivative of rung 5, the backward: a tile of queries at a time, in plain PyTorch, on every device."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_train.ops.features import Terms
from flash_train.ops.reference import safe_attention
from flash_train.ops.tiled import compute_dtype, default_tile, tiles


def tiled_double_backward(
    cotangents: Sequence[Tensor | None],
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    *,
    tile: int | None = None,
) -> tuple[Tensor, ...]:
    """The second derivative: the gradients of sum(cotangents * backward(...)) for (dO, dL, q, k, v, bias, sinks).

    `cotangents` are those of (dQ, dK, dV, d bias, d sinks), None for zeros. A tile of queries is taken against all keys
    at once, by differentiating the definition (rung 2): memory grows with T + S, and every feature is right because
    the definition is.
    """
    B, H, T, _ = q.shape
    dtype = compute_dtype(q)
    zero = torch.zeros((), dtype=dtype, device=q.device)
    inputs = [
        zero.expand(B, H, T, v.shape[-1]) if grad_output is None else grad_output,
        zero.expand(B, H, T) if grad_lse is None else grad_lse,
        q,
        k,
        v,
        zero.expand(1, 1, 1, 1) if terms.bias is None else terms.bias,
        (zero - math.inf).expand(B, H) if terms.sinks is None else terms.sinks,  # which adds exp(-inf) = 0
    ]
    weights = [zero.expand(x.shape) if w is None else w for w, x in zip(cotangents, inputs[2:], strict=True)]
    totals = [torch.zeros(x.shape, dtype=dtype, device=q.device) for x in inputs]
    for rows in tiles(0, T, tile or default_tile(q)):
        backward = partial(_backward, partial(_forward, terms, rows, T))
        pull = torch.func.vjp(backward, *(x.detach().to(dtype) for x in _part(inputs, rows)))[1]
        weights_of_rows = _part([*inputs[:2], *weights], rows)[2:]
        gradients = pull(tuple(w.detach().to(dtype) for w in weights_of_rows))
        for total, x in zip(_part(totals, rows), gradients, strict=True):
            total.add_(x)
    return tuple(total.to(x.dtype) for total, x in zip(totals, inputs, strict=True))


def _part(tensors: Sequence[Tensor], rows: slice) -> tuple[Tensor, ...]:
    """What some rows use of (dO, dL, q, k, v, bias, sinks): keys, values and sinks they use whole."""
    do, dl, q, k, v, bias, sinks = tensors
    return do[:, :, rows], dl[:, :, rows], q[:, :, rows], k, v, bias[:, :, rows] if bias.shape[2] > 1 else bias, sinks


def _forward(
    terms: Terms, rows: slice, T: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """(output, L) of some rows, as a function of what has a gradient."""
    if terms.bias is not None and terms.bias.shape[2] > 1:  # `scores` looks for the rows among all T
        bias = torch.nn.functional.pad(bias, (0, 0, rows.start, T - rows.stop))
    output, lse = safe_attention(q, k, v, terms._replace(bias=bias, sinks=sinks), rows=rows, T=T)
    return output, lse.masked_fill(lse == -math.inf, 0.0)


def _backward(forward: Callable[..., Any], do: Tensor, dl: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.func.vjp(forward, *inputs)[1]((do, dl))
