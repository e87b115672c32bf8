"""Learning-rate schedules: a pure function of the step gives the factor, a builder hands it to an optimizer.

The builders take the optimizer first and the rest by keyword, so that a YAML `_partial_: true` completes them.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["constant", "constant_factor", "warmup_cosine", "warmup_cosine_factor"]


def constant_factor(step: int, *, warmup_steps: int) -> float:
    """What the peak rate is multiplied by in optimizer step `step` (from 0): a linear rise, then 1.

    The first step already moves: its factor is 1 / (warmup_steps + 1), and step `warmup_steps` is the first at 1.
    """
    return min(1.0, (step + 1) / (warmup_steps + 1))


def warmup_cosine_factor(step: int, *, warmup_steps: int, total_steps: int, floor: float) -> float:
    """The factor of `constant_factor` while it rises, then half a cosine from 1 down to `floor`.

    `floor` is reached at step `total_steps`, one after the last of a run of that length, and kept from there on.
    """
    if step < warmup_steps:
        return constant_factor(step, warmup_steps=warmup_steps)
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """The optimizer's own rate after a linear warm-up of `warmup_steps` optimizer steps."""
    _check_warmup(warmup_steps)
    return LambdaLR(optimizer, lambda step: constant_factor(step, warmup_steps=warmup_steps))


def warmup_cosine(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, floor: float = 0.1) -> LambdaLR:
    """A linear warm-up of `warmup_steps` optimizer steps, then a cosine to `floor` times the rate at `total_steps`.

    Raises:
        ValueError: the warm-up does not end before the run, or `floor` is no fraction.
    """
    _check_warmup(warmup_steps)
    if total_steps <= warmup_steps:
        raise ValueError(
            f"The cosine needs steps after the warm-up, but total_steps={total_steps} and warmup_steps={warmup_steps}. "
            "Shorten the warm-up, train for more steps, or use a constant rate when the length is not known."
        )
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor is a fraction of the peak rate, between 0 and 1, not {floor}: 0.1 is usual.")
    return LambdaLR(
        optimizer,
        lambda step: warmup_cosine_factor(step, warmup_steps=warmup_steps, total_steps=total_steps, floor=floor),
    )


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps counts optimizer steps and cannot be {warmup_steps}: 0 means no warm-up.")
