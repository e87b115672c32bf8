"""What the kernels share: where a program works, what a row sees, and how tiles are read and multiplied.

Every kernel reads `[B, H, T, D]` tensors of any strides in tiles of rows. What it is compiled for travels through its
functions in one tuple, `Constants`, what it is called with in `Numbers` and `Extras`, and the document that it is
working on, or the whole sequence, in a `Span`. (The kernels' own arguments are flat: Triton 3.6 takes 20 times as long
to bind a tuple, and loses constants that stand in a tuple inside a tuple.)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.3e38)
"""Where a row's maximum begins: below every finite score, in units of log2 too, and itself finite, so that exp2(s - m)
is 0 where a row has seen nothing but minus infinity."""
MANY = tl.constexpr(2.0**64)
"""Where a row's maximum is not looked for, its sum of exponentials is to stay below this. Softmax does not depend on
what is subtracted, a floating-point number's rounding not on its size, and exponentials in bf16 have fp32's range: a
score may exceed the row's first ones by 44 (64 in log2), and the output's sums hold values up to 2^64."""


class Constants(NamedTuple):
    """What a kernel is compiled for: shapes of tiles, and which of the features its code has."""

    D: Any
    E: Any
    BLOCK_T: Any
    BLOCK_S: Any
    BLOCK_D: Any
    BLOCK_E: Any
    MASK: Any
    """"full", "causal", "window" (any bounds, causal among them) or "documents" (the same inside each document)."""
    MODIFIED: Any
    """Whether scores are more than scale q k^T: ALiBi, if nothing else."""
    SOFT_CAP: Any
    DENSE: Any
    """0, or where a bias or a boolean mask is read, or both, in what steps: `operands.dense_width`."""
    DROPOUT: Any
    WIDTH: Any
    """How many elements of a row are read at a time (`operands.vector`); 0: tiles come through tensor descriptors."""
    PRECISION: Any
    UPCAST: Any
    """Triton's interpreter multiplies bf16 operands wrongly."""


class Numbers(NamedTuple):
    """What a kernel is called with."""

    heads: Any
    """How many heads the programs are for: B H or B G."""
    H: Any
    G: Any
    T: Any
    S: Any
    left: Any
    right: Any
    shift: Any
    """Query t stands beside key t + shift, but for documents."""
    head_stride: Any
    """Elements from one batch row's slopes and sinks to the next one's: 0 or H."""
    flags: Any
    """The sum of these below that hold."""
    scale: Any
    soft_cap: Any
    keep_scale: Any
    """1 / (1 - dropout)"""
    threshold: Any
    """Of 31 random bits: below it an element is dropped."""


NOT_SPECIALIZED = ["heads", "H", "G", "T", "S", "left", "right", "shift", "head_stride", "flags", "threshold"]
"""No kernel is compiled anew for a 1 or a multiple of 16 among these."""
ALIGNMENT_TOLD = ["q", "k", "v", "do"]
"""Nor for an address of these that is a multiple of 16 bytes: WIDTH says so."""
TOP_LEFT, HAS_BIAS, HAS_ALLOWED, HAS_SLOPES, HAS_SINKS = (tl.constexpr(2**i) for i in range(5))


class Extras(NamedTuple):
    """Tensors that a call may lack; then a stand-in that is not read. Those of [B, H, T, S] come with `strides_of`."""

    bias: Any
    bias_strides: Any
    allowed: Any
    allowed_strides: Any
    slopes: Any
    sinks: Any
    seed: Any
    bounds: Any
    query_document: Any
    key_document: Any


class Span(NamedTuple):
    """The document at work: its number, its queries and keys (first, last + 1), and how far it shifts rows."""

    number: Any
    first_query: Any
    end_query: Any
    first_key: Any
    end_key: Any
    shift: Any


@triton.jit
def locate(blocks, heads, LAST_FIRST: tl.constexpr):
    """(block, head) of this program: heads in groups whose keys and values stay in the L2 cache, and in a group the
    blocks in order, the last one first where that is the longest (Dao et al. 2026, arXiv 2603.05451, section 3.4)."""
    TOGETHER: tl.constexpr = 8  # 8 heads of 8k keys, D = 128, in bf16 are 32 MiB
    pid = tl.program_id(0)
    group = pid // (TOGETHER * blocks)
    heads_here = min(TOGETHER, heads - group * TOGETHER)
    rest = pid - group * TOGETHER * blocks
    block = rest // heads_here
    head = group * TOGETHER + rest - block * heads_here
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, head


@triton.jit
def whole(n):
    """The span of a sequence that is no pack of documents."""
    return Span(0, 0, n.T, 0, n.S, n.shift)


@triton.jit
def span_of(number, n, x):
    """The span of a document (or of several, elementwise); bounds outside the tensors are cut to them."""
    bounds = x.bounds + number * 4
    first_query = tl.minimum(tl.maximum(tl.load(bounds), 0), n.T)
    end_query = tl.minimum(tl.maximum(tl.load(bounds + 1), first_query), n.T)
    first_key = tl.minimum(tl.maximum(tl.load(bounds + 2), 0), n.S)
    end_key = tl.minimum(tl.maximum(tl.load(bounds + 3), first_key), n.S)
    shift = tl.where((n.flags & TOP_LEFT) != 0, first_key - first_query, end_key - end_query)
    return Span(number, first_query, end_query, first_key, end_key, shift)


@triton.jit
def documents_of(document, b, first, length, BLOCK: tl.constexpr):
    """(first, last + 1) of the documents that rows first to first + BLOCK of sequence b, `length` long, belong to."""
    row = document + b.to(tl.int64) * length
    return tl.load(row + first), tl.load(row + tl.minimum(first + BLOCK, length) - 1) + 1


@triton.jit
def visible_keys(rows, span, n, c):
    """(low, high): each row sees keys low to high - 1. All masking follows from these; low is 0 but for windows."""
    beside = rows + span.shift
    if c.MASK == "full":
        return rows * 0, rows * 0 + n.S
    elif c.MASK == "causal":
        return rows * 0, tl.minimum(tl.maximum(beside + 1, 0), n.S)
    else:
        low = tl.minimum(tl.maximum(beside - n.left, span.first_key), span.end_key)
        high = tl.minimum(tl.maximum(beside + n.right + 1, span.first_key), span.end_key)
        return low, high


@triton.jit
def is_seen(keys, low, high, c):
    """Which pairs take part; the shapes broadcast."""
    if c.MASK == "full" or c.MASK == "causal":
        return keys < high
    else:
        return (keys >= low) & (keys < high)


@triton.jit
def key_tiles(first, span, n, c, SPARED: tl.constexpr):
    """(start, full, full_end, end) for the rows from `first` on: the keys that any of them sees lie in start to end,
    in tiles counted from start, and all rows see all keys from full to full_end. SPARED: each row that sees a key sees
    one behind full_end, too, with a full or causal mask."""
    top = tl.maximum(first, span.first_query)
    bottom = tl.minimum(first + c.BLOCK_T, span.end_query) - 1
    low_top, high_top = visible_keys(top, span, n, c)
    low_bottom, end = visible_keys(bottom, span, n, c)
    if c.MASK == "full" or c.MASK == "causal":
        return 0, 0, tl.maximum(high_top - SPARED, 0) // c.BLOCK_S * c.BLOCK_S, end
    else:
        zero = span.first_key
        start = zero + (low_top - zero) // c.BLOCK_S * c.BLOCK_S
        end = tl.where(bottom < top, start, end)
        if c.DENSE:  # any pair may be masked
            return start, end, end, end
        else:
            full = tl.minimum(zero + tl.cdiv(low_bottom - zero, c.BLOCK_S) * c.BLOCK_S, tl.maximum(end, start))
            return start, full, tl.maximum(zero + (high_top - zero) // c.BLOCK_S * c.BLOCK_S, full), end


@triton.jit
def query_tiles(first, span, n, c):
    """(start, full, full_end, end) for the keys from `first` on: likewise the queries that see them."""
    if c.MASK == "full":
        return 0, 0, n.T, n.T
    elif c.MASK == "causal":
        last = tl.minimum(first + c.BLOCK_S, n.S) - 1
        start = tl.maximum(first - n.shift, 0) // c.BLOCK_T * c.BLOCK_T
        full = tl.cdiv(tl.maximum(last - n.shift, 0), c.BLOCK_T) * c.BLOCK_T
        return start, tl.minimum(full, n.T), n.T, n.T
    else:
        zero, stop = span.first_query, span.end_query
        top = tl.maximum(first, span.first_key)
        bottom = tl.minimum(first + c.BLOCK_S, span.end_key) - 1
        start = tl.minimum(tl.maximum(top - n.right - span.shift, zero), stop)
        start = zero + (start - zero) // c.BLOCK_T * c.BLOCK_T
        end = tl.minimum(tl.maximum(bottom + n.left - span.shift + 1, zero), stop)
        end = tl.where(bottom < top, start, end)
        if c.DENSE:
            return start, end, end, end
        else:
            full = tl.minimum(tl.maximum(bottom - n.right - span.shift, zero), stop)
            full = tl.minimum(zero + tl.cdiv(full - zero, c.BLOCK_T) * c.BLOCK_T, tl.maximum(end, start))
            full_end = tl.minimum(tl.maximum(top + n.left - span.shift + 1, zero), stop)
            return start, full, tl.maximum(zero + (full_end - zero) // c.BLOCK_T * c.BLOCK_T, full), end


@triton.jit
def strides_of(numbers, WIDTH: tl.constexpr):
    """The strides in `operands.as_numbers`, multiples of WIDTH but for the last, which is 1; or any, if WIDTH is -1."""
    b, h, t, d = (numbers[0] >> 1) - 1, (numbers[1] >> 1) - 1, (numbers[2] >> 1) - 1, (numbers[3] >> 1) - 1
    if WIDTH == -1:
        return b, h, t, d
    else:
        return b // WIDTH * WIDTH, h // WIDTH * WIDTH, t // WIDTH * WIDTH, 1  # which the compiler then knows


@triton.jit
def load_tile(x, strides, b, h, start, end, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
              WIDTH: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """Rows start to start + BLOCK of head (b, h), zeros outside the tensor; with CUT, from row `end` on, too."""
    rows = start + tl.arange(0, BLOCK)
    if WIDTH == 0:
        tile = x.load([b, h, start, 0]).reshape([BLOCK, BLOCK_SIZE])  # [BLOCK, BLOCK_SIZE]
        if CUT:  # what a neighbour holds may be NaN, and 0 * NaN is NaN
            tile = tl.where((rows < end)[:, None], tile, 0.0)
        return tile
    else:
        stride_b, stride_h, stride_t, stride_d = strides_of(strides, WIDTH)
        columns = tl.arange(0, BLOCK_SIZE)[None, :]
        # 64 bits to the tile, since B H T D may pass 2^31 elements; inside it 32 save registers (`operands.readable`)
        base = x + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tl.full([], start, tl.int64) * stride_t
        base = tl.multiple_of(base, 16)
        mask = (rows < end)[:, None]
        STORED: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH * WIDTH
        if STORED != BLOCK_SIZE:
            mask = mask & (columns < STORED)
        return tl.load(base + (tl.arange(0, BLOCK)[:, None] * stride_t + columns * stride_d), mask=mask, other=0.0)


@triton.jit
def store_tile(x, offset, row_stride, start, first, end, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr,
               BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """The tile's rows start to start + BLOCK, but for those before `first` and from `end` on, into a head whose row 0
    is `offset` (64 bits) elements behind x."""
    rows, columns = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)[None, :]
    mask = ((rows >= first) & (rows < end))[:, None]
    if SIZE != BLOCK_SIZE:
        mask = mask & (columns < SIZE)
    base = x + offset + tl.full([], start, tl.int64) * row_stride
    tl.store(base + (tl.arange(0, BLOCK)[:, None] * row_stride + columns), tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def multiply(a, b, c):
    """a @ b in fp32."""
    if c.UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=c.PRECISION)


@triton.jit
def multiply_add(a, b, to, c):
    """a @ b + to in fp32. For fp32 operands the product is summed apart: one chain of S additions rounds too often."""
    if c.UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.fma(to, 1.0, tl.dot(a, b, input_precision=c.PRECISION))  # an addition would join the chain
    else:
        return tl.dot(a, b, to, input_precision=c.PRECISION)


@triton.jit
def row_deltas(do, output, grad_lse, do_strides, o_strides, dl_b, dl_h, dl_t, b, h, first, T, E: tl.constexpr,
               BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, WIDTH: tl.constexpr,
               HAS_GRAD_LSE: tl.constexpr):  # fmt: skip
    """delta = rowsum(dO * O) - dL of the rows `first` to first + BLOCK_T of head (b, h), fp32."""
    rows = first + tl.arange(0, BLOCK_T)
    grad = load_tile(do, do_strides, b, h, first, T, E, BLOCK_T, BLOCK_E, WIDTH, False).to(tl.float32)
    o = load_tile(output, o_strides, b, h, first, T, E, BLOCK_T, BLOCK_E, WIDTH, False).to(tl.float32)
    delta = tl.sum(grad * o, 1)
    if HAS_GRAD_LSE:
        pointers = grad_lse + b.to(tl.int64) * dl_b + h.to(tl.int64) * dl_h
        delta -= tl.load(pointers + rows.to(tl.int64) * dl_t, mask=rows < T, other=0.0)
    return delta


@triton.jit
def row_numbers(lse, delta, head, rows, end, n):
    """(L in units of log2, delta) of the rows; L of a row that saw nothing, or is none, is +inf: exp2(s - inf) = 0."""
    offsets = head.to(tl.int64) * n.T + rows
    L = tl.load(lse + offsets, mask=rows < end, other=float("inf"))
    L = tl.where(L == float("-inf"), float("inf"), L)
    return L * LOG2_E, tl.load(delta + offsets, mask=rows < end, other=0.0)
