"""Changes of a training step, alone and together, by what the step needs then."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from flash_train.memory.attribution import Breakdown

ALLOWANCE = 0.04
"""Of the peak again, for what fragmentation wastes, must be there if something is to fit."""
WORTH = 0.01
"""Of the peak: what saves less is no advice."""
RE_RUN, MODELLED, COUNTERS = "re-run", "modelled", "counters"
"""What a prediction rests on: the fake step taken again with the change; the recorded step with the blocks replaced
that the change replaces; the allocator's counters."""


@dataclass(frozen=True)
class Advice:
    """One change. All sizes in bytes."""

    change: str
    how: str
    """Where to make it."""
    saves: int
    """Of the step's peak; where memory ran out in the optimizer's step, of the peak of that."""
    peak: int
    """What is left of it."""
    fits: bool | None
    """Whether the step's peak is within the limit then, with 4 % for fragmentation; None without a limit."""
    basis: str
    """ "re-run", "modelled", both with a "+" between them, or "counters"."""
    then: str = ""
    """What most of the peak would be then."""


@dataclass(frozen=True)
class Setup:
    """A way to take the step."""

    precision: str = ""
    accumulate: int = 1
    rows: int | None = None
    checkpointed: bool = False
    fused: bool = False
    flash: bool = False
    chunked: bool = False


@dataclass(frozen=True)
class Lever:
    change: str
    how: str
    cost: int
    """0: none; 1: time; 2: other numbers."""
    basis: str
    apply: Callable[[Setup], Setup]


@dataclass(frozen=True)
class Outcome:
    phases: dict[str, int]
    """Each one's peak."""
    then: str

    @property
    def peak(self) -> int:
        return max(self.phases.values())


class Search:
    """`record` takes the step in a given way, without flash and chunks, which are modelled on what it gives.

    What takes nothing off `phase`'s own peak is no advice.
    """

    def __init__(
        self, record: Callable[[Setup], Breakdown], base: Setup, *, limit: int | None, phase: str | None,
        seconds: float,
    ) -> None:  # fmt: skip
        self.base, self._record, self._limit, self._phase = base, record, limit, phase
        self._ends = time.monotonic() + seconds
        self._known: dict[Setup, Breakdown] = {}
        self.left_out: list[str] = []
        self.breakdown = self._recorded(base)
        self.now = self.outcome(base)

    def _recorded(self, setup: Setup) -> Breakdown:
        setup = replace(setup, flash=False, chunked=False)
        if setup not in self._known:
            if self._known and time.monotonic() > self._ends:
                raise TimeoutError("there was no time left")
            self._known[setup] = self._record(setup)
        return self._known[setup]

    def outcome(self, setup: Setup) -> Outcome:
        """What the step would need."""
        recorded = self._recorded(setup)
        phases = {name: phase.measured for name, phase in recorded.phases.items()}
        if not setup.flash and not setup.chunked:
            return Outcome(phases, next(iter(recorded.peak.culprits), ""))
        assert recorded.trace is not None
        saving = recorded.trace.saving(flash=setup.flash, chunked=setup.chunked)
        return Outcome({name: size - saving.phases[name] for name, size in phases.items()}, saving.then)

    def fits(self, peak: int) -> bool | None:
        return None if self._limit is None else peak * (1 + ALLOWANCE) <= self._limit

    def advice(self, levers: Iterable[Lever]) -> tuple[Advice, ...]:
        found: list[tuple[Lever, Advice]] = []
        for lever in levers:
            try:
                advice, helps = self._judge([lever])
            except Exception as error:  # whatever a foreign module does when it is changed
                self.left_out.append(f"{lever.change}: {next(iter(str(error).splitlines()), repr(error))}")
                continue
            if helps:
                found.append((lever, advice))
        found.sort(key=lambda pair: (pair[0].cost if pair[1].fits else 3, -pair[1].saves))
        return tuple(self._together([lever for lever, _ in found]) + [advice for _, advice in found])

    def _judge(self, levers: list[Lever]) -> tuple[Advice, bool]:
        """And whether it is worth saying."""
        setup = self.base
        for lever in levers:
            setup = lever.apply(setup)
        outcome = self.outcome(setup)
        now, peak = self._relevant(self.now), self._relevant(outcome)
        own = now - peak if self._phase is None else self.now.phases[self._phase] - outcome.phases[self._phase]
        advice = Advice(
            change=" + ".join(lever.change for lever in levers),
            how="; ".join(lever.how for lever in levers),
            saves=now - peak,
            peak=peak,
            fits=self.fits(outcome.peak),
            basis=" + ".join(dict.fromkeys(lever.basis for lever in levers)),
            then=outcome.then,
        )
        return advice, min(now - peak, own) >= WORTH * now

    def _relevant(self, outcome: Outcome) -> int:
        return outcome.phases["optimizer"] if self._phase == "optimizer" else outcome.peak

    def _together(self, levers: list[Lever]) -> list[Advice]:
        """The fewest and cheapest that fit together, where one that fits alone costs more, or none does; all of them,
        if not even those do."""
        try:
            if self._limit is None:
                return []
            cost = min((lever.cost for lever in levers if self._judge([lever])[0].fits), default=3)
            cheaper = sorted((lever for lever in levers if lever.cost < cost), key=lambda lever: lever.cost)
            if len(cheaper) < 2:
                return []
            chosen: list[Lever] = []
            for lever in cheaper:
                chosen.append(lever)
                if self._judge(chosen)[0].fits:
                    break
            for lever in chosen[-2::-1]:
                fewer = [other for other in chosen if other is not lever]
                if self._judge(fewer)[0].fits:
                    chosen = fewer
            advice, _ = self._judge(chosen)
            return [advice] if advice.fits or cost == 3 else []
        except Exception as error:
            self.left_out.append(f"several changes together: {error}")
            return []
