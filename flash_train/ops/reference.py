"""The ladder from the definition of attention to the algorithm, in plain PyTorch.

Every rung gives the same answer as the one before, and the tests say so:

1. `naive_attention`: the definition; the T x S scores and probabilities exist in memory.
2. `safe_attention`: the row maximum m is subtracted before the exponential, so that nothing overflows. With
   l = sum exp(s - m), the log-sum-exp L = m + ln l is all that a row needs to be put together again later.
3. `online_attention`: the keys are read in segments. A segment's state is (m, l, u), u = sum exp(s - m) v, and `merge`
   joins two states by moving both to one reference point.
4. `tiled_attention`: blocks of queries by blocks of keys, folded with the rule of `merge`; no T x S matrix exists.
5. `tiled_attention_backward`: P = exp(S - L) is computed again, tile by tile, from Q, K, V and L alone.

Rungs 4 and 5 are the registered operator's kernel for CPU tensors; the Triton kernels are rungs 4 and 5 on the chip.

The merge by hand, one row: scores [1, 2] and then [3], values [10, 20] and then [30].

>>> a = State(m=torch.tensor(2.0), l=torch.tensor(1.36788), u=torch.tensor([23.67879]))  # e^-1 + 1; 10 e^-1 + 20
>>> b = State(m=torch.tensor(3.0), l=torch.tensor(1.0), u=torch.tensor([30.0]))
>>> ab = merge(a, b)  # the reference point moves from 2 to 3: a's sums shrink by e^-1
>>> [round(x.item(), 3) for x in (ab.m, ab.l, ab.u)]
[3.0, 1.503, 38.711]
>>> output, lse = finish(ab)
>>> round(output.item(), 3), round(lse.item(), 3)  # softmax([1, 2, 3]) @ [10, 20, 30]; ln(e + e^2 + e^3)
(25.752, 3.408)

Sources: Milakov and Gimelshein 2018 (arXiv 1805.02867, section 3) for the online softmax; Dao et al. 2022
(arXiv 2205.14135, algorithms 1 and 4) and Dao 2023 (arXiv 2307.08691, section 3.1) for the tiles and their backward.
Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], H a multiple of G; query head h reads key head h // (H / G).
With `causal`, the last query is aligned with the last key: query t sees key s if s <= t + S - T.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """What is known of a row after some of its keys: m [...], l [...], u [..., E]."""

    m: Tensor
    """The largest score so far, or minus infinity if no key was visible."""
    l: Tensor
    """The sum of exp(score - m)."""
    u: Tensor
    """The sum of exp(score - m) * value."""


def merge(a: State, b: State) -> State:
    """The state of two disjoint sets of keys together. A finished partial (o, L) is the state (m=L, l=1, u=o)."""
    m = torch.maximum(a.m, b.m)
    reference = m.masked_fill(m == -math.inf, 0.0)  # both empty: exp(-inf - 0) = 0, where -inf - -inf is NaN
    scale_a, scale_b = torch.exp(a.m - reference), torch.exp(b.m - reference)
    u = a.u * scale_a.unsqueeze(-1) + b.u * scale_b.unsqueeze(-1)
    return State(m, a.l * scale_a + b.l * scale_b, u)


def finish(state: State) -> tuple[Tensor, Tensor]:
    """(o, L): o = u / l and L = m + ln l; a row that saw no key gives 0 and minus infinity."""
    output = state.u / state.l.masked_fill(state.l == 0, 1.0).unsqueeze(-1)
    return output, state.m + torch.log(state.l)


def visible_keys(queries: int, keys: int, *, causal: bool, device: torch.device | None = None) -> Tensor:
    """[T] int64: query t sees keys 0 to n[t] - 1. Everything that the ladder masks follows from this one rule."""
    n = torch.arange(queries, device=device) + (keys - queries + 1)
    return n.clamp(0, keys) if causal else torch.full_like(n, keys)


def scores(q: Tensor, k: Tensor, *, causal: bool, scale: float | None, reverse_keys: bool = False) -> Tensor:
    """[B, H, T, S]: scale q k^T, minus infinity where the query does not see the key.

    With `reverse_keys`, `k` comes in reverse order, and so do the columns.
    """
    s = (q @ _repeat_heads(k, q).transpose(-2, -1)) * (default_scale(q) if scale is None else scale)
    if not causal:
        return s
    n = visible_keys(q.shape[-2], k.shape[-2], causal=causal, device=q.device)
    keys = torch.arange(k.shape[-2], device=q.device)
    return s.masked_fill((keys.flip(0) if reverse_keys else keys) >= n.unsqueeze(-1), -math.inf)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, reverse_keys: bool = False
) -> Tensor:
    """Rung 1, the definition: softmax(scale q k^T) v, [B, H, T, E].

    The spelling is nanoGPT's, which torch.compile does not turn into a fused kernel. `reverse_keys` visits the keys
    from the last to the first: the same mathematics in another order of summation, which shows how far rounding alone
    moves a training run.
    """
    if reverse_keys:
        k, v = k.flip(-2), v.flip(-2)
    s = scores(q, k, causal=causal, scale=scale, reverse_keys=reverse_keys)
    p = torch.softmax(s, dim=-1)  # in fp32 under CUDA autocast
    if causal and q.shape[-2] > k.shape[-2]:  # the first T - S rows see nothing, and softmax makes NaN of them
        p = p.masked_fill((s == -math.inf).all(-1, keepdim=True), 0.0)
    return p.to(v.dtype) @ _repeat_heads(v, q)


def safe_softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """(p, L) of scores [..., S]: the probabilities, and the log-sum-exp over the last dimension."""
    m = s.amax(dim=-1, keepdim=True)
    e = torch.exp(s - m.masked_fill(m == -math.inf, 0.0))  # exp(s) alone overflows fp32 at s = 88.8
    l = e.sum(dim=-1, keepdim=True)
    return e / l.masked_fill(l == 0, 1.0), (m + torch.log(l)).squeeze(-1)


def safe_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Rung 2: (output [B, H, T, E], L [B, H, T]), by way of the whole T x S matrix."""
    p, lse = safe_softmax(scores(q, k, causal=causal, scale=scale))
    return p @ _repeat_heads(v, q), lse


def online_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, segment: int = 64
) -> tuple[Tensor, Tensor]:
    """Rung 3: as rung 2, but the softmax and the product with v are put together from segments of the keys."""
    s = scores(q, k, causal=causal, scale=scale)
    v = _repeat_heads(v, q)
    state = _empty_state(s, v.shape[-1])
    for s_part, v_part in zip(s.split(segment, dim=-1), v.split(segment, dim=-2), strict=True):
        p, lse = safe_softmax(s_part)
        state = merge(state, State(lse, (lse > -math.inf).to(p.dtype), p @ v_part))
    return finish(state)


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(q.shape[-1])


def default_tile(q: Tensor) -> int:
    """The power of two, 64 to 256, at which the tiles of all heads together hold about 2^19 scores: a core's cache."""
    rows = math.isqrt(2**19 // max(1, q.shape[0] * q.shape[1]))
    return min(256, max(64, 2 ** max(0, rows.bit_length() - 1)))


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """[B, G, S, D] -> [B, H, S, D], each key head repeated for the query heads that read it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rung 4: (output, L) from tiles of `tile` queries by `tile` keys (default: `default_tile`).

    Memory grows with T + S, not with T S.

    fp16 and bf16 inputs are computed in fp32, tile by tile. The output is stored as [B, T, H, E] and returned as its
    [B, H, T, E] view, so that [B, T, H * E] is free.
    """
    B, H, T, _ = q.shape
    S, E = v.shape[-2:]
    scale = default_scale(q) if scale is None else scale
    dtype = _compute_dtype(q)
    tile = tile or default_tile(q)
    output = q.new_empty(B, T, H, E).transpose(1, 2)
    lse = torch.empty(B, H, T, dtype=dtype, device=q.device)
    n = visible_keys(T, S, causal=causal, device=torch.device("cpu"))  # the loop reads it
    for rows in _tiles(T, tile):
        q_tile = _queries(q, k, rows, dtype) * scale
        state = _empty_state(q_tile, E)
        for columns in _tiles(int(n[rows][-1]), tile):
            s = q_tile @ _keys(k, columns, dtype).transpose(-2, -1)
            _mask_tile(s, n[rows], columns)
            _fold(state, s, _keys(v, columns, dtype))
        o, L = finish(state)
        output[:, :, rows] = o.view(B, H, -1, E)
        lse[:, :, rows] = L.view(B, H, -1)
    return output, lse


def tiled_attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rung 5: (dQ, dK, dV) in the inputs' shapes and dtypes, P recomputed tile by tile from L.

    dL enters where the softmax's own correction does: delta = rowsum(dO * O) - dL.
    """
    T, S = q.shape[-2], k.shape[-2]
    scale = default_scale(q) if scale is None else scale
    dtype = _compute_dtype(q)
    tile = tile or default_tile(q)
    delta = row_delta(grad_output, output, grad_lse, dtype)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row that sees nothing: exp(S - inf) = 0
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    n = visible_keys(T, S, causal=causal, device=torch.device("cpu"))  # the loop reads it
    for rows in _tiles(T, tile):
        q_tile = _queries(q, k, rows, dtype) * scale
        do_tile = _queries(grad_output, k, rows, dtype)
        delta_tile, lse_tile = (_queries(x.unsqueeze(-1), k, rows, dtype) for x in (delta, lse))
        dq_tile = torch.zeros_like(q_tile)
        for columns in _tiles(int(n[rows][-1]), tile):
            k_tile, v_tile = _keys(k, columns, dtype), _keys(v, columns, dtype)
            p = q_tile @ k_tile.transpose(-2, -1)
            _mask_tile(p, n[rows], columns)
            p.sub_(lse_tile).exp_()
            dv.flatten(0, 1)[:, columns].add_(p.transpose(-2, -1) @ do_tile)
            ds = (do_tile @ v_tile.transpose(-2, -1)).sub_(delta_tile).mul_(p)
            dq_tile.add_(ds @ k_tile)
            dk.flatten(0, 1)[:, columns].add_(ds.transpose(-2, -1) @ q_tile)  # q_tile carries the scale
        dq[:, :, rows] = dq_tile.mul_(scale).view(*q.shape[:2], -1, q.shape[-1])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def row_delta(grad_output: Tensor, output: Tensor, grad_lse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[B, H, T]: rowsum(dO * O) - dL."""
    delta = (grad_output.to(dtype) * output.to(dtype)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse.to(dtype)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _tiles(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _queries(x: Tensor, k: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Rows of [B, H, T, D] as [B * G, (H / G) * rows, D]: the heads of a group read the same keys, so they are rows."""
    return x[:, :, rows].to(dtype).reshape(k.shape[0] * k.shape[1], -1, x.shape[-1])


def _keys(x: Tensor, columns: slice, dtype: torch.dtype) -> Tensor:
    """Columns of [B, G, S, D] as [B * G, columns, D]."""
    return x[:, :, columns].to(dtype).reshape(-1, columns.stop - columns.start, x.shape[-1])


def _mask_tile(s: Tensor, n: Tensor, columns: slice) -> None:
    """Minus infinity into the scores [B * G, (H / G) * rows, columns] where key >= n[row]; full tiles stay."""
    if int(n[0]) >= columns.stop:
        return
    hidden = torch.arange(columns.start, columns.stop, device=n.device) >= n.unsqueeze(-1)
    s.unflatten(1, (-1, n.shape[0])).masked_fill_(hidden.to(s.device), -math.inf)


def _empty_state(rows: Tensor, E: int) -> State:
    """Of rows [..., any] that have seen no key."""
    shape = rows.shape[:-1]
    return State(rows.new_full(shape, -math.inf), rows.new_zeros(shape), rows.new_zeros(*shape, E))


def _fold(state: State, s: Tensor, v: Tensor) -> None:
    """`merge` of the state with the tile's own, in place: `s` is used up."""
    m = torch.maximum(state.m, s.amax(dim=-1))
    reference = m.masked_fill(m == -math.inf, 0.0)
    p = s.sub_(reference.unsqueeze(-1)).exp_()
    shrink = torch.exp(state.m - reference)
    state.l.mul_(shrink).add_(p.sum(dim=-1))
    state.u.mul_(shrink.unsqueeze(-1)).baddbmm_(p, v)
    state.m.copy_(m)
