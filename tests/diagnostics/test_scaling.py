"""Peaks grow with the sequence as the mathematics says, wherever the memory is taken."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_train.diagnostics.cpu_peak import PeakProbe
from flash_train.ops.attention import flash_attention

LENGTHS = (512, 1024, 1536)
B, H, D = 1, 3, 16


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, causal=True, implementation="naive")


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, causal=True, implementation="flash")


@torch.library.custom_op("flash_train_tests::hidden_attention", mutates_args=())
def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@torch.library.custom_op("flash_train_tests::hidden_attention_backward", mutates_args=())
def hidden_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.softmax(q @ k.transpose(-1, -2), -1)
    dp = grad @ v.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


hidden.register_autograd(
    lambda ctx, grad: hidden_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def peak(attention: Callable[[Tensor, Tensor, Tensor], Tensor], length: int) -> int:
    q, k, v = (torch.ones(B, H, length, D, requires_grad=True) for _ in range(3))
    probe = PeakProbe()
    probe.start()
    probe.begin("forward", [q, k, v])
    attention(q, k, v).square().sum().backward()
    return probe.stop().overall


def growth(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[float, float]:
    """Coefficients of length and length squared, in bytes per head, of a parabola through the three peaks."""
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    peaks = torch.tensor([float(peak(attention, length)) for length in LENGTHS], dtype=torch.float64)
    powers = torch.stack([lengths**0, lengths, lengths**2], dim=1)
    _, linear, quadratic = torch.linalg.solve(powers, peaks).tolist()
    return linear / (B * H), quadratic / (B * H)


@pytest.mark.parametrize("attention", [naive, hidden], ids=["naive", "hidden in a custom op"])
def test_naive_attention_is_quadratic_even_where_an_op_hides_it(attention: Callable[..., Tensor]) -> None:
    _, quadratic = growth(attention)
    assert quadratic >= 8  # at least two fp32 matrices of scores at once


def test_flash_attention_is_linear() -> None:
    linear, quadratic = growth(flash)
    assert abs(quadratic) * LENGTHS[-1] < 0.02 * linear
