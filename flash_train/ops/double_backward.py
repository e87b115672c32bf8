"""The derivative of rung 5, the backward: a tile of queries at a time, in plain PyTorch, on every device."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_train.ops.features import Terms
from flash_train.ops.reference import safe_attention
from flash_train.ops.tiled import Part, compute_dtype, cut, default_tile, parts, tiles


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

    `cotangents` are those of (dQ, dK, dV, d bias, d sinks), None for zeros. Of each document, as if it stood alone, a
    tile of queries is taken against all keys at once, by differentiating the definition (rung 2): memory grows with
    T + S, and every feature is right because the definition is.
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
    for part in parts(q, k, terms):
        own_totals, own_inputs, own_weights = (_of_part(x, part) for x in (totals, inputs, [*inputs[:2], *weights]))
        _add_part(own_totals, own_inputs, own_weights, part.terms, tile or default_tile(q))
    return tuple(total.to(x.dtype) for total, x in zip(totals, inputs, strict=True))


def _of_part(tensors: Sequence[Tensor], part: Part) -> list[Tensor]:
    """Of (dO, dL, q, k, v, bias, sinks) what belongs to a document."""
    do, dl, q, k, v, bias, sinks = tensors
    b, rows, columns = part.batch, part.rows, part.columns
    by_rows = [x[b, :, rows] for x in (do, dl, q)]
    return [*by_rows, k[b, :, columns], v[b, :, columns], cut(bias, b, rows, columns), sinks[b]]


def _add_part(
    totals: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], terms: Terms, tile: int
) -> None:
    """Adds one document's gradients to `totals`; of `weights` the two first are not used."""
    T = inputs[2].shape[2]
    for rows in tiles(0, T, tile):
        backward = partial(_backward, partial(_forward, terms, rows, T))
        pull = torch.func.vjp(backward, *(x.detach().to(totals[0].dtype) for x in _rows(inputs, rows)))[1]
        gradients = pull(tuple(w.detach().to(totals[0].dtype) for w in _rows(weights, rows)[2:]))
        for total, x in zip(_rows(totals, rows), gradients, strict=True):
            total.add_(x)


def _rows(tensors: Sequence[Tensor], rows: slice) -> tuple[Tensor, ...]:
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
