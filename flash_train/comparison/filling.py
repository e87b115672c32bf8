"""What fills each arm's memory, at one length: by category and phase, by module, and what would change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flash_train.chart_style import UNTRACKED
from flash_train.comparison.results import Row
from flash_train.comparison.text import human_bytes

_MODULES = 12


class Phase(NamedTuple):
    """A phase's peak. `categories` and `modules` each add up to what was tracked, in bytes."""

    measured: int
    categories: Mapping[str, int]
    modules: Mapping[str, int]
    culprits: Mapping[str, int]

    @property
    def untracked(self) -> int:
        """What the allocator measured, and no tensor explains."""
        return self.measured - sum(self.categories.values())


@dataclass(frozen=True)
class Filling:
    """An arm's: the step as a MemoryProbe saw it, or as it was predicted, beside the allocator's peak of each phase."""

    arm: str
    length: int
    probed: bool
    status: str
    phases: Mapping[str, Phase]
    advice: Sequence[Mapping[str, Any]]

    @property
    def phase(self) -> str:
        """The one that has the peak."""
        return max(self.phases, key=lambda name: self.phases[name].measured)

    @property
    def peak(self) -> Phase:
        return self.phases[self.phase]

    @property
    def title(self) -> str:
        return self.arm if self.status == "ok" else f"{self.arm} (predicted)"


def fillings(rows: Sequence[Row]) -> list[Filling]:
    """One for each arm at the longest length that one of them trained at; an arm that ran out of memory there is
    shown as it was predicted. Empty where no step was probed or predicted."""
    known = [row for row in rows if row.measured and row.breakdown and row.status in ("ok", "oom")]
    length = max((row.length for row in known if row.status == "ok"), default=None)
    first: dict[str, Row] = {}
    for row in known:
        if row.length == length:
            first.setdefault(row.arm, row)
    return [_filling(row) for row in first.values()]


def _filling(row: Row) -> Filling:
    assert row.breakdown is not None
    probed = row.breakdown["source"] != "prediction"
    measured = {
        "forward": row.forward_peak_allocated_bytes,
        "backward": row.backward_peak_allocated_bytes,
        "optimizer": row.optimizer_peak_allocated_bytes,
    }
    phases = {
        name: Phase(
            phase["measured"] if probed or row.status != "ok" else measured.get(name) or phase["measured"],
            phase["categories"],
            phase["modules"],
            phase["culprits"],
        )
        for name, phase in row.breakdown["phases"].items()
    }
    return Filling(row.arm, row.length, probed, row.status, phases, row.advice)


def by_category(found: Sequence[Filling]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table: what the peak of each arm is made of."""
    names = [name for name in dict.fromkeys(n for one in found for n in one.peak.categories)
             if any(one.peak.categories.get(name) for one in found)]  # fmt: skip
    lines = [["the peak is in the", *(one.phase for one in found)]]
    lines += [[name, *(_share(one.peak.categories.get(name, 0), one.peak) for one in found)] for name in names]
    lines.append([UNTRACKED, *(_share(one.peak.untracked, one.peak) for one in found)])
    lines.append(["peak", *(human_bytes(one.peak.measured) for one in found)])
    return ["", *(one.title for one in found)], lines


def by_module(found: Sequence[Filling]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table: the modules that hold most of any arm's peak, and the others together."""
    most: dict[str, int] = {}
    for one in found:
        for name, size in one.peak.modules.items():
            most[name] = max(most.get(name, 0), size)
    names = sorted(most, key=lambda name: -most[name])
    lines = [[name, *(human_bytes(one.peak.modules.get(name, 0)) for one in found)] for name in names[:_MODULES]]
    if rest := names[_MODULES:]:
        sums = (sum(one.peak.modules.get(name, 0) for name in rest) for one in found)
        lines.append([f"{len(rest)} more", *map(human_bytes, sums)])
    return ["module", *(one.title for one in found)], lines


def advice(found: Sequence[Filling]) -> list[str]:
    """One sentence an arm: what most of its peak is, and what would take most off it."""
    told = []
    for one in found:
        name, size = next(iter(one.peak.culprits.items()), ("nothing", 0))
        sentence = f"Most of {one.arm}'s peak at T={one.length} is {name} ({size / max(1, one.peak.measured):.0%})"
        if one.advice:
            best = one.advice[0]
            fits = {True: ", which fits", False: ", which does not fit", None: ""}[best["fits"]]
            sentence += (
                f"; {best['change']} would save {human_bytes(best['saves'])} of it, and leave "
                f"{human_bytes(best['peak'])}{fits} ({best['basis']})"
            )
        told.append(f"{sentence}.")
    return told


def _share(size: int, phase: Phase) -> str:
    return f"{human_bytes(size)} {100 * size / max(1, phase.measured):3.0f} %"
