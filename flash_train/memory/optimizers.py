"""The one optimizer of a predicted step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def configured(module: Any) -> Any:
    """What the module's own `configure_optimizers` returns."""
    configure = getattr(module, "configure_optimizers", None)
    if not callable(configure):
        raise ValueError(
            f"there must be an optimizer, and {type(module).__name__} has no configure_optimizers: "
            "give optimizer=lambda module: torch.optim.AdamW(module.parameters())"
        )
    return configure()


def only_optimizer(configured: Any) -> Optimizer:
    """The one optimizer in what Lightning lets `configure_optimizers` return. Raises ValueError for more, or none."""
    found = configured
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
            f"there must be one optimizer, got {found!r}: return one from configure_optimizers, or give optimizer="
        )
    return found


def fuse(optimizer: Optimizer) -> None:
    """Let it take its step in one kernel, in place. Raises ValueError if it has none."""
    if any("fused" not in group for group in optimizer.param_groups):
        raise ValueError(f"fused must be left out for {type(optimizer).__name__}, which has no fused step")
    for group in optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
