"""The operators under `torch.func.vmap`: one more dimension becomes part of the batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_train.ops.features import SEED_STEP, Terms


def fold_batch(
    operator: Callable[..., Any],
    q_at: int,
    dbias_at: int | None,
    info: Any,
    in_dims: tuple[int | None, ...],
    *args: Any,
) -> Any:
    """The vmapped dimension, N long, becomes part of the batch: [N, B, ...] is computed as [N * B, ...].

    `q_at` is the place of q among the arguments, `dbias_at` that of the bias's gradient among the results.
    """
    N = info.batch_size
    q, q_dim = args[q_at], in_dims[q_at]
    B = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
    names = (*("" for _ in range(len(args) - len(Terms._fields))), *Terms._fields)
    bounds, bounds_dim = args[names.index("bounds")], in_dims[names.index("bounds")]
    shared_bias = False

    def fold(name: str, x: Any, dimension: int | None) -> Any:
        nonlocal shared_bias
        if not isinstance(x, Tensor) or (name == "bounds" and dimension is None):
            return x
        x = x.expand(N, *x.shape) if dimension is None else x.movedim(dimension, 0)
        if name == "bounds":
            return x.flatten(0, 1)
        if name in ("query_document", "key_document") and bounds_dim is not None:  # each has documents of its own
            count = bounds.movedim(bounds_dim, 0).shape[1]
            x = x + (torch.arange(N, device=x.device, dtype=x.dtype) * count)[:, None, None]
        if name == "seed" and bounds_dim is not None:  # the numbers are in the seeds, and shall be each one's own there
            x = x - (torch.arange(N, device=x.device) * bounds.movedim(bounds_dim, 0).shape[1] * SEED_STEP)[:, None]
        if x.shape[1] != B:  # a bias, or a boolean mask, of one for the whole batch
            shared_bias |= name == "bias"
            x = x.expand(N, B, *x.shape[2:])
        return x.flatten(0, 1)

    outputs = operator(*(fold(*each) for each in zip(names, args, in_dims, strict=True)))
    results = [x if x.dim() == 1 else x.unflatten(0, (N, B)) for x in outputs]  # of one dimension: none at all
    if dbias_at is not None and shared_bias and results[dbias_at].dim() > 1:
        results[dbias_at] = results[dbias_at].sum(1, keepdim=True)
    return tuple(results), tuple(None if x.dim() == 1 else 0 for x in outputs)
