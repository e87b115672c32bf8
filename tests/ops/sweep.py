"""The sweep over combinations of everything that the op takes, against float64: `python -m tests.ops.sweep --help`.

A case is named by size, seed and number, and `--case NAME` runs it alone. Where the Triton kernels run, the launchers'
memory is NaN before they write and must be untouched around each allocation, and a first pass over all cases, in as
many processes as there are cores, does nothing but compile.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.ops.choice import HOPPER, interpreting
from tests.ops.cases import Inputs, inputs
from tests.ops.errors import check, results
from tests.ops.sweep_cases import SIZES, TOGETHER, generate, names

SILENCE_SECONDS = 180
"""After which processes that say nothing are taken for hung."""
DEFAULT_PROCESSES = max(1, (os.cpu_count() or 1) - 2)
_GPU_LOST = 77
"""The exit code of a process that has said what happened, and cannot use its GPU any more."""
_GUARD = 512
_BYTE = 0xFF  # of a NaN in every floating dtype, though not the one that a GPU makes


class Memory:
    """Stands in for the launchers' `empty`: NaN in the midst of more NaN, and remembered."""

    def __init__(self) -> None:
        self.allocations: list[tuple[Tensor, int]] = []

    def empty(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or like.dtype
        size = math.prod(shape) * dtype.itemsize
        buffer = torch.full((size + 2 * _GUARD,), _BYTE, dtype=torch.uint8, device=like.device)
        self.allocations.append((buffer, size))
        return buffer[_GUARD : _GUARD + size].view(dtype).view(shape)

    def touched_outside(self) -> bool:
        """Whether anything was written around the allocations, which are forgotten."""
        around = [part for x, size in self.allocations for part in (x[:_GUARD], x[_GUARD + size :])]
        self.allocations = []
        return bool(around) and bool((torch.stack(around) != _BYTE).any())


def runs_kernels(implementation: str, device: str) -> bool:
    return implementation == "triton" or (implementation == "flash" and device != "cpu")


@contextlib.contextmanager
def poisoned_memory(implementation: str, device: str) -> Iterator[Memory]:
    """The kernels' launchers allocate from a `Memory` inside; the other implementations are left alone."""
    memory, modules = Memory(), []
    if runs_kernels(implementation, device):
        from flash_train.ops.kernels import backward, forward, launch  # noqa: F401

        if device != "cpu" and torch.cuda.get_device_capability() == HOPPER:
            from flash_train.ops.kernels.hopper import derivative  # noqa: F401
            from flash_train.ops.kernels.hopper import forward as hopper_forward  # noqa: F401

        prefix = "flash_train.ops.kernels."
        modules = [x for name, x in sys.modules.items() if name.startswith(prefix) and hasattr(x, "empty")]
    before = [module.empty for module in modules]
    try:
        for module in modules:
            vars(module)["empty"] = memory.empty
        yield memory
    finally:
        for module, function in zip(modules, before, strict=True):
            vars(module)["empty"] = function


def storages(x: Inputs) -> list[Tensor]:
    """Copies of all bytes in which the case's tensors lie, those around them included."""
    tensors = [y for y in x if isinstance(y, Tensor)]
    return [y.new_empty(0, dtype=torch.uint8).set_(y.untyped_storage()).clone() for y in tensors]


def run_case(name: str, device: str, implementation: str) -> float:
    """The largest error as a share of what is allowed; an AssertionError for what is wrong."""
    case, dtype, seed = generate(name)
    x = inputs(case, dtype, device, seed)
    truncates = device == "cpu" and implementation == "triton" and dtype == torch.bfloat16  # the interpreter's cast
    before = storages(x)
    with poisoned_memory(implementation, device) as memory:
        shares = check(x, implementation=implementation, budget=4.0 if truncates else 2.0)
        assert not memory.touched_outside(), "memory outside an output was written"
        assert all(map(torch.equal, storages(x), before)), "an input, or memory around it, was written"
        if case.deterministic:
            first, second = (results(x, implementation=implementation) for _ in range(2))
            for key, y in first.items():
                assert torch.equal(y, second[key]), f"{key}: other bits in a second run, although deterministic"
    return max(shares.values())


def compile_case(name: str, device: str, implementation: str) -> float:
    """Launches each kernel of the case once."""
    case, dtype, seed = generate(name)
    results(inputs(case, dtype, device, seed), implementation=implementation)
    if device != "cpu":
        torch.cuda.synchronize()
    return 0.0


class Outcome(NamedTuple):
    name: str
    seconds: float
    share: float
    error: str | None


Task = Callable[[str, str, str], float]


def attempt(task: Task, name: str, device: str, implementation: str) -> Outcome:
    begin = time.perf_counter()
    try:
        share, error = task(name, device, implementation), None
    except Exception as failure:  # whatever it is, it belongs into the report
        share, error = math.nan, f"{type(failure).__name__}: {failure}"
    return Outcome(name, time.perf_counter() - begin, share, error)


def _serve(pipe: Connection, task: Task, device: str, implementation: str) -> None:
    """A process: says None when it is ready, takes names, answers with their outcomes; None sends it home."""
    torch.set_num_threads(1)
    pipe.send(None)
    while (block := pipe.recv()) is not None:
        for name in block:
            outcome = attempt(task, name, device, implementation)
            pipe.send(outcome)
            if outcome.error is not None and _gpu_is_lost(device):
                sys.exit(_GPU_LOST)
        pipe.send(None)


def _gpu_is_lost(device: str) -> bool:
    """Whether an earlier fault, such as a read outside the memory, makes every further call of this process fail."""
    try:
        if device != "cpu":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Processes:
    """Runs a task on blocks of names; a process that dies or hangs costs one case, and another takes its place."""

    def __init__(self, task: Task, blocks: list[list[str]], device: str, implementation: str) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._args = task, device, implementation
        self._waiting = list(blocks)
        self._at_work: dict[Connection, tuple[BaseProcess, list[str] | None]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def run(self, count: int) -> dict[str, Outcome]:
        for _ in range(min(count, len(self._waiting))):
            self._hire()
        while self._at_work:
            heard = wait(list(self._at_work), timeout=SILENCE_SECONDS)
            for pipe in heard:
                assert isinstance(pipe, Connection)
                self._hear(pipe)
            if not heard:
                for process, _ in self._at_work.values():
                    process.kill()
        return self.outcomes

    def _hire(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, *self._args), daemon=True)
        process.start()
        there.close()  # so that its end is heard here
        self._at_work[here] = process, None

    def _hear(self, pipe: Connection) -> None:
        process, block = self._at_work[pipe]
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._bury(pipe)
        if message is not None:
            self.outcomes[message.name] = message
            assert block is not None
            block.remove(message.name)
        elif self._waiting:
            block = self._waiting.pop(0)
            self._at_work[pipe] = process, list(block)
            pipe.send(block)
        else:
            pipe.send(None)
            del self._at_work[pipe]
            process.join()

    def _bury(self, pipe: Connection) -> None:
        process, block = self._at_work.pop(pipe)
        process.join()
        if block is None:
            raise RuntimeError(f"a process could not start (exit code {process.exitcode}); its own words stand above")
        if process.exitcode != _GPU_LOST and block:  # it had no time to say what happened
            name = block.pop(0)
            self.outcomes[name] = Outcome(name, 0.0, math.nan, f"the process died, exit code {process.exitcode}")
        if block:
            self._waiting.insert(0, block)
        if self._waiting:
            self._hire()


def sweep(chosen: list[str], device: str, implementation: str, processes: int) -> list[Outcome]:
    """Compiles, runs, prints how long each took; the outcomes, one a case."""
    failed: dict[str, Outcome] = {}
    passes: list[tuple[str, Task]] = [("compiled", compile_case), ("run", run_case)]
    outcomes: dict[str, Outcome] = {}
    for verb, task in passes[0 if runs_kernels(implementation, device) and device != "cpu" else 1 :]:
        left = [name for name in chosen if name not in failed]
        blocks = [left[start : start + TOGETHER] for start in range(0, len(left), TOGETHER)]
        begin = time.perf_counter()
        if processes == 0:
            outcomes = {name: attempt(task, name, device, implementation) for name in left}
        else:
            outcomes = Processes(task, blocks, device, implementation).run(processes)
        wall, work = time.perf_counter() - begin, sum(x.seconds for x in outcomes.values())
        print(
            f"{len(left)} cases {verb} in {wall:.1f} s by {max(1, processes)} processes ({work:.1f} s of work)",
            flush=True,
        )
        failed |= {name: x for name, x in outcomes.items() if x.error is not None}
    return list((outcomes | failed).values())


def report(outcomes: list[Outcome]) -> int:
    """Prints what failed, and how much of the budget the others used; the exit status."""
    failed = [x for x in outcomes if x.error is not None]
    for x in failed:
        case, dtype, _ = generate(x.name)
        print(f"FAILED {x.name}: {x.error}\n    {dtype}, {case}")
    passed = sorted((x for x in outcomes if x.error is None), key=lambda x: x.share)
    if passed:
        print(f"the largest error is {passed[-1].share:.2f} of what is allowed ({passed[-1].name}), ", end="")
        print(f"the median {passed[len(passed) // 2].share:.2f}")
    print(f"{len(outcomes)} cases, {len(failed)} failed")
    return 1 if failed else 0


def start_in_the_interpreter() -> None:
    """Triton reads the variable when it is imported, and torch may have done that: the command begins anew."""
    if not interpreting():
        os.execve(sys.executable, sys.orig_argv, os.environ | {"TRITON_INTERPRET": "1"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--implementation", default="triton", help="triton, flash, tiled or naive")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="drawn, and printed, if not given")
    parser.add_argument("--size", default="full", choices=SIZES)
    parser.add_argument("--processes", type=int, default=DEFAULT_PROCESSES, help="0 runs the cases in this one")
    parser.add_argument("--case", help="run this one alone, in this process: size-seed-number")
    given = parser.parse_args()
    if given.device == "cpu" and given.implementation == "triton":
        start_in_the_interpreter()
    if given.case is not None:
        return report([attempt(run_case, given.case, given.device, given.implementation)])
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}, size {given.size}, {given.implementation} on {given.device}", flush=True)
    chosen = names(given.size, seed, given.cases)
    return report(sweep(chosen, given.device, given.implementation, given.processes))


if __name__ == "__main__":
    sys.exit(main())
