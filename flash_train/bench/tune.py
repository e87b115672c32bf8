"""The search for launches: each candidate compiled, checked against float64, and timed in turns with the present one.

A row of the launch table is for a direction and a tile width. All problems of that width take part in its search: a
launch's time is that of one call of each.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from rich.progress import Progress
from torch import Tensor

from flash_train.bench.candidates import candidates
from flash_train.bench.cases import Case, make_inputs
from flash_train.bench.clock import graph_size, sample, stretch
from flash_train.bench.portable import Built, Job, Kernels, build, failure, in_processes, like
from flash_train.bench.search import Search, Trial
from flash_train.bench.settings import Tuning
from flash_train.bench.truth import Truth
from flash_train.bench.work import Call, captured
from flash_train.ops.choice import interpreting
from flash_train.ops.kernels.launch import architecture, tile_widths
from flash_train.ops.kernels.tables import DENSE, TABLE, Launch, Place, Provenance, Row, Table, lookup, smaller

_FAR_BEHIND = 1.25
"""Times as slow as the fastest in the first round: what is slower is not timed again."""
_WORKER_BYTES = 2**30
"""Of the GPU's memory, for a process that compiles: CUDA itself takes half of it."""
Clock = Callable[[Launch, Call], tuple[float, ...]]
"""Seconds a call, some samples of a round."""
Build = Callable[[Sequence[Job], Callable[[], object]], dict[Job, Built]]
"""What becomes of each job; the function is called as each gets ready."""


def tune(
    settings: Tuning, *, progress: Progress, build: Build | None = None, clock: Clock | None = None
) -> Iterator[list[Search]]:
    """The finished searches, those of one tile width, with or without a bias, at a time."""
    groups = _plan(settings)
    _compile([search for group in groups for search in group], settings, progress, build or _build)
    total = sum(len(search.cases) * len(search.trials) for group in groups for search in group)
    task = progress.add_task("check and time", total=total)
    for group in groups:
        for case in group[0].cases:
            progress.update(task, description=f"check and time: {_name(group[0])}")
            try:
                _contest(case, group, settings, clock or _clock(settings), lambda n: progress.advance(task, n))
            except torch.OutOfMemoryError as error:
                for search in group:
                    search.leave_out(case, failure(error))
        yield group


def tuned(searches: Sequence[Search], provenance: Callable[[Search], Provenance]) -> Table:
    """The table with the rows that the searches replace."""
    found = {x.place: Row(x.replacement, provenance(x)) for x in searches if x.replacement is not None}
    return TABLE | found


def _plan(settings: Tuning) -> list[list[Search]]:
    by_width: dict[int, list[Case]] = {}
    for case in sorted(dict.fromkeys(settings.cases), key=lambda case: case.flops("both"), reverse=True):
        by_width.setdefault(max(tile_widths(case.D, case.E)), []).append(case)
    return [
        [_search(settings, direction, width, cases, dense) for direction in settings.kernels]
        for width, cases in by_width.items()
        for dense in (False, True)
    ]


def _search(settings: Tuning, direction: str, width: int, cases: Sequence[Case], dense: bool) -> Search:
    name, itemsize = architecture(settings.device), settings.dtype.itemsize
    present = lookup(name, direction, itemsize, width, dense=dense)
    if settings.launches is None:
        widest = max((tile_widths(case.D, case.E) for case in cases), key=sum)
        tried = candidates(name, direction, widest, itemsize, shared_bytes=_shared_bytes(settings.device))
    else:
        tried = dict.fromkeys(settings.launches)
    reasons = {present: None} | {launch: why for launch, why in tried.items() if launch != present}
    return Search(
        place=Place(name, itemsize, direction + DENSE if dense else direction, width),
        direction=direction,
        dense=dense,
        cases=tuple(cases),
        present=present,
        trials=[Trial(launch=launch, status="too large" if why else "ok", why=why) for launch, why in reasons.items()],
    )


def _name(search: Search) -> str:
    return f"{search.place.width} columns{' with a bias' if search.dense else ''}"


def _shared_bytes(device: torch.device) -> int:
    """A program's shared memory at most."""
    if device.type == "cpu":
        return 2**30
    from triton.compiler.compiler import max_shared_mem

    return max_shared_mem(device.index)


def _alive(search: Search) -> list[Trial]:
    return [trial for trial in search.trials if trial.status in ("ok", "slow")]


def _compile(searches: Sequence[Search], settings: Tuning, progress: Progress, build: Build) -> None:
    """Compile every launch for every kind of problem; those that do not fit, or spill, get no further."""
    jobs = {(search.place, x.launch): _jobs(search, x.launch, settings) for search in searches for x in _alive(search)}
    different = list(dict.fromkeys(job for some in jobs.values() for job in some))
    progress.console.print(f"{len(different)} launches to compile")
    task = progress.add_task("compile", total=len(different))
    found = build(different, lambda: progress.advance(task))
    for search in searches:
        for trial in _alive(search):
            _note(trial, [found[job] for job in jobs[search.place, trial.launch]])
        present = search.trial(search.present)
        while present is not None and present.status == "too large":  # what runs is the next smaller one
            search.present = smaller(present.launch)
            present = search.trial(search.present)
            if present is None and search.present is not None:
                present = Trial(launch=search.present)
                search.trials.append(present)
                more = _jobs(search, search.present, settings)
                answers = build(more, lambda: None)
                _note(present, [answers[job] for job in more])
        allowed = (present.built.spills if present else None) or 0
        for trial in _alive(search):
            if trial.built.spills is not None and trial.built.spills > allowed:
                trial.status = "spills"
                trial.why = f"{trial.built.spills} numbers of a thread lie in memory, {allowed} of the present launch's"


def _jobs(search: Search, launch: Launch, settings: Tuning) -> list[Job]:
    kinds = dict.fromkeys(like(case) for case in search.cases)
    return [Job(case, settings.dtype, settings.device, search.dense, search.direction, launch) for case in kinds]


def _note(trial: Trial, built: Sequence[Built]) -> None:
    """The most that the launch takes on any kind of problem; it has to fit them all."""
    faulty = next((x for x in built if x.status != "ok"), None)
    if faulty is not None:
        trial.status, trial.why = faulty.status, faulty.why
    known = [x for x in built if x.registers is not None and x.spills is not None and x.shared is not None]
    if known:
        registers, spills, shared = (max(numbers) for numbers in zip(*(x[:3] for x in known), strict=True))
        trial.built = Built(registers, spills, shared)


def _build(jobs: Sequence[Job], ready: Callable[[], object]) -> dict[Job, Built]:
    if interpreting():  # nothing is compiled
        return dict.fromkeys(jobs, Built())
    free = torch.cuda.mem_get_info(jobs[0].device)[0]
    workers = max(1, min(len(os.sched_getaffinity(0)), len(jobs), free // _WORKER_BYTES))
    found = {}
    for job, built in in_processes(build, jobs, workers):
        found[job] = built or Built(status="failed", why="the process that compiled it died")
        ready()
    return found


def _contest(
    case: Case, group: Sequence[Search], settings: Tuning, clock: Clock, done: Callable[[int], object]
) -> None:
    inputs = make_inputs(case, device=settings.device, dtype=settings.dtype, seed=settings.seed)
    bias = _bias(case, settings) if group[0].dense else None
    truth = Truth(case, inputs, bias)
    kernels = Kernels(case, inputs, bias)
    if settings.kernels != ("forward",):
        kernels.run_forward()
    for search in group:
        for trial in _alive(search):
            _check(trial, search.direction, kernels, truth)
        for index in range(settings.rounds):
            for trial in _alive(search)[:: -1 if index % 2 else 1]:
                if index == 0 or trial.status == "ok":
                    call = partial(kernels.start, search.direction, trial.launch)
                    trial.samples.setdefault(str(case), []).append(clock(trial.launch, call))
            if index == 0:
                _leave_behind(search, case)
        done(len(search.trials))


def _leave_behind(search: Search, case: Case) -> None:
    alive = _alive(search)
    firsts = {trial.launch: median(trial.samples[str(case)][0]) for trial in alive}
    for trial in alive:
        behind = firsts[trial.launch] / min(firsts.values())
        if behind > _FAR_BEHIND and trial.launch != search.present and trial.status == "ok":
            trial.status, trial.why = "slow", f"{behind:.2f} times as slow as the fastest in the first round at {case}"


def _bias(case: Case, settings: Tuning) -> Tensor:
    """[H, T, S], normally distributed."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed + 1)
    shape = case.H, case.T, case.S
    return torch.randn(shape, device=settings.device, dtype=settings.dtype, generator=generator)


def _check(trial: Trial, direction: str, kernels: Kernels, truth: Truth) -> None:
    try:
        fault = truth.errors(kernels.results(direction, trial.launch)).fault
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        trial.status, trial.why = "failed", failure(error)
    else:
        if fault is not None:
            trial.status, trial.why = "wrong", fault


def _clock(settings: Tuning) -> Clock:
    def clock(launch: Launch, call: Call) -> tuple[float, ...]:
        each = 1
        if settings.graph:
            each = graph_size(stretch(call, 1, settings.device))
            call, _ = captured(lambda once=call: once, each)
        return sample(call, seconds=settings.seconds, device=settings.device, each=each)

    return clock
