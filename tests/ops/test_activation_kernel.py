"""The Triton kernels of the activations, interpreted or on a GPU, against float64 at every number of a half."""

import math

import pytest
import torch
from torch import Tensor

from flash_train.ops.activation_linear import ACTIVATIONS
from flash_train.ops.choice import interpreting
from flash_train.ops.kernels.activation import LAUNCH, activate, derive

runs = interpreting() or torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not runs, reason="needs a GPU or TRITON_INTERPRET=1")
device = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
FLUSHED = 2.0**-118
"""What sigmoids lose at the lower end of fp32: |x| times what a reciprocal gives as 0."""


def every(dtype: torch.dtype) -> Tensor:
    """Every finite number of the dtype, [1, N]."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[x.isfinite()][None].to(device)


def exact(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The value and the derivative at x, of "swiglu" those of silu, in float64, without cancellation in the tail."""
    x = x.double()
    if activation == "gelu":
        phi = 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
        return x * phi, phi + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    cubic = 0.044715 if activation == "gelu_tanh" else 0.0
    by = math.sqrt(8 / math.pi) if activation == "gelu_tanh" else 1.0
    s, other = (torch.sigmoid(sign * by * (x + cubic * x**3)) for sign in (1, -1))
    inner = s * other
    return x * s, s + torch.where(inner > 0, x * inner * by * (1 + 3 * cubic * x * x), 0)


def ulps(found: Tensor, exact: Tensor) -> float:
    """The largest error in units of the last place that the exact number has in `found`'s dtype."""
    kind = torch.finfo(found.dtype)
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=kind.smallest_normal)))
    return ((found.double() - exact).abs() / (2**exponent * kind.eps)).max().item()


def by_kernel(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The value and the derivative at x [1, N]."""
    wide = torch.cat((x, torch.ones_like(x)), dim=1) if activation == "swiglu" else x
    value = activate(wide, activation)
    dx, again = derive(torch.ones_like(x), wide, activation, output=True)
    others = (again, dx[:, x.shape[1] :]) if activation == "swiglu" else (again,)  # the gradient of up among them
    for other in others:
        torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)
    return value, dx[:, : x.shape[1]]


@OVERFLOWS
@HALVES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_half_is_rounded_nearly_rightly_in_the_far_tails_too(activation: str, dtype: torch.dtype) -> None:
    x = every(dtype)
    truncates = device == "cpu" and dtype == torch.bfloat16  # the interpreter does, in place of rounding
    for found, true, more in zip(by_kernel(x, activation), exact(x, activation), BOUNDS[activation], strict=True):
        assert found.dtype == dtype and found.isfinite().all()
        if activation != "gelu" or truncates:  # and flushes
            found, true = (torch.where(true.abs() < FLUSHED, 0, y) for y in (found, true))
        assert ulps(found, true) <= (1.0 if truncates else 0.5) + more


BOUNDS = {"gelu": (0.01, 0.03), "gelu_tanh": (0.01, 0.04), "swiglu": (0.01, 0.01)}
if device == "cuda":  # as the instructions are specified: exp2 with 2^-22, the reciprocal with 2^-23 of relative error
    BOUNDS = {"gelu": (0.01, 0.81), "gelu_tanh": (0.01, 0.08), "swiglu": (0.01, 0.04)}
"""What is lost beside the rounding of the result, by the value and by the derivative, in units of the last place: the
derivative's where it is 0 and fp16 has more digits than the terms whose difference it is."""


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
@OVERFLOWS
@HALVES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinities_and_nan_give_what_torchs_formula_gives(activation: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 0.0]], dtype=dtype, device=device)
    value, slope = by_kernel(x, activation)
    assert value[0, 0] == math.inf and value[0, 1:3].isnan().all() and value[0, 3] == 0
    assert slope[0, :3].isnan().all() and slope[0, 3] == 0.5


@HALVES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "F"), [(1, 1), (3, 37), (5, LAUNCH.block_s), (2, 2 * LAUNCH.block_s + 48)])
def test_rows_of_any_length_are_read_and_written_alone(
    activation: str, dtype: torch.dtype, rows: int, F: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_fence(like: Tensor, *shape: int) -> Tensor:
        numel = math.prod(shape)
        fenced.append((torch.full((numel + 64,), 7.0, dtype=like.dtype, device=device), numel))
        return fenced[-1][0][:numel].view(shape)

    fenced: list[tuple[Tensor, int]] = []
    monkeypatch.setattr("flash_train.ops.kernels.activation.empty", with_a_fence)
    generator = torch.Generator().manual_seed(2)
    times = 2 if activation == "swiglu" else 1
    wide = torch.randn(rows, times * F, generator=generator).to(device, dtype)
    grad = torch.randn(rows, F, generator=generator).to(device, dtype)
    gate, up = (wide[:, :F], wide[:, F:].double()) if times == 2 else (wide, torch.ones((), device=device))
    value, slope = exact(gate, activation)
    expected = torch.cat((grad * up * slope, grad * value), 1) if times == 2 else grad * slope
    found = activate(wide, activation)
    error = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), value * up, rtol=error, atol=1e-6)
    for output in (True, False):
        own = with_a_fence(grad, rows, F).copy_(grad)
        dx, again = derive(own, wide, activation, output=output)
        torch.testing.assert_close(dx.double(), expected, rtol=error, atol=1e-6)
        assert torch.equal(again, found) if again is not None else not output
        assert own.data_ptr() in {y.data_ptr() for y in (dx, again) if y is not None} or (times == 2 and not output)
    assert all((memory[numel:] == 7).all() for memory, numel in fenced) and len(fenced) > 3


@pytest.mark.gpu
@pytest.mark.skipif(device == "cpu", reason="needs a GPU")
def test_on_a_gpu_there_may_be_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    few = every(torch.bfloat16)[:, : 2**15]
    rows = 2**16 + 1
    for activation in ("gelu", "swiglu"):
        x = few.expand(rows, -1).contiguous()
        expected, slope = by_kernel(x[:1], activation) if activation == "gelu" else (activate(x[:1], activation), None)
        found = activate(x, activation)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[-1], expected[0])
        del found
        dx, again = derive(torch.ones(rows, expected.shape[1], dtype=x.dtype, device=device), x, activation,
                           output=True)  # fmt: skip
        assert again is not None and torch.equal(again[-1], expected[0]) and torch.equal(dx[-1], dx[0])
        assert slope is None or torch.equal(dx[-1], slope[0])
        del x, dx, again
