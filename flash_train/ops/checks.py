"""The rejections that several arguments share: each names the rule, the value and a way out."""

from torch import Tensor


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
