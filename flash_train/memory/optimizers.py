"""The one optimizer of a predicted step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def gradient_like(parameter: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """Such as `optimizer` takes."""
    if isinstance(optimizer, torch.optim.SparseAdam):  # none else
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), parameter.new_empty(0, *parameter.shape[1:]), parameter.shape
        )
    return torch.empty_like(parameter, dtype=parameter.grad_dtype)


def _made(maker: Any, module: Any) -> Any:
    if maker is None:
        return _configured(module)
    if not callable(maker) or isinstance(maker, type):
        raise TypeError(
            f"optimizer must be a function that makes one from a module, got {_names(maker)}: "
            "give optimizer=lambda module: torch.optim.AdamW(module.parameters())"
        )
    return maker(module)


def _configured(module: Any) -> Any:
    configure = getattr(module, "configure_optimizers", None)
    if not callable(configure):
        raise ValueError(
            f"there must be an optimizer, and {type(module).__name__} has no configure_optimizers: "
            "give optimizer=lambda module: torch.optim.AdamW(module.parameters())"
        )
    return configure()


def only_optimizer(maker: Any, module: Any) -> Optimizer:
    """The one that `maker`, or else the module's own `configure_optimizers`, makes, in whatever Lightning lets that
    return. Raises ValueError for more, or none, TypeError for a maker that is no function."""
    found = _made(maker, module)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        found = found[0]  # (optimizers, schedulers)
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, Mapping) and "optimizer" in found:
        found = found["optimizer"]
    if isinstance(found, torch.optim.LBFGS):
        raise ValueError(
            "the optimizer must take one gradient a step, and LBFGS takes as many as it likes: give another"
        )
    if not isinstance(found, Optimizer):
        raise ValueError(
            f"there must be one optimizer, got {_names(found)}: return one from configure_optimizers, or give "
            "optimizer="
        )
    return found


def _names(found: Any) -> str:
    """An optimizer's own text is its groups."""
    if isinstance(found, list | tuple):
        return f"[{', '.join(map(_names, found))}]"
    return type(found).__name__ if isinstance(found, Optimizer) else repr(found)


def fuse(optimizer: Optimizer) -> None:
    """Let it take its step in one kernel, in place. Raises ValueError if it has none."""
    if any("fused" not in group for group in optimizer.param_groups):
        raise ValueError(f"fused must be left out for {type(optimizer).__name__}, which has no fused step")
    for group in optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
