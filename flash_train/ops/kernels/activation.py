"""A feed-forward network's activation, and its derivative together with the activation's output, in one pass each.

GELU needs the normal distribution function Phi at each element. Torch's erf takes it from a branch for each range of
x; here Phi(-a) = exp(-a^2 / 2) R(t), where t = 1 / (1 + 0.35 a) and R is a polynomial, for all a >= 0 at once, and the
density that the derivative needs is the same exponential. So an element costs an exponential, a reciprocal and some 15
to 20 plain instructions, which hide behind the memory traffic.

R is the polynomial of degree 7 with the smallest largest relative error, 3.2e-7, on a <= 14.5, where Phi(-a) leaves
fp32 (Lawson's iteration from erfc in 40 digits). So errors are relative in the far negative tail too: of all finite
fp16 and bf16 inputs, rounded results are at most 0.51 units in the last place from the exact GELU and 0.53 from its
derivative, where rounding alone is 0.5; with what a GPU's two instructions may lose, 1.31 from fp16's derivative near
its zero (tests/ops/test_activation_kernel.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.choice import interpreting
from flash_train.ops.kernels.launch import blocks, empty, kinds_of, run
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import LOG2_E

LAUNCH = Launch(block_t=1, block_s=1024, warps=4, stages=1)
"""Elements a program: 8 halves, 16 bytes, a thread. Not tuned on a GPU yet."""

DENSITY = tl.constexpr(0.3989422804014327)
"""The normal density at 0, 1 / sqrt(2 pi)."""
SQRT_8_BY_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)
SMALL = tl.constexpr(2.0**-64)
"""Phi(-a) is (2^64 exp(-a^2 / 2)) (2^-64 R): the instruction for exponentials gives 0 for what is below fp32's normal
numbers, where bf16 still has some."""


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:  # one instruction, where Triton's own division takes eight; of an x above 2^126 it is 0
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _gelu(x, FAST: tl.constexpr):
    t = _reciprocal(1.0 + 0.35 * tl.abs(x), FAST)
    r = 0.04890212416648865 * SMALL
    r = r * t - 0.20196731388568878 * SMALL
    r = r * t + 0.2404058873653412 * SMALL
    r = r * t - 0.016831152141094208 * SMALL
    r = r * t + 0.15587186813354492 * SMALL
    r = r * t + 0.133378803730011 * SMALL
    r = r * t + 0.14026705920696259 * SMALL
    r = r * t - 2.713166395551525e-05 * SMALL
    e = tl.exp2(x * (-0.5 * LOG2_E) * x + 64.0)
    below = r * e  # Phi(-|x|)
    phi = tl.where(x > 0, 1.0 - below, below)
    return x * phi, x * (DENSITY * SMALL) * e + phi


@triton.jit
def _gelu_tanh(x, FAST: tl.constexpr):
    """x sigmoid(2 u), where u = sqrt(2 / pi) (x + 0.044715 x^3): 1 + tanh(u) without its cancellation."""
    square = tl.minimum(x * x, 1024.0)  # there the sigmoid is 0 or 1 already; of an infinite one the slope would be NaN
    s = _reciprocal(1.0 + tl.exp2(x * (-SQRT_8_BY_PI * LOG2_E * CUBIC * square - SQRT_8_BY_PI * LOG2_E)), FAST)
    y = x * s
    return y, y * (1.0 - s) * (3.0 * SQRT_8_BY_PI * CUBIC * square + SQRT_8_BY_PI) + s


@triton.jit
def _silu(x, FAST: tl.constexpr):
    s = _reciprocal(1.0 + tl.exp2(x * -LOG2_E), FAST)
    y = x * s
    return y, y * (1.0 - s) + s


@triton.jit
def _curve(x, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """(the function's value, its derivative) in fp32; of "swiglu" that of its gate."""
    if ACTIVATION == "gelu":
        return _gelu(x, FAST)
    elif ACTIVATION == "gelu_tanh":
        return _gelu_tanh(x, FAST)
    else:
        return _silu(x, FAST)


@triton.jit
def _place(F, per_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """(where the program's elements begin in rows of F, where in x, how many of the row's are left): int64, for there
    may be more than 2^31. Without gates everything is one row."""
    program = tl.program_id(0)
    if ACTIVATION == "swiglu":
        row = (program // per_row).to(tl.int64)
        first = (program % per_row) * BLOCK
        return row * F + first, row * F * 2 + first, F - first
    else:
        first = program.to(tl.int64) * BLOCK
        return first, first, F - first


@triton.jit(do_not_specialize=["per_row"])
def activation_kernel(x, output, F, per_row, ACTIVATION: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK elements of `output` [rows, F] = act(`x`)."""
    start, start_x, left = _place(F, per_row, ACTIVATION, BLOCK)
    columns = tl.arange(0, BLOCK)
    here = columns < left
    value, _ = _curve(tl.load(x + start_x + columns, mask=here, other=0.0).to(tl.float32), ACTIVATION, FAST)
    if ACTIVATION == "swiglu":
        value *= tl.load(x + start_x + F + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(output + start + columns, value.to(output.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["per_row"])
def derivative_kernel(grad, x, dx, output, F, per_row, ACTIVATION: tl.constexpr, OUTPUT: tl.constexpr,
                      FAST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: BLOCK elements of `grad` [rows, F], of act(`x`), into those of `dx`, and act(`x`) itself if OUTPUT.

    `dx` or `output` may lie where `grad` does: an element is read before it is written, by the same thread.
    """
    start, start_x, left = _place(F, per_row, ACTIVATION, BLOCK)
    columns = tl.arange(0, BLOCK)
    here = columns < left
    g = tl.load(grad + start + columns, mask=here, other=0.0).to(tl.float32)
    value, slope = _curve(tl.load(x + start_x + columns, mask=here, other=0.0).to(tl.float32), ACTIVATION, FAST)
    kind = dx.dtype.element_ty
    if ACTIVATION == "swiglu":
        up = tl.load(x + start_x + F + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(dx + start_x + F + columns, (g * value).to(kind), mask=here)
        slope *= up
        value *= up
    tl.store(dx + start_x + columns, (g * slope).to(kind), mask=here)
    if OUTPUT:
        tl.store(output + start + columns, value.to(kind), mask=here)


def activate(x: Tensor, activation: str) -> Tensor:
    """act(x) of contiguous rows x [N, F] (fp16, bf16), for "swiglu" [N, 2F]: [N, F]."""
    output = empty(x, *_shape(x, activation))
    if output.numel():
        F, per_row, programs = _grid(output, activation)
        run(
            activation_kernel, x.device, programs, LAUNCH, ("activation", *_key((x,), F, activation)),
            x, output, F, per_row, activation, _fast(x), LAUNCH.block_s,
        )  # fmt: skip
    return output


def derive(grad: Tensor, x: Tensor, activation: str, *, output: bool) -> tuple[Tensor, Tensor | None]:
    """(dx, act(x) or None) from `grad` [N, F], that of act(x), whose memory one of them takes; all contiguous."""
    gated = activation == "swiglu"
    dx = empty(x, *x.shape) if gated else grad
    value = None if not output else grad if gated else empty(x, *x.shape)
    if grad.numel():
        F, per_row, programs = _grid(grad, activation)
        run(
            derivative_kernel, x.device, programs, LAUNCH,
            ("activation's derivative", *_key((grad, x), F, activation), output),
            grad, x, dx, grad if value is None else value, F, per_row, activation, output, _fast(x), LAUNCH.block_s,
        )  # fmt: skip
    return dx, value


def _shape(x: Tensor, activation: str) -> tuple[int, int]:
    return len(x), x.shape[1] // 2 if activation == "swiglu" else x.shape[1]


def _grid(output: Tensor, activation: str) -> tuple[int, int, int]:
    """(elements in what the kernel takes for a row, programs a row, programs)"""
    rows, F = output.shape if activation == "swiglu" else (1, output.numel())
    per_row = blocks(F, LAUNCH.block_s)
    return F, per_row, rows * per_row


def _key(tensors: tuple[Tensor, ...], F: int, activation: str) -> tuple[object, ...]:
    return tensors[0].device, activation, kinds_of(tensors), F % 16 == 0, F == 1, F >= 2**31


def _fast(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None and not interpreting()
