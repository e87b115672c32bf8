"""Rows of logits into losses and, in place, the gradients of the logits: one pass for the sums, one for these."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import empty, run
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import LN_2, LOG2_E, LOWEST

LAUNCH = Launch(block_t=1, block_s=8192, warps=8, stages=1)
"""One row a program, so many logits of it at a time."""


@triton.jit
def _capped(raw, cap, SOFT_CAP: tl.constexpr):
    """Logits: `cap` tanh(raw / `cap`)."""
    if SOFT_CAP:
        return cap - 2.0 * cap / (tl.exp2(raw * (2.0 * LOG2_E / cap)) + 1.0)
    else:
        return raw


@triton.jit(do_not_specialize=["classes", "ignored"], do_not_specialize_on_alignment=["targets", "losses"])
def cross_entropy_kernel(logits, targets, losses, V, classes, ignored, soft_cap, z_loss, SOFT_CAP: tl.constexpr,
                         GRADIENT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: one row of `logits` [rows, V], its loss, and if GRADIENT that loss' derivative in its place.

    A row whose target is `ignored` has loss 0 and derivative 0; one whose target is no class, a loss that is NaN.
    """
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * V
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)  # of every BLOCK-th logit, so that rows are reduced once
    l = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, classes, BLOCK):
        here = first + columns
        raw = tl.load(line + here, mask=here < V, other=0.0).to(tl.float32)  # many at a time, if V is a multiple of 16
        x = tl.where(here < classes, _capped(raw, soft_cap, SOFT_CAP) * LOG2_E, float("-inf"))
        m_new = tl.maximum(m, x)
        l = l * tl.exp2(m - m_new) + tl.exp2(x - m_new)
        m = m_new
    top = tl.max(m, 0)
    lse = top + tl.log2(tl.sum(l * tl.exp2(m - top), 0))  # in units of log2
    is_class = (target >= 0) & (target < classes)
    own = tl.load(line + target, mask=is_class, other=float("nan")).to(tl.float32)
    own = _capped(own, soft_cap, SOFT_CAP)
    counts = target != ignored
    total = lse * LN_2
    tl.store(losses + row, tl.where(counts, total - own + z_loss * total * total, 0.0))
    if GRADIENT:
        factor = tl.where(counts, 1.0 + 2.0 * z_loss * total, 0.0)
        tl.debug_barrier()  # the target's logit has been read
        for first in tl.range(0, V, BLOCK):
            here = first + columns
            raw = tl.load(line + here, mask=here < V, other=0.0).to(tl.float32)
            x = _capped(raw, soft_cap, SOFT_CAP)
            grad = tl.exp2(x * LOG2_E - lse) * factor - tl.where((here == target) & counts, 1.0, 0.0)
            if SOFT_CAP:  # the derivative of its tanh
                grad *= 1.0 - (x / soft_cap) * (x / soft_cap)
            grad = tl.where((here < classes) & counts, grad, 0.0)
            tl.store(line + here, grad.to(logits.dtype.element_ty), mask=here < V)


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, ignored: int, classes: int, soft_cap: float, z_loss: float, *, gradient: bool
) -> Tensor:
    """Losses [rows] fp32 of contiguous logits [rows, V] (fp16, bf16, fp32); their gradients take the logits' place."""
    rows, V = logits.shape
    losses = empty(logits, rows, dtype=torch.float32)
    key = "cross-entropy", logits.device, logits.dtype, V % 16 == 0, V == 1, soft_cap > 0, gradient
    run(
        cross_entropy_kernel, logits.device, rows, LAUNCH, key,
        logits, targets, losses, V, classes, ignored, soft_cap or 1.0, z_loss, soft_cap > 0, gradient, LAUNCH.block_s,
    )  # fmt: skip
    return losses
