"""Errors against float64, and the budget for them: what plain PyTorch loses at the same precision."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.ops.attention import flash_attention_with_lse


class Case(NamedTuple):
    """Shapes of one comparison; sizes are odd and distinct, so that a swapped dimension shows."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int


NAMES = ("output", "lse", "dq", "dk", "dv")


def inputs(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    """q, k, v, dO, dL. q, k and v are [B, T, H, D] projections seen as [B, H, T, D]."""
    B, H, G, T, S, D, E = case
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, D), (B, S, G, D), (B, S, G, E), (B, T, H, E)]
    q, k, v, do = (torch.randn(s, generator=generator).to(device, dtype).transpose(1, 2) for s in shapes)
    return [q, k, v, do, torch.randn(B, H, T, generator=generator).to(device)]


def results(tensors: list[Tensor], *, causal: bool, implementation: str, dtype: torch.dtype) -> list[Tensor]:
    """Output, log-sum-exp and the three gradients, computed in `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
    output, lse = flash_attention_with_lse(q, k, v, causal=causal, implementation=implementation)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    gradients = torch.autograd.grad([output, finite], [q, k, v], [tensors[3].to(dtype), tensors[4].to(lse.dtype)])
    return [output.detach(), finite.detach(), *gradients]


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|, 2-norms over everything; NaN counts as infinite."""
    error = (x.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)
    return math.inf if math.isnan(error.item()) else error.item()


def check(tensors: list[Tensor], *, causal: bool, implementation: str, dtype: torch.dtype, budget: float = 2.0) -> None:
    """Every result's error is at most `budget` times plain PyTorch's at the same precision, plus two fp32 roundings.

    (P comes from exp(S - L) with L rounded to fp32, which a row of a few numbers shows where plain PyTorch has no sum.)
    The exact results come from the tiled path in float64, which the ladder's tests hold against the definition.
    """
    exact = results(tensors, causal=causal, implementation="tiled", dtype=torch.float64)
    plain = results(tensors, causal=causal, implementation="naive", dtype=dtype)
    ours = results(tensors, causal=causal, implementation=implementation, dtype=dtype)
    for name, a, b, c in zip(NAMES, ours, plain, exact, strict=True):
        allowed = budget * relative_error(b, c) + 2 * torch.finfo(torch.float32).eps
        assert relative_error(a, c) <= allowed, f"{name}: error {relative_error(a, c):.2e}, allowed {allowed:.2e}"
