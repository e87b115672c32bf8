"""What the kernels allocate for themselves: torch sees an operator's results only, a prediction of memory needs both.

`library.py` publishes each as the operator's plain attribute `workspace_bytes`, called with the compute capability of
the GPU that is meant (None: a CPU) and the operator's own arguments. Shapes only are read.
"""

from typing import Any

import torch
from torch import Tensor

from flash_train.ops.choice import HOPPER, TRITON_HEAD_SIZES
from flash_train.ops.features import Terms, split_heads
from flash_train.ops.kernels.hopper.tables import BACKWARD, FORWARD, programs_a_head, tile_width
from flash_train.ops.tiled import default_tile


def forward_workspace(capability: tuple[int, int] | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Bytes that `attention` holds while it runs beside its results: on a CPU a step of tiles, on a GPU nothing, or,
    Hopper, of documents the first rows of values, and what lies before them and the output."""
    if capability is not None:
        terms = Terms(*rest)
        if not _on_hopper(capability, q, v, terms) or terms.bounds is None:
            return 0
        (B, G, _, E), H = v.shape, q.shape[1]
        rows = FORWARD[tile_width(max(q.shape[-1], E))].block_s
        return 2 * E * (rows * (B * G + 1) + 64 * H)
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
    dQ's sums in fp32, in whole octets of rows, and a count for 64 rows; of grouped heads, dK and dV of each program
    that shares a key head; of documents a count for each row, the first rows of the inputs, and what lies before them
    and the results. What it does not take runs on Triton, with less.
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
    if not _on_hopper(capability, q, rest[1], terms):
        return 4 * B * H * T
    G, S, E = rest[1].shape[1:]
    row = BACKWARD[tile_width(max(D, E))]
    split = programs_a_head(-(-S // row.block_s) * B * G, H // G, terms)
    rows = -(-T // 128) * 128
    own = B * H * (4 * D * (-(-T // 8) * 8) + 32 * rows) + (2 * B * G * split * S * (D + E) if split > 1 else 0)
    if terms.bounds is None:
        return own + 4 * B * H * rows // 64
    first = 2 * (D + E) * (row.block_t * (B * H + 1) + 64 * (B * G + 1))
    return own + 4 * B * H * T + first + 2 * 64 * (2 * D + D + D + E) + 32 * 128


def qkv_forward_workspace(capability: tuple[int, int] | None, qkv: Tensor, heads: int, *rest: Any) -> int:
    """Of `qkv_attention`."""
    return forward_workspace(capability, *split_heads(qkv, heads), *rest)


def qkv_backward_workspace(
    capability: tuple[int, int] | None,
    grad_output: object,
    grad_lse: object,
    qkv: Tensor,
    output: object,
    lse: object,
    heads: int,
    *rest: Any,
) -> int:
    """Of `qkv_attention_backward`: three gradients, and one that they are copied into, but for Hopper's kernels."""
    q, k, v = split_heads(qkv, heads)
    own = backward_workspace(capability, grad_output, grad_lse, q, k, v, output, lse, *rest)
    if capability is not None and _on_hopper(capability, q, v, Terms(*rest[1:])):
        return own
    apart = qkv.numel() * qkv.element_size()
    return max(own, apart)


def _on_hopper(capability: tuple[int, int], q: Tensor, v: Tensor, terms: Terms) -> bool:
    half, small = q.dtype in (torch.float16, torch.bfloat16), max(q.shape[-1], v.shape[-1]) in TRITON_HEAD_SIZES
    return capability == HOPPER and half and small and terms.implementation in ("flash", "hopper")
