"""Launch choices as data: `launch_table.json`, a list of groups of rows, each with where it comes from.

    {"architecture": "sm_90", "bytes": 2, "provenance": {...}, "rows": {"forward": {"64": {"block_t": 64, ...}}}}

`bytes` are those of an element; below a direction come tile widths (the wider of D and E, padded to a power of two),
below a width the four numbers of a `Launch`. A direction that ends in "_dense" is for calls with a bias or boolean
mask, whose tiles take shared memory from the stages. `flash-bench tune=true` times launches and writes such a file. The
rows of a file that the environment variable FLASH_TRAIN_LAUNCH_TABLE names go before the package's own; it is read
when kernels are first imported.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("launch_table.json")
VARIABLE = "FLASH_TRAIN_LAUNCH_TABLE"


@dataclass(frozen=True)
class Launch:
    block_t: int
    """Rows of a query tile."""
    block_s: int
    """Rows of a key tile."""
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where rows come from. None: not known, or there was none."""

    how: str
    device: str | None = None
    torch: str | None = None
    triton: str | None = None
    date: str | None = None
    command: str | None = None


class Place(NamedTuple):
    """Where a row stands in the table."""

    architecture: str
    itemsize: int
    """Bytes of an element."""
    direction: str
    width: int

    def __str__(self) -> str:
        return f"{self.direction} {self.width} of {self.architecture}, {self.itemsize} bytes"


class Row(NamedTuple):
    launch: Launch
    provenance: Provenance


Table = dict[Place, Row]
DIRECTIONS = ("forward", "dkdv", "dq")
"""dkdv: a tile of keys stays while queries pass by; dq: a tile of queries stays while keys pass by."""
WIDTHS = (16, 32, 64, 128, 256)
DENSE = "_dense"
_ALLOWED = {"block_t": WIDTHS, "block_s": WIDTHS, "warps": (1, 2, 4, 8, 16), "stages": tuple(range(1, 9))}
_NUMBERS = ", ".join(_ALLOWED)
_ORIGINS = tuple(field.name for field in fields(Provenance))
_WAY_OUT = "flash-bench tune=true writes files that are right"


def check_launch(key: str, given: Mapping[str, Any]) -> Launch:
    """The launch with these numbers. Raises ValueError that names `key`, the rule and the value."""
    if set(given) != set(_ALLOWED):
        raise ValueError(f"{key} must give {_NUMBERS}, got {dict(given)}")
    for name, allowed in _ALLOWED.items():
        number = given[name]
        if not isinstance(number, int) or isinstance(number, bool) or number not in allowed:
            raise ValueError(f"{key}: {name} must be one of {', '.join(map(str, allowed))}, got {number!r}")
    return Launch(**given)


def read_table(file: Path) -> Table:
    """The rows of a file. Raises ValueError, in one sentence, for what is no launch table."""
    try:
        groups = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"the launch table {file} cannot be read: {error.strerror}; unset {VARIABLE}") from error
    except ValueError as error:
        raise ValueError(f"the launch table {file} must be JSON, and is not: {error}; {_WAY_OUT}") from error
    try:
        return _rows(groups)
    except ValueError as error:
        raise ValueError(f"the launch table {file}: {error}; {_WAY_OUT}") from error


def _rows(groups: object) -> Table:
    keys = ["architecture", "bytes", "provenance", "rows"]
    if not isinstance(groups, list):
        raise ValueError(f"it must be a list of groups of rows, got {type(groups).__name__}")
    table: Table = {}
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or sorted(group) != keys:
            raise ValueError(f"group {index} must give {', '.join(keys)}, got {group!r}")
        architecture, itemsize = group["architecture"], group["bytes"]
        if not isinstance(architecture, str) or itemsize not in (2, 4):
            raise ValueError(
                f"group {index} must have a name for architecture, and 2 or 4 bytes, got {architecture!r} and "
                f"{itemsize!r}"
            )
        provenance = _provenance(f"group {index}", group["provenance"])
        for direction, of_width in _entries(f"group {index}: rows", group["rows"], _directions()):
            for width, numbers in _entries(f"group {index}: {direction}", of_width, tuple(map(str, WIDTHS))):
                place = Place(architecture, itemsize, direction, int(width))
                if place in table:
                    raise ValueError(f"{place} stands there twice")
                if not isinstance(numbers, dict):
                    raise ValueError(f"{place} must give {_NUMBERS}, got {numbers!r}")
                table[place] = Row(check_launch(str(place), numbers), provenance)
    return table


def _directions() -> tuple[str, ...]:
    return (*DIRECTIONS, *(direction + DENSE for direction in DIRECTIONS))


def _provenance(key: str, given: object) -> Provenance:
    texts = isinstance(given, dict) and all(isinstance(text, str) for text in given.values())
    if not isinstance(given, dict) or not texts or "how" not in given or not set(given) <= set(_ORIGINS):
        others = ", ".join(_ORIGINS[1:])
        raise ValueError(f"{key}: provenance must be texts for how and for some of {others}, got {given!r}")
    return Provenance(**given)


def _entries(key: str, given: object, names: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{key} must be for some of {', '.join(names)}, got {given!r}")
    for name in given:
        if name not in names:
            raise ValueError(f"{key} must be for some of {', '.join(names)}, got {name!r}")
    return given.items()


def write_table(file: Path, table: Table) -> None:
    """Write what `read_table` reads, a row a line."""
    groups: dict[tuple[str, int, Provenance], dict[str, dict[str, dict[str, int]]]] = {}
    for place, row in table.items():
        rows = groups.setdefault((place.architecture, place.itemsize, row.provenance), {})
        rows.setdefault(place.direction, {})[str(place.width)] = asdict(row.launch)
    text = json.dumps(
        [
            {
                "architecture": architecture,
                "bytes": itemsize,
                "provenance": {name: text for name, text in asdict(provenance).items() if text is not None},
                "rows": rows,
            }
            for (architecture, itemsize, provenance), rows in groups.items()
        ],
        indent=2,
    )
    one_line = re.sub(r'\{\s*("block_t"[^}]*?)\s*\}', lambda found: "{" + re.sub(r"\s+", " ", found[1]) + "}", text)
    file.write_text(one_line + "\n")


def load() -> Table:
    """The package's rows, those of the user's own file before them."""
    own = os.environ.get(VARIABLE)
    return read_table(FILE) | (read_table(Path(own)) if own else {})


TABLE = load()


def lookup(architecture: str, direction: str, itemsize: int, width: int, *, dense: bool = False) -> Launch:
    """The row for tiles of `width` columns, or for the next wider ones that there is a row for.

    `dense`: with a bias or boolean mask; the row without is taken where there is none of its own.
    """
    for size in WIDTHS:
        for name in (direction + DENSE, direction) if dense else (direction,):
            row = TABLE.get(Place(architecture, itemsize, name, size))
            if row is not None and size >= width:
                return row.launch
    raise KeyError(Place(architecture, itemsize, direction, width))


def smaller(launch: Launch) -> Launch | None:
    """The next launch that takes less shared memory: fewer stages, then fewer keys, then fewer queries a tile."""
    if launch.stages > 1:
        return replace(launch, stages=launch.stages - 1)
    if launch.block_s > 16:
        return replace(launch, block_s=launch.block_s // 2)
    return replace(launch, block_t=launch.block_t // 2) if launch.block_t > 16 else None
