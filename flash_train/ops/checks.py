"""The rejections that several arguments share: each names the rule, the value and a way out."""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 1e38
"""Of numbers that a kernel takes as fp32, in units of log2 too."""
SMALLEST = 1e-37
"""Of those that something is divided by: fp32 rounds what is smaller, at last to 0."""


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; make one with torch.as_tensor")


def check_number(name: str, x: object) -> None:
    """A Python number: a tensor's would have to be read on the host."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__} {x}; make one with float(...)")


def check_dropout(name: str, x: float) -> None:
    check_number(name, x)
    if not 0 <= x < 1:
        raise ValueError(f"{name} must be in [0, 1), got {x}; dropping everything is a zero output")


def check_scale(name: str, x: float) -> None:
    check_number(name, x)
    if not 0 < x <= LARGEST:
        raise ValueError(f"{name} must be positive and at most {LARGEST:g}, got {x}; scale q instead")


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


def check_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        raise ValueError(f"{name} must be dense, got {x.layout}; use .to_dense(), or flash_attention_packed")


def check_attended(q: Tensor, k: Tensor, v: Tensor) -> None:
    """That dense q [B, H, T, D], k [B, G, S, D] and v [B, G, S, E] fit together."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            "q, k and v must be [B, H, T, D], [B, G, S, D] and [B, G, S, E], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; add the missing dimensions with unsqueeze"
        )
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k and v must share B, G and S, and q's B: got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
            "is one of them laid out as [B, T, H, D]? Then pass .transpose(1, 2)"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q and k must have one head size D, got {q.shape[3]} and {k.shape[3]}; pad the smaller one with zeros"
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[3], v.shape[3]):
        raise ValueError(
            f"heads and head sizes must not be empty, got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
            "B, T and S may be"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"query heads must be a multiple of key heads, got H={q.shape[1]} and G={k.shape[1]}; "
            "is one of them laid out as [B, T, H, D]? Then pass .transpose(1, 2)"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "q, k and v must share one dtype, fp16, bf16, fp32 or float64, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}; cast them with .to(dtype)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must lie on one device, got {q.device}, {k.device} and {v.device}; move them with .to(device)"
        )
