"""The small kernel behind the Hopper backward of grouped heads: the sums of what a key head's programs have."""

import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import blocks, empty, run
from flash_train.ops.kernels.tables import Launch

SUM = Launch(block_t=4096, block_s=0, warps=8, stages=1)
"""Elements of a program; each of each share is read once."""


@triton.jit
def _sum(x, y, tile, shares, size, BLOCK: tl.constexpr):
    """A block of y [heads, size] = the sum of x [heads, shares, size] over shares, in fp32."""
    here = tl.cdiv(size, BLOCK)
    head = (tile // here).to(tl.int64)
    places = tile % here * BLOCK + tl.arange(0, BLOCK)
    start = x + head * shares * size
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, shares):
        total += tl.load(start + places, mask=places < size, other=0.0).to(tl.float32)
        start += size
    tl.store(y + head * size + places, total.to(y.dtype.element_ty), mask=places < size)


@triton.jit(do_not_specialize=["k_tiles", "shares"])
def sum_kernel(dk_shares, dv_shares, dk, dv, k_tiles, shares, k_size, v_size, BLOCK: tl.constexpr):
    """One program: BLOCK elements of a key head's dK or dV."""
    tile = tl.program_id(0)
    if tile < k_tiles:
        _sum(dk_shares, dk, tile, shares, k_size, BLOCK)
    else:
        _sum(dv_shares, dv, tile - k_tiles, shares, v_size, BLOCK)


def sum_shares(dk_shares: Tensor, dv_shares: Tensor, shares: int) -> tuple[Tensor, Tensor]:
    """(dK [B, G, S, D], dV [B, G, S, E]) of those of each share, contiguous [B, G shares, S, D] and [.., E]."""
    if shares == 1:
        return dk_shares, dv_shares
    B, heads, S, D = dk_shares.shape
    E, G = dv_shares.shape[3], heads // shares
    dk, dv = empty(dk_shares, B, G, S, D), empty(dv_shares, B, G, S, E)
    k_tiles, v_tiles = (blocks(S * size, SUM.block_t) * B * G for size in (D, E))
    key = "hopper shares", dk.device, dk.dtype, S * D % 16 == 0, S * E % 16 == 0
    run(
        sum_kernel, dk.device, k_tiles + v_tiles, SUM, key,
        dk_shares, dv_shares, dk, dv, k_tiles, shares, S * D, S * E, SUM.block_t,
    )  # fmt: skip
    return dk, dv
