"""One comparison: its shapes and features, and the tensors that belong to it, made from a seed."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Sizes are odd and distinct where they may be, so that a swapped dimension shows."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    alignment: str = "bottom_right"
    documents: str = ""
    """ids: runs of equal ids (T = S); packed: cu_seqlens (B = 1); without if empty."""
    soft_cap: float | None = None
    alibi: bool = False
    bias: str = ""
    """Its dimensions, each whole or 1, as in "1HTS", "TS" or "1"; none if empty."""
    bias_dtype: torch.dtype | None = None
    """q's if None."""
    bias_gradient: bool = True
    bias_infinite: bool = False
    """Whether a tenth of it is minus infinity, which hides a pair."""
    allowed: str = ""
    sinks: bool = False
    dropout: float = 0.0
    output_dtype: torch.dtype | None = None
    lse_gradient: bool = True
    deterministic: bool | None = None
    layout: str = "projection"
    """One of `LAYOUTS`."""

    def __str__(self) -> str:
        told = {
            n: x for n, x in self._asdict().items() if x != self._field_defaults.get(n)
        }  # the sizes have no default
        return ", ".join(f"{n}={x!r}" for n, x in told.items())


class Inputs(NamedTuple):
    """The tensors of a case. With packed documents, q, k and v are [1, heads, total, head size]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dl: Tensor
    bias: Tensor | None
    allowed: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    ids: Tensor | None
    cu_seqlens: tuple[Tensor, Tensor] | None
    case: Case


def inputs(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """What lies around each of q, k, v and their output's gradient in memory is NaN."""
    g = torch.Generator().manual_seed(seed)
    B, H, G, T, S, D, E = case[:7]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    wide, stored = torch.promote_types(dtype, torch.float32), case.output_dtype or dtype
    q, k, v = (
        lay_out(normal(*shape).to(device, dtype), case.layout) for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    )
    do, dl = lay_out(normal(B, H, T, E).to(device, stored), case.layout), normal(B, H, T).to(device, wide)
    if case.layout == "broadcast gradient":
        do, dl = (y.new_ones(()).expand(y.shape) for y in (do, dl))
    bias = None
    if case.bias:
        bias = normal(*_shape(case, case.bias))
        if case.bias_infinite:
            bias = bias.masked_fill(torch.rand(bias.shape, generator=g) < 0.1, -math.inf)
        bias = _lay_out_pairs(bias.to(device, case.bias_dtype or dtype), case)
    allowed = None
    if case.allowed:
        allowed = _lay_out_pairs((torch.rand(_shape(case, case.allowed), generator=g) < 0.8).to(device), case)
    return Inputs(
        q, k, v, do, dl, bias, allowed,
        torch.rand(H, generator=g).to(device, wide) if case.alibi else None,
        normal(H).to(device, wide) if case.sinks else None,
        _ids(B, T, g).to(device) if case.documents == "ids" else None,
        _cu_seqlens(T, S, g, device) if case.documents == "packed" else None,
        case,
    )  # fmt: skip


LAYOUTS = (
    "projection",  # [B, T, H, D] seen as [B, H, T, D]
    "heads first",  # contiguous
    "sliced",  # a part of wider rows, at an odd address
    "misaligned",  # contiguous, at an odd address
    "every second",  # rows two apart
    "head size apart",  # the last dimension is not the dense one
    "expanded",  # stride 0 over batch and heads
    "broadcast gradient",  # the gradients of output and log-sum-exp are one number, of stride 0
)
_GUARD = 64


def lay_out(x: Tensor, layout: str) -> Tensor:
    """`x` [B, H, T, D] stored in another way, in the midst of NaN."""
    if layout == "expanded":
        return _dense(x[:1, :1], (0, 1, 2, 3), 0).expand(x.shape) if x.numel() else x
    if layout in ("sliced", "every second"):
        step, left, right = (1, 1, 2) if layout == "sliced" else (2, 0, 0)
        wide = x.new_full((*x.shape[:2], step * x.shape[2], left + x.shape[3] + right), math.nan)
        view = wide[:, :, ::step, left : left + x.shape[3]]
        return view.copy_(x)
    order = {"projection": (0, 2, 1, 3), "broadcast gradient": (0, 2, 1, 3), "head size apart": (0, 1, 3, 2)}
    return _dense(x, order.get(layout, (0, 1, 2, 3)), 1 if layout == "misaligned" else 0)


def _dense(x: Tensor, order: tuple[int, ...], offset: int) -> Tensor:
    """`x` with its dimensions stored in this order, `offset` elements behind an aligned address."""
    storage = x.new_full((x.numel() + 2 * _GUARD,), math.nan)
    part = storage[_GUARD + offset : _GUARD + offset + x.numel()]
    back = [order.index(dimension) for dimension in range(4)]
    return part.view([x.shape[dimension] for dimension in order]).permute(back).copy_(x)


def _lay_out_pairs(x: Tensor, case: Case) -> Tensor:
    """A bias or boolean mask stored in another way."""
    if case.layout == "expanded":
        return x.expand(case.B, case.H, case.T, case.S)
    if case.layout == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x.mT.contiguous().mT if case.layout == "head size apart" and x.dim() > 1 else x


def _shape(case: Case, spec: str) -> list[int]:
    return [1 if name == "1" else getattr(case, name) for name in spec]


def _ids(B: int, T: int, g: torch.Generator) -> Tensor:
    """[B, T]: documents of about 5 positions at first, then ever longer ones; an id may come back."""
    new = torch.rand(B, T, generator=g) < 1 / torch.arange(3, T + 3)
    return new.cumsum(1) % 5


def _cu_seqlens(T: int, S: int, g: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Of some documents, zero-length ones among them, that leave a tail free where there is room for one."""
    N = int(torch.randint(1, 6, (), generator=g))

    def offsets(total: int) -> Tensor:
        cuts = torch.randint(0, total + 1, (N,), generator=g).sort().values
        twice = torch.rand(N, generator=g) < 0.2  # a document ends where the one before did
        for n in range(1, N):
            if twice[n]:
                cuts[n] = cuts[n - 1]
        return torch.cat([cuts.new_zeros(1), cuts]).to(device, torch.int32)

    return offsets(T), offsets(S)
