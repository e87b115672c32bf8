"""Learning-rate schedules: a pure function of the step gives the factor, a builder hands it to an optimizer.

Steps are optimizer steps and count from 0. The builders take the optimizer first and the rest by keyword, so that a
YAML `_partial_: true` completes them.
"""

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = [
    "constant",
    "constant_factor",
    "warmup_cosine",
    "warmup_cosine_factor",
    "warmup_linear",
    "warmup_linear_factor",
    "warmup_stable_decay",
    "warmup_stable_decay_factor",
]

DECAY_SHAPES = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""What is left of the way from the peak rate down to the floor, by the share of the decay that is done."""


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


def warmup_linear_factor(step: int, *, warmup_steps: int, total_steps: int, floor: float) -> float:
    """As `warmup_cosine_factor`, with a straight line down."""
    decay_steps = total_steps - warmup_steps
    return warmup_stable_decay_factor(
        step, warmup_steps=warmup_steps, total_steps=total_steps, decay_steps=decay_steps, floor=floor, shape="linear"
    )


def warmup_stable_decay_factor(
    step: int, *, warmup_steps: int, total_steps: int, decay_steps: int, floor: float, shape: str
) -> float:
    """The factor of `constant_factor`, then in the last `decay_steps` down to `floor`, reached at step `total_steps`.

    `shape` is a name in `DECAY_SHAPES`. What stands before the decay does not depend on `total_steps`.
    """
    begin = total_steps - decay_steps
    if step < begin:
        return constant_factor(step, warmup_steps=warmup_steps)
    return floor + (1.0 - floor) * DECAY_SHAPES[shape](min(1.0, (step - begin) / decay_steps))


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """The optimizer's own rate after a linear warm-up of `warmup_steps` optimizer steps."""
    _check_warmup(warmup_steps)
    return LambdaLR(optimizer, partial(constant_factor, warmup_steps=warmup_steps))


def warmup_cosine(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, floor: float = 0.1) -> LambdaLR:
    """A linear warm-up of `warmup_steps` optimizer steps, then a cosine to `floor` times the rate at `total_steps`.

    Raises:
        ValueError: the warm-up does not end before the run, or `floor` is no fraction.
    """
    _check("cosine", warmup_steps, total_steps, floor)
    factor = partial(warmup_cosine_factor, warmup_steps=warmup_steps, total_steps=total_steps, floor=floor)
    return LambdaLR(optimizer, factor)


def warmup_linear(optimizer: Optimizer, *, warmup_steps: int, total_steps: int, floor: float = 0.0) -> LambdaLR:
    """A linear warm-up of `warmup_steps` optimizer steps, then a line to `floor` times the rate at `total_steps`.

    Raises:
        ValueError: the warm-up does not end before the run, or `floor` is no fraction.
    """
    _check("line", warmup_steps, total_steps, floor)
    factor = partial(warmup_linear_factor, warmup_steps=warmup_steps, total_steps=total_steps, floor=floor)
    return LambdaLR(optimizer, factor)


def warmup_stable_decay(
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    total_steps: int,
    decay: float = 0.2,
    floor: float = 0.0,
    shape: str = "sqrt",
) -> LambdaLR:
    """A linear warm-up, the optimizer's own rate, and in the last `decay` of the run down to `floor` times it (WSD).

    A run can be continued from any checkpoint before the decay with another `total_steps`, as if it had always had
    that length: the trunk is one, and each decay a branch of it (Hu et al., 2024, arXiv 2404.06395). `shape` is the
    decay's, "linear" or "sqrt": one minus the root of the share that is done (Haegele et al., 2024, arXiv 2405.18392).

    Raises:
        ValueError: warm-up and decay do not fit into the run, `decay` or `floor` is no fraction, an unknown `shape`.
    """
    _check("decay", warmup_steps, total_steps, floor)
    if shape not in DECAY_SHAPES:
        raise ValueError(f"shape is one of {', '.join(DECAY_SHAPES)}, not {shape!r}.")
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"decay is the share of all steps that ends the run, above 0 and at most 1, not {decay}.")
    decay_steps = max(1, round(decay * total_steps))
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} and a decay of {decay_steps} steps ({decay:g} of all) do not fit into "
            f"total_steps={total_steps}: shorten one of them, or train for more steps."
        )
    factor = partial(
        warmup_stable_decay_factor, warmup_steps=warmup_steps, total_steps=total_steps, decay_steps=decay_steps,
        floor=floor, shape=shape,
    )  # fmt: skip
    return LambdaLR(optimizer, factor)


def _check(what: str, warmup_steps: int, total_steps: int, floor: float) -> None:
    _check_warmup(warmup_steps)
    if total_steps <= warmup_steps:
        raise ValueError(
            f"The {what} needs steps after the warm-up, but total_steps={total_steps} and warmup_steps={warmup_steps}. "
            "Shorten the warm-up, train for more steps, or use a constant rate when the length is not known."
        )
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor is a fraction of the peak rate, between 0 and 1, not {floor}: 0.1 is usual.")


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps counts optimizer steps and cannot be {warmup_steps}: 0 means no warm-up.")
