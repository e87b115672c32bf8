"""What the chunked cross-entropy refuses."""

import math

import torch
from torch import Tensor

from flash_train.ops.checks import DTYPES, check_number, check_tensor

REDUCTIONS = ("mean", "sum")


def check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    for name, x in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        check_tensor(name, x)
        if x.device != hidden.device:
            raise ValueError(
                f"hidden, weight and targets must be on one device, got {name} on {x.device} and hidden on "
                f"{hidden.device}: move it with .to(hidden.device)"
            )
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., C] and weight [V, C], got {list(hidden.shape)} and {list(weight.shape)}: "
            "give the linear layer's own weight, and a row at least"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must give each of the rows {list(hidden.shape[:-1])} of hidden one, got {list(targets.shape)}"
            ": reshape them alike"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 indices, got {targets.dtype}: use targets.long()")
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be fp16, bf16, fp32 or float64, got {x.dtype}: cast it to one of these")
    if not autocasts(hidden) and hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden and weight must have one dtype outside of autocast, got {hidden.dtype} and {weight.dtype}: "
            "cast one of them"
        )


def check_options(chunk_rows: int, reduction: str, ignore_index: int, **from_0_on: float) -> None:
    if not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool) or chunk_rows < 1:
        raise ValueError(f"chunk_rows must be a number of rows from 1 on, got {chunk_rows!r}: 2048 is usual")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise ValueError(f"ignore_index must be an integer, got {ignore_index!r}: -100 is usual")
    for name, x in from_0_on.items():
        check_number(name, x)
        if not 0 <= x < math.inf:
            raise ValueError(f"{name} must be a finite number from 0 on, got {x!r}: 0 leaves it out")


def checked_classes(classes: int | None, rows: int) -> int:
    if classes is None:
        return rows
    if not isinstance(classes, int) or isinstance(classes, bool) or not 1 <= classes <= rows:
        raise ValueError(f"classes must be a number of the weight's rows, from 1 to {rows}, got {classes!r}")
    return classes


def autocasts(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # a meta device has no autocast to ask for
