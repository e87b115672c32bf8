"""How many tokens a batch holds, for a LightningModule that we know nothing about."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NAMES = ("inputs", "input_ids", "tokens")  # ours, transformers' and torchtune's
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def tokens_in(batch: Any) -> int:
    """Elements of the batch's token tensor: the first of `NAMES` that a mapping has as one, else the first integer
    tensor inside.

    Reads shapes only. 0 if there is no integer tensor.
    """
    if isinstance(batch, Tensor):
        return batch.numel() if batch.dtype in INTEGERS else 0
    if isinstance(batch, (dict, Mapping)):  # a dict is told at once, where the other takes some microseconds
        return tokens_in([*(batch[name] for name in NAMES if name in batch), *batch.values()])
    if isinstance(batch, (list, tuple)):
        return next((tokens for item in batch if (tokens := tokens_in(item))), 0)
    return 0
