"""What becomes of a tile of scores on the chip: soft cap, ALiBi, bias, boolean mask; and what dropout takes away.

Tiles may lie either way: `rows` and `keys` come as [BLOCK_T, 1] and [1, BLOCK_S], or as [1, BLOCK_T] and [BLOCK_S, 1].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_train.ops import dropout
from flash_train.ops.features import SEED_STEP as SEED_STEP_INT64
from flash_train.ops.kernels.tiles import HAS_ALLOWED, HAS_BIAS, HAS_SINKS, HAS_SLOPES, LOG2_E, strides_of, visible_keys

MIX_1, MIX_2 = tl.constexpr(dropout.MIX_1), tl.constexpr(dropout.MIX_2)
STEP_HEAD, STEP_QUERY, STEP_KEY = (tl.constexpr(x) for x in (dropout.STEP_HEAD, dropout.STEP_QUERY, dropout.STEP_KEY))
SEED_STEP = tl.constexpr(SEED_STEP_INT64)


@triton.jit
def log2_unit(n, c):
    """What turns a score of `modify` into units of log2: the scale, too, where `modify` leaves that to the exponent."""
    if c.MODIFIED:
        return LOG2_E
    else:
        return n.scale * LOG2_E


class Place(NamedTuple):
    """A head at work, and what its scores need."""

    b: Any
    h: Any
    g: Any
    head: Any
    """b H + h"""
    slope: Any
    """The head's ALiBi slope."""
    base: Any
    """What the dropout keys of the head in this document begin with."""


class Queries(NamedTuple):
    """A tile of queries of a head at work."""

    first: Any
    rows: Any
    """[BLOCK_T, 1] numbers"""
    low: Any
    high: Any
    """Each row sees keys low to high - 1."""
    bits: Any
    """Their dropout keys."""


@triton.jit
def place_of(b, h, span, n, x, c):
    """The place of head h of batch row b in a document."""
    head = b * n.H + h
    if c.MODIFIED:
        slope = tl.load(x.slopes + b * n.head_stride + h, mask=(n.flags & HAS_SLOPES) != 0, other=0.0)
        steepest = 2e38 / (n.T + n.S)  # the farthest key's score is finite, in units of log2 too: no tile is all -inf
        slope = tl.where(slope > steepest, steepest, tl.where(slope < -steepest, -steepest, slope))
        return Place(b, h, h // (n.H // n.G), head, slope, dropout_base(b, h, span, x, c))
    else:
        return Place(b, h, h // (n.H // n.G), head, 0.0, 0)


@triton.jit
def queries_of(first, at, span, n, c):
    """The queries from `first` on."""
    rows = (first + tl.arange(0, c.BLOCK_T))[:, None]
    low, high = visible_keys(rows, span, n, c)
    return Queries(first, rows, low, high, query_keys(at.base, rows, span, c))


@triton.jit
def sink_of(b, h, n, x):
    """The head's sink in units of log2, minus infinity if there is none."""
    return tl.load(x.sinks + b * n.head_stride + h, mask=(n.flags & HAS_SINKS) != 0, other=float("-inf")) * LOG2_E


@triton.jit
def tanh(z):
    """To a few units in the last place; the hardware's own has an error of 2^-11."""
    size = tl.abs(z)
    square = z * z
    near = -0.0062726075  # a least-squares fit of (tanh(z) / z - 1) / z^2 on |z| < 0.55
    near = near * square + 0.021070253
    near = near * square - 0.053851865
    near = near * square + 0.1333258
    near = near * square - 0.33333316
    far = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2_E)) + 1.0)
    return tl.where(size < 0.55, z + z * square * near, tl.where(z < 0.0, -far, far))


@triton.jit
def modify(s, first, first_key, rows, keys, at, span, n, x, c):
    """(scores, d score / d (scale q k^T)) of the products q k^T; the mask of `visible_keys` is not applied.

    `first` and `first_key` are where rows and keys begin.
    """
    derivative = 1.0
    if c.MODIFIED:
        s = s * n.scale
        if c.SOFT_CAP:
            ratio = tanh(s / n.soft_cap)
            s = ratio * n.soft_cap
            derivative = 1.0 - ratio * ratio
        s -= at.slope * tl.abs(rows + span.shift - keys).to(tl.float32)
        if c.DENSE:
            STEP: tl.constexpr = max(c.DENSE, 1)
            inside = (rows < n.T) & (keys // STEP < n.S // STEP)  # so loads are known to be DENSE keys wide
            bias = _dense(x.bias, x.bias_strides, at, first, first_key, rows, keys, c)
            s += tl.load(bias, mask=inside & ((n.flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
            allowed = _dense(x.allowed, x.allowed_strides, at, first, first_key, rows, keys, c)
            allowed = tl.load(allowed, mask=inside & ((n.flags & HAS_ALLOWED) != 0), other=1)
            # finite scores stay so in units of log2: a bias of finfo.min is no mask where a row has nothing else
            s = tl.where(tl.abs(s) < float("inf"), tl.minimum(tl.maximum(s, -2e38), 2e38), s)
            s = tl.where(allowed != 0, s, float("-inf"))
    return s, derivative


@triton.jit
def _dense(x, strides, at, first, first_key, rows, keys, c):
    """Addresses in a [B, H, T, S] tensor: 64 bits to the tile, since T S passes 2^31 at 46k, 32 bits inside it."""
    stride_b, stride_h, stride_t, stride_s = strides_of(strides, c.DENSE)
    base = x + at.b.to(tl.int64) * stride_b + at.h.to(tl.int64) * stride_h
    base += tl.full([], first, tl.int64) * stride_t + tl.full([], first_key, tl.int64) * stride_s
    return base + ((rows - first) * stride_t + (keys - first_key) * stride_s)


@triton.jit
def _mix(bits):
    """As `dropout.mix`."""
    bits = (bits ^ (bits >> 16)) * MIX_1
    bits = (bits ^ (bits >> 15)) * MIX_2
    return bits ^ (bits >> 16)


@triton.jit
def dropout_base(b, h, span, x, c):
    """What the dropout keys of a document's head begin with."""
    if c.DROPOUT:
        seed = tl.load(x.seed + b) + span.number * tl.full([], SEED_STEP, tl.int64)
        low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        return _mix(_mix(low ^ (h.to(tl.uint32) * STEP_HEAD)) ^ high)
    else:
        return 0


@triton.jit
def query_keys(base, rows, span, c):
    """The queries' dropout keys."""
    if c.DROPOUT:
        return _mix(_mix(base ^ STEP_QUERY) + (rows - span.first_query).to(tl.uint32) * STEP_QUERY)
    else:
        return 0


@triton.jit
def key_keys(base, keys, span, c):
    """The keys' dropout keys."""
    if c.DROPOUT:
        return _mix(_mix(base ^ STEP_KEY) + (keys - span.first_key).to(tl.uint32) * STEP_KEY)
    else:
        return 0


@triton.jit
def drop(p, of_queries, of_keys, n, c):
    """`p` with the dropped elements 0; what is kept is not made larger here."""
    if c.DROPOUT:
        bits = (_mix(of_queries ^ of_keys) >> 1).to(tl.int32)
        return tl.where(bits >= n.threshold, p, 0.0)
    else:
        return p
