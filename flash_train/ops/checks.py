"""The rejections that several arguments share: each names the rule, the value and a way out."""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 1e38
"""Of numbers that a kernel takes as fp32, in units of log2 too."""


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; make one with torch.as_tensor")


def check_number(name: str, x: object) -> None:
    """A Python number: a tensor's would have to be read on the host."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__} {x}; make one with float(...)")


def check_flag(name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {type(x).__name__} {x}; make one with bool(...)")


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must lie on q's device, {q.device}, got {x.device}; move it with .to(q.device)")


def check_tensors(name: str, x: object) -> list[Tensor]:
    """Several tensors as a list."""
    if not isinstance(x, Iterable):
        raise TypeError(f"{name} must be a sequence of tensors, got {type(x).__name__}; put them into a list")
    tensors = list(x)
    for each in tensors:
        check_tensor(f"each of the {name}", each)
    return tensors


def whole_number(x: object) -> int | None:
    """`x` as an int if it is a whole number of any kind but a boolean, else None."""
    if isinstance(x, (bool, Tensor)):
        return None
    if isinstance(x, int):  # so that a symbol under torch.compile stays one
        return x
    try:
        return operator.index(x)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
