"""Small tensors for tests of behaviour; sizes are odd and distinct, so that a swapped dimension shows."""

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the Triton kernels are tested."""
KERNELS = pytest.param(
    "triton",
    DEVICE,
    id="triton",
    marks=pytest.mark.skipif(
        DEVICE == "cpu" and version("triton").startswith("3.6."),
        reason="Triton 3.6's interpreter reads loop bounds in a way that NumPy 2.4 refuses and 2.3 warns of",
    ),
)
"""(implementation, device) of a test's parameters."""


def qkv(B=2, H=6, G=2, T=7, S=11, D=5, E=None, *, dtype=torch.float64, device="cpu", seed=0) -> list[Tensor]:
    """q, k and v, which require gradients: [B, T, H, D] projections seen as [B, H, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, D), (B, S, G, D), (B, S, G, D if E is None else E)]
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(device, dtype).transpose(1, 2).requires_grad_() for x in made]


class Packed(NamedTuple):
    """What `flash_attention_packed` takes."""

    leaves: list[Tensor]
    """q, k and v"""
    cu_seqlens: list[Tensor]
    """of the queries and of the keys"""


def packed(lengths_q: Sequence[int], lengths_k: Sequence[int], H=6, G=2, D=5, *, tail=0, **options) -> Packed:
    """Documents of these lengths; `tail` rows lie behind the last one."""
    T, S = sum(lengths_q) + tail, sum(lengths_k) + tail
    leaves = [x.detach()[0].transpose(0, 1).requires_grad_() for x in qkv(1, H, G, T, S, D, **options)]
    lengths = (torch.tensor(x, dtype=torch.int32, device=leaves[0].device) for x in (lengths_q, lengths_k))
    return Packed(leaves, [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in lengths])


def finite(x: Tensor) -> Tensor:
    """The log-sum-exp with 0 for rows that see nothing, which can enter a loss."""
    return x.masked_fill(x == -math.inf, 0.0)


def outputs_and_gradients(function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor]) -> list[Tensor]:
    """(output, log-sum-exp) of the function of the leaves, and the leaves' gradients of a loss that uses both."""
    output, lse = function(*leaves)
    loss = output.sin().sum() + finite(lse).sin().sum()
    return [output.detach(), finite(lse).detach(), *torch.autograd.grad(loss, leaves)]
