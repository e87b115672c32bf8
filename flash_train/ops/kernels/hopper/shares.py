"""The small kernel behind the Hopper backward of grouped heads: the sum of what a key head's programs have."""

import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import blocks, empty, run
from flash_train.ops.kernels.tables import Launch

SUM = Launch(block_t=4096, block_s=0, warps=8, stages=1)
"""Elements of a program; each share of each is read once."""


@triton.jit(do_not_specialize=["shares"])
def sum_kernel(x, y, shares, size, BLOCK: tl.constexpr):
    """y [heads, size] = the sum of x [heads, shares, size] over shares, in fp32: one program, BLOCK elements."""
    here = tl.cdiv(size, BLOCK)
    head = tl.program_id(0) // here
    places = (tl.program_id(0) - head * here) * BLOCK + tl.arange(0, BLOCK)
    start = x + head.to(tl.int64) * shares * size
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, shares):
        total += tl.load(start + places, mask=places < size, other=0.0).to(tl.float32)
        start += size
    tl.store(y + head.to(tl.int64) * size + places, total.to(y.dtype.element_ty), mask=places < size)


def sum_shares(x: Tensor, shares: int) -> Tensor:
    """[B, G, S, D] of x [B, G shares, S, D], contiguous."""
    if shares == 1:
        return x
    B, heads, S, D = x.shape
    y = empty(x, B, heads // shares, S, D)
    key = "hopper shares", x.device, x.dtype, S * D % 16 == 0
    run(
        sum_kernel, x.device, blocks(S * D, SUM.block_t) * B * (heads // shares), SUM, key,
        x, y, shares, S * D, SUM.block_t,
    )  # fmt: skip
    return y
