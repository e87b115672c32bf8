"""Which probabilities are dropped: a function of seed, head and the two positions alone, with no state.

Every implementation, forward and backward, computes it anew: a query and a key each get a 32-bit key of their own, and
an element is dropped where a mix of the two falls below the dropout probability. The mixer is two multiplications
between three xor-shifts (Wellons 2018, "Prospecting for hash functions", the function named lowbias32), about ten
integer operations an element, where a Philox call takes about a hundred. `kernels/tiles.py` has the same on the chip.
"""

import torch
from torch import Tensor

from flash_train.ops.features import SEED_STEP, Terms, wide

MASK_32 = 0xFFFFFFFF
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
STEP_HEAD, STEP_QUERY, STEP_KEY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D  # xxHash's primes


def threshold(dropout: float) -> int:
    """An element is dropped where its 31 bits are below this."""
    return min(round(dropout * 2**31), 2**31 - 1)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers (held in int64) whose outputs look unrelated."""
    x = (x ^ (x >> 16)) * MIX_1 & MASK_32
    x = (x ^ (x >> 15)) * MIX_2 & MASK_32
    return x ^ (x >> 16)


def keys(seed: Tensor, heads: Tensor, positions: Tensor, step: int) -> Tensor:
    """The 32-bit keys of positions (inside their document) in the heads, for a 64-bit seed; shapes broadcast.

    `step` is that of queries or of keys, and parts the two: of equal keys the mix is 0 whatever the seed.
    """
    low, high = seed & MASK_32, (seed >> 32) & MASK_32
    base = mix(mix(mix(low ^ (heads * wide(STEP_HEAD, seed) & MASK_32)) ^ high) ^ step)
    return mix((base + positions * wide(step, seed)) & MASK_32)


def kept(query_keys: Tensor, key_keys: Tensor, dropout: float) -> Tensor:
    """Boolean: which elements stay. The shapes broadcast."""
    return mix(query_keys ^ key_keys) >> 1 >= threshold(dropout)


def keep_mask(terms: Terms, H: int, T: int, S: int, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
    """[B, H, T, S] boolean, or the part of it that `rows` and `columns` name."""
    assert terms.seed is not None
    device = terms.seed.device
    seed = terms.seed[:, None, None]  # [B, 1, 1]
    t, s = torch.arange(T, device=device)[rows], torch.arange(S, device=device)[columns]
    heads = torch.arange(H, device=device)[:, None]
    if terms.bounds is None or terms.query_document is None or terms.key_document is None:
        q, k = keys(seed, heads, t, STEP_QUERY), keys(seed, heads, s, STEP_KEY)
    else:
        bounds = terms.bounds.long()
        numbers_q, numbers_k = terms.query_document[:, rows].long(), terms.key_document[:, columns].long()
        t, s = t - bounds[numbers_q, 0], s - bounds[numbers_k, 2]
        q = keys(seed + (numbers_q * SEED_STEP)[:, None], heads, t[:, None], STEP_QUERY)
        k = keys(seed + (numbers_k * SEED_STEP)[:, None], heads, s[:, None], STEP_KEY)
    return kept(q.unsqueeze(-1), k.unsqueeze(-2), terms.dropout)
