"""One row of the launch table that is looked for: what became of each launch, and which one takes the row's place.

All problems of the row's tile width take part: a launch's time is that of one call of each.
"""

from dataclasses import dataclass, field
from statistics import median

from flash_train.bench.cases import Case
from flash_train.bench.portable import Built
from flash_train.ops.kernels.tables import Launch, Place

STATISTIC = (
    "time: of one call of each problem, the median over the rounds; spread: (slowest round - fastest) / that; a row is "
    "replaced where the fastest launch gains more than the spreads, and 1 % at least"
)
LEAST_GAIN = 0.01


@dataclass(kw_only=True)
class Trial:
    """What became of a launch.

    `status`: ok; slow (far behind after the first round, and not timed again); too large (for registers or shared
    memory) and spills (more than the present launch does), both never started; wrong (`why` says how far) and failed
    (it crashed), both never timed.
    """

    launch: Launch
    status: str = "ok"
    why: str | None = None
    built: Built = Built()
    samples: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    """By problem: of each round, seconds a call."""

    def by_round(self) -> list[float]:
        """Seconds of one call of each problem, by the medians of the rounds that all of them have."""
        rounds = zip(*self.samples.values(), strict=False)
        return [sum(median(samples) for samples in of_problems) for of_problems in rounds]

    @property
    def timed(self) -> bool:
        return self.status in ("ok", "slow") and bool(self.samples)

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return median(self.by_round())

    @property
    def spread(self) -> float:
        """(the slowest round - the fastest) / the median."""
        found = self.by_round()
        return (max(found) - min(found)) / median(found)


@dataclass(kw_only=True)
class Search:
    """The launches that are tried for one row of the table, and on which problems."""

    place: Place
    """Of the row that would be written."""
    direction: str
    dense: bool
    cases: tuple[Case, ...]
    """Those that take longest first."""
    present: Launch | None
    """What runs today: the table's, or the next smaller one that fits."""
    trials: list[Trial]
    left_out: dict[str, str] = field(default_factory=dict)
    """By problem: why it took no part."""

    def leave_out(self, case: Case, why: str) -> None:
        self.left_out[str(case)] = why
        for trial in self.trials:
            trial.samples.pop(str(case), None)

    def trial(self, launch: Launch | None) -> Trial | None:
        return next((trial for trial in self.trials if trial.launch == launch), None)

    @property
    def fastest(self) -> Trial | None:
        return min((x for x in self.trials if x.timed and x.status == "ok"), key=lambda x: x.seconds, default=None)

    @property
    def gain(self) -> float | None:
        """The share of the present launch's time that the fastest one saves, the median over the rounds."""
        fastest, present = self.fastest, self.trial(self.present)
        if fastest is None or present is None or not present.timed:
            return None
        return 1 - median(own / other for own, other in zip(fastest.by_round(), present.by_round(), strict=True))

    @property
    def replacement(self) -> Launch | None:
        """The launch that takes the row's place: what gains more than is uncertain, or whatever is right if the present
        one is not."""
        fastest, present = self.fastest, self.trial(self.present)
        if fastest is None or fastest is present:
            return None
        if present is None or self.gain is None:
            return fastest.launch
        return fastest.launch if self.gain > max(LEAST_GAIN, fastest.spread, present.spread) else None
