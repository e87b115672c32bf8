"""The checks that the constructors here make of their arguments."""

import math
from collections.abc import Sequence


def check_positive(name: str, value: int) -> None:
    """Raise a ``ValueError`` unless ``value`` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}: give a whole number from 1 up")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ``ValueError`` that lists ``choices`` unless ``value`` is one of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one of these")


def check_dropout(name: str, value: float) -> None:
    """Raise a ``ValueError`` unless ``value`` is a probability below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}: 0 drops nothing")


def check_above_zero(name: str, value: float) -> None:
    """Raise a ``ValueError`` unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}: leave it out for the usual one")
