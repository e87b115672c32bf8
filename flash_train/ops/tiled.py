"""Rungs 4 and 5 of the ladder in plain PyTorch: the operators' kernels for CPU tensors.

fp16 and bf16 inputs are computed in fp32, tile by tile. Documents are taken one by one, as if each stood alone: no
tile spans two.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.ops.dropout import keep_mask
from flash_train.ops.features import SEED_STEP, Rows, Terms, rows_of
from flash_train.ops.reference import State, finish, first_state


def default_tile(q: Tensor) -> int:
    """The power of two, 64 to 256, at which the tiles of all heads together hold about 2^19 scores: a core's cache."""
    rows = math.isqrt(2**19 // max(1, q.shape[0] * q.shape[1]))
    return min(256, max(64, 2 ** max(0, rows.bit_length() - 1)))


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Rung 4: (output, L) from tiles of `tile` queries by `tile` keys (default: `default_tile`).

    Memory grows with T + S, not with T S. The output is stored as [B, T, H, E] and returned as its [B, H, T, E] view,
    so that [B, T, H * E] is free.
    """
    B, H, T, _ = q.shape
    dtype = compute_dtype(q)
    output = torch.empty(B, T, H, v.shape[-1], dtype=terms.output_dtype or q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(B, H, T, dtype=dtype, device=q.device)
    for part in parts(q, k, terms):
        b, rows, columns = part.batch, part.rows, part.columns
        _forward(q[b, :, rows], k[b, :, columns], v[b, :, columns], part.terms, tile or default_tile(q),
                 output[b, :, rows], lse[b, :, rows])  # fmt: skip
    return output, lse


def _forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, tile: int, output: Tensor, lse: Tensor) -> None:
    walk = _Walk(q, k, terms, tile)
    for rows in walk.query_tiles():
        q_tile = walk.queries(q, rows) * terms.scale
        state = first_state(q_tile, v.shape[-1], walk.sinks(rows))
        for columns in walk.key_tiles(rows):
            s, _ = walk.scores(q_tile, walk.keys(k, columns), rows, columns)
            _fold(state, s, walk.keys(v, columns), walk.kept(rows, columns))
        o, L = finish(state)
        output[:, :, rows] = walk.heads(o if terms.seed is None else o / (1 - terms.dropout))
        lse[:, :, rows] = walk.heads(L)


def tiled_attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    tile: int | None = None,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rung 5: (dQ, dK, dV, d bias, d sinks) in the inputs' shapes and dtypes, P recomputed tile by tile from L.

    dL enters where the softmax's own correction does: delta = rowsum(dO * O) - dL. The two last are None where there
    is no such input; the bias's is computed on demand.
    """
    dtype = compute_dtype(q)
    delta = row_delta(grad_output, output, grad_lse, dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dbias = None
    if needs_bias and terms.bias is not None:
        dbias = torch.zeros(terms.bias.shape, dtype=dtype, device=q.device)
    for part in parts(q, k, terms):
        b, rows, columns = part.batch, part.rows, part.columns
        _backward(
            grad_output[b, :, rows], delta[b, :, rows], lse[b, :, rows], q[b, :, rows], k[b, :, columns],
            v[b, :, columns], part.terms, tile or default_tile(q), dq[b, :, rows], dk[b, :, columns],
            dv[b, :, columns], None if dbias is None else cut(dbias, b, rows, columns),
        )  # fmt: skip
    if dbias is not None and terms.bias is not None:
        dbias = dbias.to(terms.bias.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, sinks_gradient(terms.sinks, lse, delta)


def _backward(do: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, terms: Terms, tile: int,
              dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None) -> None:  # fmt: skip
    """Adds one document's gradients to dq, dk, dv and dbias."""
    walk = _Walk(q, k, terms, tile)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row that sees nothing: exp(S - inf) = 0
    for rows in walk.query_tiles():
        q_tile = walk.queries(q, rows) * terms.scale
        do_tile = walk.queries(do, rows)
        delta_tile, lse_tile = (walk.queries(x.unsqueeze(-1), rows) for x in (delta, lse))
        dq_tile = torch.zeros_like(q_tile)
        for columns in walk.key_tiles(rows):
            k_tile, v_tile = walk.keys(k, columns), walk.keys(v, columns)
            p, slope = walk.scores(q_tile, k_tile, rows, columns)
            p.sub_(lse_tile).exp_()
            dp = do_tile @ v_tile.transpose(-2, -1)
            keep = walk.kept(rows, columns)
            if keep is None:
                dv[:, :, columns].add_(walk.groups(p.transpose(-2, -1) @ do_tile))
            else:
                keep = keep.to(p.dtype).div_(1 - terms.dropout)
                dv[:, :, columns].add_(walk.groups((p * keep).transpose(-2, -1) @ do_tile))
                dp.mul_(keep)
            ds = dp.sub_(delta_tile).mul_(p)
            if dbias is not None:
                target = cut(dbias, slice(None), rows, columns)
                target.add_(walk.heads(ds).sum_to_size(target.shape))
            if slope is not None:
                ds.mul_(slope)
            dq_tile.add_(ds @ k_tile)
            dk[:, :, columns].add_(walk.groups(ds.transpose(-2, -1) @ q_tile))  # q_tile carries the scale
        dq[:, :, rows] = walk.heads(dq_tile.mul_(terms.scale))


def row_delta(grad_output: Tensor, output: Tensor, grad_lse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[B, H, T]: rowsum(dO * O) - dL."""
    delta = (grad_output.to(dtype) * output.to(dtype)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse.to(dtype)


def sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """[B, H]: the sink's probability exp(sink - L) times (0 - delta), as of a key whose value is 0, over the rows."""
    if sinks is None:
        return None
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # nothing seen, and a sink of minus infinity
    return -(torch.exp(sinks.unsqueeze(-1) - lse) * delta).sum(-1).to(sinks.dtype)


class Part(NamedTuple):
    """A document that stands alone: where it lies, and its terms."""

    batch: slice
    rows: slice
    columns: slice
    terms: Terms


def parts(q: Tensor, k: Tensor, terms: Terms) -> Iterator[Part]:
    """The batch as it is, or its documents one by one; their bounds are read on the host."""
    nobody = 0 in (*q.shape, *k.shape)  # sees anything: there is no need to read the bounds
    alone = terms._replace(bounds=None, query_document=None, key_document=None)
    if terms.bounds is None or terms.query_document is None or nobody:
        yield Part(slice(None), slice(0, q.shape[2]), slice(0, k.shape[2]), alone)
        return
    bounds = terms.bounds.tolist()
    for b, numbers in enumerate(terms.query_document.tolist()):
        for number in sorted(set(numbers)):
            first_query, end_query, first_key, end_key = bounds[number]
            batch, rows = slice(b, b + 1), slice(first_query, end_query)
            columns = slice(first_key, max(end_key, first_key))
            bias, allowed = (x if x is None else cut(x, batch, rows, columns) for x in (terms.bias, terms.allowed))
            slopes, sinks, seed = (x if x is None else x[batch] for x in (terms.alibi_slopes, terms.sinks, terms.seed))
            if seed is not None:
                seed = seed + torch.tensor(number) * SEED_STEP  # which wraps at 64 bits
            own = alone._replace(bias=bias, allowed=allowed, alibi_slopes=slopes, sinks=sinks, seed=seed)
            yield Part(batch, rows, columns, own)


def cut(x: Tensor, batch: slice, rows: slice, columns: slice) -> Tensor:
    """Part of a [B or 1, H or 1, T or 1, S or 1] tensor: a dimension of 1 stays."""
    for dimension, part in ((0, batch), (2, rows), (3, columns)):
        if x.shape[dimension] != 1:
            x = x[(slice(None),) * dimension + (part,)]
    return x


class _Walk:
    """A walk over the tiles of one document: how its tensors are cut, and what becomes of a tile's scores."""

    def __init__(self, q: Tensor, k: Tensor, terms: Terms, tile: int) -> None:
        self.B, self.H, self.T, _ = q.shape
        self.G, self.S = k.shape[1:3]
        self.terms, self.tile, self.dtype, self.device = terms, tile, compute_dtype(q), q.device
        self.see = rows_of(self.T, self.S, terms, torch.device("cpu"))  # the loop reads it

    def query_tiles(self) -> list[slice]:
        return tiles(0, self.T, self.tile)

    def key_tiles(self, rows: slice) -> list[slice]:
        """Those that hold a key which one of the rows sees: both bounds rise from row to row."""
        low, high = int(self.see.low[rows.start]), int(self.see.high[rows.stop - 1])
        return tiles(low // self.tile * self.tile, high, self.tile)

    def queries(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of [B, H, T, D] as [B * G, (H / G) * rows, D]: a group's heads share their keys, so they are rows."""
        return self.rows(x[:, :, rows].to(self.dtype))

    def rows(self, x: Tensor) -> Tensor:
        """[B, H, rows, ...] as [B * G, (H / G) * rows, ...]."""
        return x.reshape(self.B * self.G, self.H // self.G * x.shape[2], x.shape[-1])

    def keys(self, x: Tensor, columns: slice) -> Tensor:
        """Columns of [B, G, S, D] as [B * G, columns, D]."""
        return x[:, :, columns].to(self.dtype).reshape(self.B * self.G, columns.stop - columns.start, x.shape[-1])

    def heads(self, x: Tensor) -> Tensor:
        """[B * G, (H / G) * rows, ...] as [B, H, rows, ...]."""
        rows = x.shape[1] * self.G // self.H
        return x.view(self.B, self.H, rows, *x.shape[2:])

    def groups(self, x: Tensor) -> Tensor:
        """[B * G, columns, D] as [B, G, columns, D]."""
        return x.view(self.B, self.G, *x.shape[1:])

    def sinks(self, rows: slice) -> Tensor | None:
        """[B * G, (H / G) * rows]"""
        x = self.terms.sinks
        if x is None:
            return None
        return self.rows(x[:, :, None, None].expand(-1, -1, rows.stop - rows.start, 1)).squeeze(-1)

    def scores(self, q_tile: Tensor, k_tile: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """([B * G, (H / G) * rows, columns] scores, the soft cap's derivative); `q_tile` carries the scale."""
        terms, slope = self.terms, None
        s = q_tile @ k_tile.transpose(-2, -1)
        if terms.soft_cap:
            s.div_(terms.soft_cap).tanh_()
            slope = 1 - s * s
            s.mul_(terms.soft_cap)
        view = self.heads(s)  # [B, H, rows, columns]
        see = self.see.cut(rows)
        if terms.alibi_slopes is not None:
            distance = (see.aligned.unsqueeze(-1) - torch.arange(columns.start, columns.stop)).abs()
            view.sub_(terms.alibi_slopes[:, :, None, None] * distance.to(self.device))
        if terms.bias is not None:
            view.add_(cut(terms.bias, slice(None), rows, columns))
        self._mask(view, see, columns)
        if terms.allowed is not None:
            view.masked_fill_(~cut(terms.allowed, slice(None), rows, columns), -math.inf)
        return s, slope

    def _mask(self, view: Tensor, see: Rows, columns: slice) -> None:
        """Minus infinity into the scores [B, H, rows, columns] of unseen keys; tiles that all rows see stay."""
        cut_right, cut_left = int(see.high[0]) < columns.stop, int(see.low[-1]) > columns.start
        keys = torch.arange(columns.start, columns.stop)
        if cut_right:
            view.masked_fill_((keys >= see.high.unsqueeze(-1)).to(self.device), -math.inf)
        if cut_left:
            view.masked_fill_((keys < see.low.unsqueeze(-1)).to(self.device), -math.inf)

    def kept(self, rows: slice, columns: slice) -> Tensor | None:
        """Boolean, in the scores' shape: what dropout leaves, or None without it."""
        if self.terms.seed is None:
            return None
        return self.rows(keep_mask(self.terms, self.H, self.T, self.S, rows, columns))


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def tiles(start: int, stop: int, tile: int) -> list[slice]:
    return [slice(first, min(first + tile, stop)) for first in range(start, stop, tile)]


def _fold(state: State, s: Tensor, v: Tensor, keep: Tensor | None) -> None:
    """`merge` of the state with the tile's own, in place: `s` is used up."""
    m = torch.maximum(state.m, s.amax(dim=-1))
    reference = m.masked_fill(m == -math.inf, 0.0)
    p = s.sub_(reference.unsqueeze(-1)).exp_()
    shrink = torch.exp(state.m - reference)
    state.l.mul_(shrink).add_(p.sum(dim=-1))
    if keep is not None:
        p.mul_(keep)
    state.u.mul_(shrink.unsqueeze(-1)).baddbmm_(p, v)
    state.m.copy_(m)
