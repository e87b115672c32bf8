"""The states of every random generator that training can draw from, as plain values that a checkpoint can hold."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["generator_states", "random_state", "set_generator_states", "set_random_state"]


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators for the CPU and, if it is a GPU, for `device`. No synchronisation."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Undo what was drawn since `generator_states`; a state of a device that is not there is left out."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def random_state(generators: dict[str, Tensor]) -> dict[str, Any]:
    """`generators` with the states of Python's and NumPy's global generators."""
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = numpy_state["state"]
    # An array would not load with weights_only.
    numpy_state["state"] = {"key": inner["key"].tolist(), "pos": inner["pos"]}
    return {"generators": generators, "python": random.getstate(), "numpy": numpy_state}


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back to where `random_state` saw it."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    set_generator_states(state["generators"], device)
