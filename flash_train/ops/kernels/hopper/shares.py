"""The small kernel behind the Hopper backward of grouped heads: the sums of what a key head's programs have."""

import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import blocks, run
from flash_train.ops.kernels.operands import as_numbers, large, vector
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import strides_of

SUM = Launch(block_t=4096, block_s=0, warps=8, stages=1)
"""Elements of a program; each of each share is read once."""


@triton.jit
def _sum(x, y, strides, tile, shares, G, S, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """A block of y [B, G, S, SIZE] = the sum of x [B, G, shares, S, SIZE] over shares, in fp32."""
    size = S * SIZE
    here = tl.cdiv(size, BLOCK)
    head = (tile // here).to(tl.int64)
    places = tile % here * BLOCK + tl.arange(0, BLOCK)
    start = x + head * shares * size
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, shares):
        total += tl.load(start + places, mask=places < size, other=0.0).to(tl.float32)
        start += size
    stride_b, stride_g, stride_s, stride_d = strides_of(strides, WIDTH)
    rows = (places // SIZE).to(tl.int64)
    y += head // G * stride_b + head % G * stride_g
    tl.store(y + rows * stride_s + places % SIZE * stride_d, total.to(y.dtype.element_ty), mask=places < size)


@triton.jit(do_not_specialize=["k_tiles", "shares", "G", "S"])
def sum_kernel(dk_shares, dv_shares, dk, dv, dk_strides, dv_strides, k_tiles, shares, G, S, D: tl.constexpr,
               E: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """One program: BLOCK elements of a key head's dK or dV."""
    tile = tl.program_id(0)
    if tile < k_tiles:
        _sum(dk_shares, dk, dk_strides, tile, shares, G, S, D, BLOCK, WIDTH)
    else:
        _sum(dv_shares, dv, dv_strides, tile - k_tiles, shares, G, S, E, BLOCK, WIDTH)


def sum_shares(dk_shares: Tensor, dv_shares: Tensor, dk: Tensor, dv: Tensor) -> None:
    """dK [B, G, S, D] and dV [B, G, S, E], whose rows are whole vectors, of those of each share: contiguous
    [B, G shares, S, D] and [.., E]."""
    (B, G, S, D), E = dk.shape, dv.shape[3]
    k_tiles, v_tiles = (blocks(S * size, SUM.block_t) * B * G for size in (D, E))
    strides, width = [as_numbers(x.stride()) for x in (dk, dv)], vector(dk.element_size())
    key = "hopper shares", dk.device, dk.dtype, D, E, *(large(x) for x in strides)
    run(
        sum_kernel, dk.device, k_tiles + v_tiles, SUM, key,
        dk_shares, dv_shares, dk, dv, *strides, k_tiles, dk_shares.shape[1] // G, G, S, D, E, SUM.block_t, width,
    )  # fmt: skip
