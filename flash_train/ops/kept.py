"""What was found out once and is asked for again, in dictionaries that do not grow without end."""

from typing import Any

LARGEST_NUMBER = 1024


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Put `value` into `kept`; where that is full, everything else is forgotten."""
    if len(kept) >= LARGEST_NUMBER:
        kept.clear()
    kept[key] = value
