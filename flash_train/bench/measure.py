"""Each contestant checked against float64, then all of them timed in turns, on one problem."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from flash_train.bench.cases import Case, Inputs, make_inputs
from flash_train.bench.clock import graph_size, peak_bytes, sample, stretch
from flash_train.bench.contestants import CONTESTANTS, Unavailable
from flash_train.bench.settings import Contest, Settings
from flash_train.bench.truth import Errors, Truth
from flash_train.bench.work import Call, Work, captured, compiled


@dataclass(kw_only=True)
class Entry:
    """What became of a contestant on one problem.

    `status`: ok; wrong (its answer is, `why` says how far, and it was not timed); refused (not installed, or it does
    not take the problem); oom; failed (it crashed).
    """

    case: Case
    contestant: str
    ran: str | None = None
    status: str = "ok"
    why: str | None = None
    errors: Errors | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """By direction."""
    rounds: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    """By direction: of each round the samples, seconds a call."""

    def by_round(self, direction: str) -> list[float]:
        """Seconds a call, the median of each round's samples."""
        return [median(samples) for samples in self.rounds[direction]]

    def seconds(self, direction: str) -> float:
        """The median of the rounds."""
        return median(self.by_round(direction))

    def spread(self, direction: str) -> float:
        """(the slowest round - the fastest) / the median."""
        found = self.by_round(direction)
        return (max(found) - min(found)) / median(found)

    def flops_per_second(self, direction: str) -> float:
        return self.case.flops(direction) / self.seconds(direction)

    def times_as_slow(self, reference: "Entry", direction: str) -> float:
        """The median over the rounds of this one's time over that of `reference`."""
        pairs = zip(self.by_round(direction), reference.by_round(direction), strict=True)
        return median(own / other for own, other in pairs)


def measure(case: Case, settings: Settings) -> list[Entry]:
    """One entry for each contestant, in their order. Rounds visit them in turns, every second round backwards."""
    with admitted(case, settings, graph=settings.graph) as (entries, works):
        for index in range(settings.rounds):
            for entry in entries[:: -1 if index % 2 else 1]:
                if entry.status == "ok":
                    with noted(entry):
                        _time(entry, works[entry.contestant], settings)
    return entries


@contextmanager
def admitted(case: Case, contest: Contest, *, graph: bool = False) -> Iterator[tuple[list[Entry], dict[str, Work]]]:
    """One entry for each contestant, in their order, and by name the work of those that take the problem and whose
    answers are right. Whatever is compiled has been, and every call been made, before the body of `with` runs.

    `graph`: their answers are those that the replay of a CUDA graph leaves.
    """
    torch.compiler.reset()  # what was compiled for other shapes counts as a recompilation
    with (
        dynamo_config.patch(fail_on_recompile_limit_hit=True),  # else it would go on eagerly, with a warning alone
        functorch_config.patch(donated_buffer=False),  # else a compiled backward can run only once
    ):
        inputs = make_inputs(case, device=contest.device, dtype=contest.dtype, seed=contest.seed)
        truth = Truth(case, inputs)
        entries = [Entry(case=case, contestant=name) for name in contest.contestants]
        works = {e.contestant: work for e in entries if (work := _admit(e, inputs, truth, contest, graph=graph))}
        yield entries, works


def _admit(entry: Entry, inputs: Inputs, truth: Truth, contest: Contest, *, graph: bool) -> Work | None:
    """The contestant's work, if it takes the problem and its answer is right; else the entry says why not."""
    with noted(entry):
        contestant = CONTESTANTS[entry.contestant](entry.case, inputs)
        entry.ran = contestant.ran
        if contest.compile_mode is not None:
            contestant = compiled(contestant, contest.compile_mode)
        work = Work(contestant, entry.case, inputs, gradients=contest.directions != ("forward",))
        rewritten = _rewritten()
        results = work.results(graph=graph)
        if entry.contestant == "naive" and _rewritten() > rewritten:
            raise Unavailable("the compiler replaced it by scaled_dot_product_attention")
        entry.errors = truth.errors(results)
        for x in results.values():
            x.fill_(float("nan"))  # where the next contestant's results will lie: what it leaves unwritten shows
        if entry.errors.fault is not None:
            entry.status, entry.why = "wrong", entry.errors.fault
            return None
        for direction in contest.directions:
            entry.peak_bytes[direction] = peak_bytes(lambda d=direction: work.call(d), contest.device)
        return work
    return None


def _time(entry: Entry, work: Work, settings: Settings) -> None:
    found = {}
    for direction in settings.directions:
        call: Call = work.call(direction)
        each = 1
        if settings.graph:
            call()
            each = graph_size(stretch(call, 1, settings.device))
            call, _ = captured(lambda d=direction: work.call(d), each)
        found[direction] = sample(call, seconds=settings.seconds, device=settings.device, each=each)
    for direction, samples in found.items():
        entry.rounds.setdefault(direction, []).append(samples)


def _rewritten() -> int:
    return counters["inductor"]["fuse_attention"]


@contextmanager
def noted(entry: Entry) -> Iterator[None]:
    """An exception becomes the entry's status: one contestant's failure is no end of the others' contest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries that are not ours, about choices that are not theirs
            yield
    except (Unavailable, ValueError, NotImplementedError) as error:
        entry.status, entry.why = "refused", _one_line(error)
    except torch.OutOfMemoryError as error:
        entry.status, entry.why = "oom", _one_line(error)
    except Exception as error:
        entry.status, entry.why = "failed", f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
