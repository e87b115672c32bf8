"""Bytes as people write and read them. Nothing here needs torch."""

import re
from typing import Any

_PARSED = {"B": 1} | {
    f"{prefix}{letter}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for letter, base in (("", 1000), ("i", 1024))
}
_WRITTEN = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(size: Any, *, name: str = "budget") -> int:
    """Bytes of "24GiB", "80 GB", "512MiB", or of a number of bytes from a million on. Raises ValueError for another,
    which is called `name` there."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 10**6:  # 24 means 24GiB, and does not say so
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", size) if isinstance(size, str) else None
    if match is None or match[2] not in _PARSED or float(match[1]) == 0:
        way = "below a million give the unit" if isinstance(size, int) else f"the unit is one of {', '.join(_PARSED)}"
        raise ValueError(f"{name} must be a size such as 24GiB, 80GB or a number of bytes, got {size!r}: {way}")
    return int(float(match[1]) * _PARSED[match[2]])


def human_bytes(number: float, *, digits: int = 3) -> str:
    """`number` bytes in the largest unit of which there is at least one: 1.21 GiB, or 1 GiB with `digits=0`."""
    size, unit = float(number), 0
    while abs(size) >= 1024 and unit < len(_WRITTEN) - 1:
        size, unit = size / 1024, unit + 1
    decimals = max(0, digits - len(str(int(abs(size))))) if unit else 0
    return f"{size:.{decimals}f} {_WRITTEN[unit]}"


def error_percent(predicted: float, measured: float) -> float:
    """How far a prediction is off, in per cent of what was measured: above 0 where it is too high."""
    return 100 * (predicted - measured) / measured


def human_error(percent: float) -> str:
    """An error in per cent, with its sign: -0.02 %."""
    return f"{percent:+.2f} %"
