"""What the kernels share: where a program works, what a row sees, and how tiles are read and multiplied.

Every kernel reads `[B, H, T, D]` tensors of any strides in tiles of rows. `DESCRIPTOR` says how: through a host tensor
descriptor (the copy engine of sm_90 and later; out-of-range elements come as zeros), or through pointers and strides.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate(blocks, heads, LAST_FIRST: tl.constexpr, HEADS_TOGETHER: tl.constexpr):
    """(block, head) of this program: heads in groups whose keys and values stay in the L2 cache, and in a group the
    blocks in order, the last one first where that is the longest (Dao et al. 2026, arXiv 2603.05451, section 3.4)."""
    pid = tl.program_id(0)
    group = pid // (HEADS_TOGETHER * blocks)
    heads_here = min(HEADS_TOGETHER, heads - group * HEADS_TOGETHER)
    rest = pid - group * HEADS_TOGETHER * blocks
    block = rest // heads_here
    head = group * HEADS_TOGETHER + rest - block * heads_here
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, head


@triton.jit
def visible_keys(rows, T, S, CAUSAL: tl.constexpr):
    """How many keys each row sees: keys 0 to n - 1. All masking follows from this one operand."""
    if CAUSAL:
        return tl.minimum(tl.maximum(rows + (S - T + 1), 0), S)
    else:
        return rows * 0 + S


@triton.jit
def locate_queries(heads, H, G, T, BLOCK_T: tl.constexpr, CAUSAL: tl.constexpr, HEADS_TOGETHER: tl.constexpr):
    """(b, h, g, b H + h, first row, rows [BLOCK_T]) of a program that holds queries of one head."""
    block, head = locate(tl.cdiv(T, BLOCK_T), heads, CAUSAL, HEADS_TOGETHER)
    b = head // H
    h = head - b * H
    first = block * BLOCK_T
    return b, h, h // (H // G), head, first, first + tl.arange(0, BLOCK_T)


@triton.jit
def keys_of(rows, first, T, S, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr):
    """(n [BLOCK_T], full, end): what each row sees; keys before `full` all rows see, keys from `end` on none does."""
    n = visible_keys(rows, T, S, CAUSAL)
    full = visible_keys(first, T, S, CAUSAL) // BLOCK_S * BLOCK_S
    end = visible_keys(tl.minimum(first + BLOCK_T, T) - 1, T, S, CAUSAL)
    return n, full, end


@triton.jit
def tile_pointers(x, strides, b, h, start, length, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """([BLOCK, BLOCK_SIZE] addresses of rows start to start + BLOCK of head (b, h), which of them exist)."""
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_SIZE)
    # 64 bits to the tile, since B H T D may pass 2^31 elements; 32 bits inside it save registers (`launch.near_rows`)
    base = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + tl.full([], start, tl.int64) * strides[2]
    pointers = base + (tl.arange(0, BLOCK)[:, None] * strides[2] + columns[None, :] * strides[3])
    mask = rows[:, None] < length
    if SIZE != BLOCK_SIZE:
        mask = mask & (columns[None, :] < SIZE)
    return pointers, mask


@triton.jit
def load_tile(x, strides, b, h, start, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
              DESCRIPTOR: tl.constexpr):  # fmt: skip
    """Rows start to start + BLOCK of head (b, h), zeros outside [length, SIZE]."""
    if DESCRIPTOR:
        return x.load([b, h, start, 0]).reshape([BLOCK, BLOCK_SIZE])  # [BLOCK, BLOCK_SIZE]
    else:
        pointers, mask = tile_pointers(x, strides, b, h, start, length, SIZE, BLOCK, BLOCK_SIZE)
        return tl.load(pointers, mask=mask, other=0.0)  # [BLOCK, BLOCK_SIZE]


@triton.jit
def store_tile(x, strides, b, h, start, length, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr,
               BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """The tile's rows start to start + BLOCK into head (b, h), nothing outside [length, SIZE]."""
    pointers, mask = tile_pointers(x, strides, b, h, start, length, SIZE, BLOCK, BLOCK_SIZE)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b in fp32. UPCAST: Triton's interpreter multiplies bf16 operands wrongly."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def multiply_add(a, b, c, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b + c in fp32. For fp32 operands the product is summed apart: one chain of S additions rounds too often."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.fma(c, 1.0, tl.dot(a, b, input_precision=PRECISION))  # an addition would be folded into the chain
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)
