"""The ladder from the definition of attention to the algorithm, in plain PyTorch.

Every rung gives the same answer as the one before, and the tests say so:

1. `naive_attention`: the definition; the T x S scores and probabilities exist in memory.
2. `safe_attention`: the row maximum m is subtracted before the exponential, so that nothing overflows. With
   l = sum exp(s - m), the log-sum-exp L = m + ln l is all that a row needs to be put together again later.
3. `online_attention`: the keys are read in segments. A segment's state is (m, l, u), u = sum exp(s - m) v, and `merge`
   joins two states by moving both to one reference point.
4. `tiled.tiled_attention`: blocks of queries by blocks of keys, folded by the rule of `merge`; no T x S matrix exists.
5. `tiled.tiled_attention_backward`: P = exp(S - L) is computed again, tile by tile, from Q, K, V and L alone.

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

What else belongs to a score (`features.Terms`) enters in one function, `scores`. A sink is one more score, whose value
is 0: here it stands in the state that a row begins with, on the chip it is merged last. Dropout spares the sums and
strikes the products.

Sources: Milakov and Gimelshein 2018 (arXiv 1805.02867, section 3) for the online softmax; Dao et al. 2022
(arXiv 2205.14135, algorithms 1 and 4) and Dao 2023 (arXiv 2307.08691, section 3.1) for the tiles and their backward;
Gemma Team 2024 (arXiv 2408.00118, section 2) for the soft cap, Press et al. 2021 (arXiv 2108.12409, section 3) for
ALiBi, Xiao et al. 2023 (arXiv 2309.17453, section 3.2) for sinks.
Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], H a multiple of G; query head h reads key head h // (H / G).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.ops.dropout import keep_mask
from flash_train.ops.features import UNBOUNDED, Terms, rows_of


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
    m = torch.maximum(a.m, b.m).detach()  # any reference point will do, so none has a gradient
    reference = m.masked_fill(m == -math.inf, 0.0)  # both empty: exp(-inf - 0) = 0, where -inf - -inf is NaN
    scale_a, scale_b = torch.exp(a.m - reference), torch.exp(b.m - reference)
    u = a.u * scale_a.unsqueeze(-1) + b.u * scale_b.unsqueeze(-1)
    return State(m, a.l * scale_a + b.l * scale_b, u)


def finish(state: State) -> tuple[Tensor, Tensor]:
    """(o, L): o = u / l and L = m + ln l; a row that saw no key gives 0 and minus infinity."""
    empty = state.l == 0
    l = state.l.masked_fill(empty, 1.0)
    return state.u / l.unsqueeze(-1), (state.m + torch.log(l)).masked_fill(empty, -math.inf)


def scores(
    q: Tensor, k: Tensor, terms: Terms, *, rows: slice = slice(None), T: int | None = None, reverse_keys: bool = False
) -> Tensor:
    """[B, H, t, S]: the scores of the queries `rows` (all `T` of them by default), minus infinity where unseen.

    `q` holds these rows alone. With `reverse_keys`, `k` comes in reverse order, and so do the columns.
    """
    s = (q @ repeat_heads(k, q).transpose(-2, -1)) * terms.scale
    S = k.shape[-2]
    see = rows_of(q.shape[-2] if T is None else T, S, terms, q.device).cut(rows)
    aligned, low, high = (x.unsqueeze(1) if x.dim() == 2 else x for x in see)  # [t] or [B, 1, t]
    keys = torch.arange(S, device=q.device)
    if reverse_keys:
        keys = keys.flip(0)
    if terms.soft_cap:
        s = terms.soft_cap * torch.tanh(s / terms.soft_cap)
    if terms.alibi_slopes is not None:
        distance = (aligned.unsqueeze(-1) - keys).abs()
        s = s - (terms.alibi_slopes[:, :, None, None] * distance).to(s.dtype)
    if terms.bias is not None:
        s = s + _part(terms.bias, rows, reverse_keys).to(s.dtype)
    if terms.bounds is None and terms.left == UNBOUNDED and terms.right == UNBOUNDED:
        hidden = None
    elif terms.bounds is None and terms.left == UNBOUNDED:
        hidden = keys >= high.unsqueeze(-1)
    else:
        hidden = (keys >= high.unsqueeze(-1)) | (keys < low.unsqueeze(-1))
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    if terms.allowed is not None:
        s = s.masked_fill(~_part(terms.allowed, rows, reverse_keys), -math.inf)
    return s


def _part(x: Tensor, rows: slice, reverse_keys: bool) -> Tensor:
    """The rows of a [B or 1, H or 1, T or 1, S or 1] tensor, its columns turned round if asked."""
    x = x if x.shape[2] == 1 else x[:, :, rows]
    return x.flip(-1) if reverse_keys else x


def drop(
    p: Tensor, terms: Terms, *, rows: slice = slice(None), T: int | None = None, reverse_keys: bool = False
) -> Tensor:
    """Probabilities [B, H, t, S] with some struck out, the others made larger."""
    if terms.seed is None:
        return p
    keep = keep_mask(terms, p.shape[1], p.shape[2] if T is None else T, p.shape[3], rows)
    keep = keep.flip(-1) if reverse_keys else keep
    return p * keep / (1 - terms.dropout)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, reverse_keys: bool = False) -> Tensor:
    """Rung 1, the definition: softmax(scale q k^T) v, [B, H, T, E].

    The spelling is nanoGPT's, which torch.compile does not turn into a fused kernel. `reverse_keys` visits the keys
    from the last to the first: the same mathematics in another order of summation, which shows how far rounding alone
    moves a training run.
    """
    if reverse_keys:
        k, v = k.flip(-2), v.flip(-2)
    s = scores(q, k, terms, reverse_keys=reverse_keys)
    if terms.sinks is None:
        p = torch.softmax(s, dim=-1)  # in fp32 under CUDA autocast
        if _may_see_nothing(terms, q.shape[-2], k.shape[-2]):  # of such rows softmax makes NaN
            p = p.masked_fill((s == -math.inf).all(-1, keepdim=True), 0.0)
    else:
        sink = terms.sinks[:, :, None, None].to(s.dtype).expand(*s.shape[:3], 1)
        nothing = (s == -math.inf).all(-1, keepdim=True) & (sink == -math.inf)
        p = torch.softmax(torch.cat([s, sink.masked_fill(nothing, 0.0)], dim=-1), dim=-1)[..., :-1]
    p = drop(p, terms, reverse_keys=reverse_keys)
    return (p.to(v.dtype) @ repeat_heads(v, q)).to(terms.output_dtype or q.dtype)


def _may_see_nothing(terms: Terms, T: int, S: int) -> bool:
    """Whether a row may be without keys: a causal square has none, and stays nanoGPT's spelling."""
    masked = terms.bounds is not None or terms.allowed is not None or terms.bias is not None
    return masked or (T != S and (terms.left < UNBOUNDED or terms.right < UNBOUNDED))


def safe_softmax(s: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(p, L) of scores [..., S]: the probabilities, and the log-sum-exp over the last dimension (and a sink [...])."""
    if s.shape[-1] == 0:
        m = torch.full_like(s.sum(-1, keepdim=True), -math.inf)
    else:
        m = s.amax(dim=-1, keepdim=True).detach()
    if sinks is not None:
        m = torch.maximum(m, sinks.unsqueeze(-1)).detach()
    reference = m.masked_fill(m == -math.inf, 0.0)
    e = torch.exp(s - reference)  # exp(s) alone overflows fp32 at s = 88.8
    l = e.sum(dim=-1, keepdim=True)
    if sinks is not None:
        l = l + torch.exp(sinks.unsqueeze(-1) - reference)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    return e / l, (reference + torch.log(l)).masked_fill(empty, -math.inf).squeeze(-1)


def safe_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, rows: slice = slice(None), T: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rung 2: (output [B, H, t, E], L [B, H, t]), by way of the whole t x S matrix; `rows` and `T` as in `scores`."""
    s = scores(q, k, terms, rows=rows, T=T)
    p, lse = safe_softmax(s, None if terms.sinks is None else terms.sinks.unsqueeze(-1).to(s.dtype))
    return drop(p, terms, rows=rows, T=T).to(v.dtype) @ repeat_heads(v, q), lse


def online_attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, segment: int = 64) -> tuple[Tensor, Tensor]:
    """Rung 3: as rung 2, but the softmax and the product with v are put together from segments of the keys."""
    s = scores(q, k, terms)
    struck = drop(torch.ones_like(s), terms)
    state = first_state(s, v.shape[-1], None if terms.sinks is None else terms.sinks.unsqueeze(-1))
    parts = (s.split(segment, dim=-1), struck.split(segment, dim=-1), repeat_heads(v, q).split(segment, dim=-2))
    for s_part, struck_part, v_part in zip(*parts, strict=True):
        p, lse = safe_softmax(s_part)
        state = merge(state, State(lse, (lse > -math.inf).to(p.dtype), (p * struck_part) @ v_part))
    return finish(state)


def first_state(rows: Tensor, E: int, sinks: Tensor | None = None) -> State:
    """Of rows [..., any] that have seen no key: nothing, or the sink [...], which adds exp(sink) to l and 0 to u."""
    shape = rows.shape[:-1]
    m = rows.new_full(shape, -math.inf) if sinks is None else sinks.to(rows.dtype).expand(shape).clone()
    return State(m, (m > -math.inf).to(rows.dtype), rows.new_zeros(*shape, E))


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """[B, G, S, D] -> [B, H, S, D], each key head repeated for the query heads that read it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(q.shape[-1])
