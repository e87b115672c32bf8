"""What a module's `training_step` takes and returns."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def of_batch(step: Callable[..., Any]) -> Callable[[Any], Any]:
    """`step`, called with the batch alone: as index 0 goes with it, where Lightning would give one."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    positional = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, _EITHER) for kind in kinds)
    if positional > 1 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return lambda batch: step(batch, 0)
    return step


def loss_and_beside(answer: Any) -> tuple[Any, dict[str, Any]]:
    """The loss that a `training_step` returned, alone or in a mapping, and the rest of that, which Lightning keeps
    until the step has ended."""
    if isinstance(answer, Mapping) and "loss" in answer:
        return answer["loss"], {name: value for name, value in answer.items() if name != "loss"}
    return answer, {}


def describe(loss: Any) -> str:
    """What is no loss, in words."""
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return f"a tensor of shape {list(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}"
