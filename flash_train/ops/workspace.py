"""What the kernels allocate for themselves: torch sees an operator's results only, a prediction of memory needs both.

`library.py` publishes each as the operator's plain attribute `workspace_bytes`, called with the compute capability of
the GPU that is meant (None: a CPU) and the operator's own arguments. Shapes only are read.
"""

from typing import Any

import torch
from torch import Tensor

from flash_train.ops.choice import HOPPER
from flash_train.ops.features import Terms
from flash_train.ops.tiled import default_tile


def forward_workspace(capability: tuple[int, int] | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Bytes that `attention` holds while it runs beside its results: on a CPU a step of tiles, on a GPU nothing."""
    if capability is not None:
        return 0
    queries, keys, scores, several = _tiles(q, k)
    D, E = q.shape[-1], v.shape[-1]
    return 4 * (queries * (D + E + 5) + max(queries * E, keys * max(D, E)) + scores * (1 + several))


def _tiles(q: Tensor, k: Tensor) -> tuple[int, int, int, bool]:
    """Rows of queries, rows of keys that are copied, and scores, that the tiled path has at once, of all heads
    together; and whether the next tile's scores are made while the last one's are there."""
    (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
    tile = default_tile(q)
    rows, columns = min(tile, T), min(tile, S)
    copied = B > 1 or q.dtype in (torch.float16, torch.bfloat16)  # else a tile is a view, in the usual layouts
    return B * H * rows, B * G * columns if copied else 0, B * H * rows * columns, tile < S


def backward_workspace(
    capability: tuple[int, int] | None, grad_output: object, grad_lse: object, q: Tensor, *rest: Any
) -> int:
    """Bytes that `attention_backward` holds while it runs, beside its results.

    On a CPU delta, the log-sum-exp without infinities, and the tiles; gradients in fp32 where they end as halves.
    Triton: one fp32 number for each row of scores, delta. Hopper: 16 bf16 numbers, in whole tiles of at most 128 rows,
    dQ's sums in fp32, in whole octets of rows, and a count for 64 rows; what it does not take runs on Triton, with
    less.
    """
    B, H, T, D = q.shape
    terms = Terms(*rest[5:])
    half = q.dtype in (torch.float16, torch.bfloat16)
    if capability is None:
        k, v = rest[0], rest[1]
        E = v.shape[-1]
        queries, keys, scores, several = _tiles(q, k)
        tiles = queries * (2 * D + 2 + (E if keys else 0)) + keys * (D + E)
        tiles += 3 * scores if several else 2 * scores + keys * max(D, E)
        wide = q.numel() + k.numel() + v.numel() if half else 0  # fp32 sums, which the results follow at the end
        return 4 * 2 * B * H * T + max(4 * tiles + 2 * wide, 4 * wide)
    if capability == HOPPER and half and terms.implementation in ("flash", "hopper"):
        rows = -(-T // 128) * 128
        return B * H * (4 * D * (-(-T // 8) * 8) + 32 * rows + 4 * rows // 64)
    return 4 * B * H * T
