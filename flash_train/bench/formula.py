"""How many bytes attention moves between a GPU's memory and its multiprocessors, counted by hand: no cache helps.

Of one call of one direction. The tensors are q, k, v, the output and, backward, their gradients, in `itemsize` bytes
an element; log-sum-exp and rowsum(dO * O) are fp32 rows [B, H, T].
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from flash_train.bench.cases import Case

FP32 = 4


class Tiles(NamedTuple):
    """Rows of a query tile and of a key tile."""

    block_t: int
    block_s: int


class _Sizes(NamedTuple):
    """Bytes of each tensor; its gradient has as many."""

    q: int
    k: int
    v: int
    output: int
    matrix: int
    """One T x S matrix for each head: scores or probabilities."""
    row: int
    """One fp32 number for each query."""


def _sizes(case: Case, itemsize: int) -> _Sizes:
    B, H, G, T, S, D, E = case.B, case.H, case.G, case.T, case.S, case.D, case.E
    return _Sizes(
        q=B * H * T * D * itemsize,
        k=B * G * S * D * itemsize,
        v=B * G * S * E * itemsize,
        output=B * H * T * E * itemsize,
        matrix=B * H * T * S * itemsize,
        row=B * H * T * FP32,
    )


def least_bytes(case: Case, direction: str, itemsize: int) -> int:
    """Each tensor once: what no exact attention gets below, unless a cache holds its inputs or outputs."""
    x = _sizes(case, itemsize)
    inputs = x.q + x.k + x.v
    return inputs + x.output if direction == "forward" else 2 * inputs + x.output


def naive_bytes(case: Case, direction: str, itemsize: int) -> int:
    """A kernel for each product and one for the softmax or its derivative; each reads its operands from memory once
    and writes its result once.

    Forward S = Q K^T, P = softmax(S), O = P V: S and P are each written and read. Backward dV = P^T dO, dP = dO V^T,
    dS of P and dP, dQ = dS K, dK = dS^T Q: seven times a T x S matrix. Plain PyTorch moves more where the scale and the
    mask are kernels of their own, and where it copies q, k and v to another layout.
    """
    x = _sizes(case, itemsize)
    if direction == "forward":
        return least_bytes(case, direction, itemsize) + 4 * x.matrix
    return least_bytes(case, direction, itemsize) + x.output + 7 * x.matrix


def triton_bytes(case: Case, direction: str, itemsize: int, tiles: Mapping[str, Tiles]) -> int:
    """The portable kernels: every tile that passes by is read again.

    Forward: a query tile reads K and V once, as far as it sees them. Backward, three kernels: delta reads O and dO; in
    dkdv a key tile of each query head reads Q, dO and two numbers a row; in dq a query tile reads K and V.

    Args:
        tiles: those of "forward", or of "dkdv" and "dq", as in the launch table.
    """
    x, heads, wide = _sizes(case, itemsize), case.B * case.H, (case.D + case.E) * itemsize
    if direction == "forward":
        return x.q + heads * keys_read(case, tiles["forward"]) * wide + x.output + x.row
    delta = 2 * x.output + x.row
    dkdv = 2 * (x.k + x.v) + heads * queries_read(case, tiles["dkdv"]) * (wide + 2 * FP32)
    dq = 2 * x.q + x.output + 2 * x.row + heads * keys_read(case, tiles["dq"]) * wide
    return delta + dkdv + dq


def hopper_bytes(case: Case, direction: str, itemsize: int, tiles: Tiles) -> int:
    """The Hopper kernels: as `triton_bytes`, but the backward is one pass over keys.

    A key tile of each query head reads Q, dO and two numbers a row, and adds its part to dQ, an fp32 tensor, which is
    read and written for that. Before it dQ is filled with zeros and the rows are made from O, dO and the log-sum-exp;
    after it dQ is read once more and written in the inputs' dtype.
    """
    if direction == "forward":
        return triton_bytes(case, direction, itemsize, {"forward": tiles})
    x, heads, wide = _sizes(case, itemsize), case.B * case.H, (case.D + case.E) * itemsize
    sums = heads * case.T * case.D * FP32
    before = 2 * x.output + 3 * x.row + sums
    once = 2 * (x.k + x.v)
    again = heads * queries_read(case, tiles) * (wide + 2 * FP32 + 2 * case.D * FP32)
    return before + once + again + sums + x.q


def keys_read(case: Case, tiles: Tiles) -> int:
    """Rows of keys that all query tiles of one head read together: each the key tiles of which it sees a part."""
    return int((_visits(case, tiles) * _rows(case.S, tiles.block_s)).sum())


def queries_read(case: Case, tiles: Tiles) -> int:
    """Rows of queries that all key tiles of one head read together: each the query tiles that see a part of it."""
    return int((_visits(case, tiles) * _rows(case.T, tiles.block_t)[:, None]).sum())


def _visits(case: Case, tiles: Tiles) -> torch.Tensor:
    """[query tiles, key tiles]: whether the two meet. What a query tile sees has no gaps."""
    first, end = case.bounds()
    nothing = end <= first
    first, end = first.masked_fill(nothing, case.S), end.masked_fill(nothing, 0)
    low = torch.stack([part.min() for part in first.split(tiles.block_t)])
    high = torch.stack([part.max() for part in end.split(tiles.block_t)])
    begin = torch.arange(0, case.S, tiles.block_s)
    return (low[:, None] < begin + tiles.block_s) & (high[:, None] > begin)


def _rows(length: int, block: int) -> torch.Tensor:
    """How many rows each tile has: the last one may have fewer."""
    begin = torch.arange(0, length, block)
    return (length - begin).clamp(max=block)
