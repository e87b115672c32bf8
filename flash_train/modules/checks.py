"""The two checks that every constructor here makes of its arguments."""

from collections.abc import Sequence


def check_positive(name: str, value: int) -> None:
    """Raise a ``ValueError`` unless ``value`` is a positive integer."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}: give a whole number from 1 up")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ``ValueError`` that lists ``choices`` unless ``value`` is one of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one of these")
