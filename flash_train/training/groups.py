"""Which parameters an optimizer treats alike: each one in exactly one group."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["Group", "check_groups", "decay_groups", "trainable"]

Group = dict[str, Any]
"""A parameter group as torch's optimizers take it."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; a tied one under its first name alone.

    Raises ValueError if there are none.
    """
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: set requires_grad on what is to learn.")
    return found


def decay_groups(
    parameters: Mapping[str, nn.Parameter],
    *,
    weight_decay: float,
    decay: Sequence[str] = (),
    no_decay: Sequence[str] = (),
) -> list[Group]:
    """`parameters` in a group that decays and one that does not; a group without any is left out.

    Matrices decay (two dimensions or more, embeddings included), gains and biases do not, unless their name matches a
    pattern of `decay` or `no_decay`, as the shell has them: "*.bias", "token_embedding.*".

    Raises ValueError for a parameter that both name, a pattern that names none, and a negative `weight_decay`.
    """
    if not weight_decay >= 0:  # torch looks at its own default only, not at a group's
        raise ValueError(f"weight_decay cannot be {weight_decay}: 0 means none, and 0.1 is usual for language models.")
    forced, spared = (_named(parameters, patterns) for patterns in (decay, no_decay))
    for name in forced & spared:
        raise ValueError(f"{name} is named by decay and by no_decay, and can be in one of the two only: take it out.")
    decaying = {name for name, parameter in parameters.items() if parameter.dim() >= 2} - spared | forced
    groups: list[Group] = [
        {"params": [p for name, p in parameters.items() if name in decaying], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decaying], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_groups(module: nn.Module, groups: Iterable[Group]) -> None:
    """Raise ValueError, with its name, for a trainable parameter of `module` that is in no group, or in several."""
    times = Counter(id(parameter) for group in groups for parameter in group["params"])
    for name, parameter in trainable(module).items():
        if times[id(parameter)] != 1:
            raise ValueError(
                f"every trainable parameter must be in exactly one group of the optimizer, and {name} is in "
                f"{times[id(parameter)] or 'none'}: add it to one, or set requires_grad=False on what is not to learn."
            )


def _named(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matching = {name for name in parameters if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(f"{pattern!r} names no trainable parameter: they are called {', '.join(parameters)}.")
        found |= matching
    return found
