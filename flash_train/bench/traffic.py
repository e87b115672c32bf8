"""Bytes that attention reads from and writes to a GPU's memory, counted by its hardware, beside what they should be."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_train.bench.cases import Case
from flash_train.bench.contestants import OURS
from flash_train.bench.formula import Tiles, hopper_bytes, least_bytes, naive_bytes, triton_bytes
from flash_train.bench.nsight import Kernel, observe, passes, read_kernels
from flash_train.bench.observed import CALL, REST, mark
from flash_train.bench.settings import Contest

STATISTIC = (
    "read: by the kernels of one call that begins with nothing in the cache; written: by them, and after them from the "
    "cache; bytes, of kernels alone (ncu counts no copies and memsets)"
)
_MARK = re.compile(r"traffic\.\d+\.\w+\.\w+\.\w+")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One call. Bytes are None where nothing was counted (`status` and `why` as an `Entry`'s), or no formula is known.

    `formula`: without any cache, `formula.py` says of which kernels; `least`: each tensor once.
    """

    case: Case
    contestant: str
    ran: str | None
    status: str
    why: str | None
    direction: str
    read: int | None
    written: int | None
    formula: int | None
    least: int
    kernels: tuple[str, ...]
    """The names of those that were counted, in their order."""

    @property
    def total(self) -> int | None:
        return None if self.read is None or self.written is None else self.read + self.written


def measure_traffic(contest: Contest, config: Mapping[str, Any], *, ncu: str, log: Path) -> tuple[list[Traffic], int]:
    """Every call of the contest, and in how many passes ncu counted each kernel; its table stays in `log`.

    Raises ValueError and `CommandFailed` as `observe` and `read_kernels`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "flash_train.bench.observed", json.dumps(config), str(report)]
        table = observe(command, ncu=ncu, log=log)
        found = json.loads(report.read_text())
    counted = any(entry["status"] == "ok" for entry in found)
    return list(join(contest, found, read_kernels(table) if counted else [])), passes(table)


def join(contest: Contest, found: Sequence[Mapping[str, Any]], kernels: Sequence[Kernel]) -> Iterator[Traffic]:
    """What became of each contestant (`observed.run`) with the kernels between its marks.

    Raises ValueError where a call that was made has no kernels.
    """
    by_mark: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        for name in _MARK.findall(kernel.ranges):
            by_mark.setdefault(name, []).append(kernel)
    for entry in found:
        case, contestant, ok = contest.cases[entry["case"]], entry["contestant"], entry["status"] == "ok"
        for direction in contest.directions:
            call, rest = (
                by_mark.get(mark(entry["case"], contestant, direction, stretch), []) if ok else []
                for stretch in (CALL, REST)
            )
            if ok and not (call and rest):
                raise ValueError(
                    f"ncu counted no kernel of {contestant}'s {direction} at {case}; its table must name the NVTX "
                    "ranges, as that of Nsight Compute 2025.3 does"
                )
            yield Traffic(
                case=case,
                contestant=contestant,
                ran=entry["ran"],
                status=entry["status"],
                why=entry["why"],
                direction=direction,
                read=sum(kernel.read for kernel in call) if ok else None,
                written=sum(kernel.written for kernel in (*call, *rest)) if ok else None,
                formula=_formula(contest, case, contestant, direction, [kernel.name for kernel in call]),
                least=least_bytes(case, direction, contest.dtype.itemsize),
                kernels=tuple(kernel.name for kernel in call),
            )


def _formula(contest: Contest, case: Case, contestant: str, direction: str, kernels: Sequence[str]) -> int | None:
    """By the kernels that ran; naive's needs none."""
    itemsize = contest.dtype.itemsize
    if contestant == "naive":
        return naive_bytes(case, direction, itemsize)
    if contestant not in OURS:
        return None
    names = " ".join(kernels)
    if re.search(rf"\bhopper_(wide_)?{direction}_kernel\b", names):
        return hopper_bytes(case, direction, itemsize, _hopper_tiles(case, direction))
    if {"forward": "forward_kernel", "backward": "dkdv_kernel"}[direction] in names:
        return triton_bytes(case, direction, itemsize, _triton_tiles(contest, case))
    return None


def _triton_tiles(contest: Contest, case: Case) -> dict[str, Tiles]:
    from flash_train.ops.kernels.launch import architecture, tile_widths
    from flash_train.ops.kernels.tables import DIRECTIONS, lookup

    name, width = architecture(contest.device), max(tile_widths(case.D, case.E))
    rows = {direction: lookup(name, direction, contest.dtype.itemsize, width) for direction in DIRECTIONS}
    return {direction: Tiles(row.block_t, row.block_s) for direction, row in rows.items()}


def _hopper_tiles(case: Case, direction: str) -> Tiles:
    from flash_train.ops.kernels.hopper.tables import BACKWARD, FORWARD, tile_width

    width = tile_width(max(case.D, case.E))
    if direction == "forward":
        return Tiles(64 * FORWARD[width].consumers, FORWARD[width].block_s)
    return Tiles(BACKWARD[width].block_t, BACKWARD[width].block_s)
