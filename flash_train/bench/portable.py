"""The portable kernels one by one, each by any launch: what a launch is compiled to, and what it gives."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from flash_train.bench.cases import Case, Inputs, make_inputs
from flash_train.bench.contestants import mask_of
from flash_train.ops.features import Score, flatten
from flash_train.ops.kernels.backward import dkdv_kernel, dq_kernel
from flash_train.ops.kernels.forward import attention_forward, forward_kernel
from flash_train.ops.kernels.launch import Call, blocks, empty
from flash_train.ops.kernels.operands import readable
from flash_train.ops.kernels.tables import Launch

_KERNELS = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel}
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Kernels:
    """The kernels on one problem; each writes its results where it wrote them before. `bias` is [H, T, S]."""

    def __init__(self, case: Case, inputs: Inputs, bias: Tensor | None) -> None:
        q, k, v, do = inputs
        self._case, self._inputs = case, inputs
        self._terms = flatten(
            q, k, mask_of(case, q.device), Score(bias=bias), scale=case.scale, dropout=0.0, implementation="triton"
        )
        rows = case.B, case.H, case.T
        self._output = empty(q, case.B, case.T, case.H, case.E).transpose(1, 2)
        self._found_lse, self._lse, self._delta = (q.new_zeros(rows, dtype=torch.float32) for _ in range(3))
        self._dq, self._dk, self._dv = (empty(x, *x.shape) for x in (q, k, v))
        self._call = Call(q, v, self._terms, self._lse)
        self._operands = [readable(x) for x in (q, k, v, do)]

    def run_forward(self) -> None:
        """What the backward's kernels read, made by the launch table; until then it is zeros."""
        q, k, v, do = self._inputs
        output, lse = attention_forward(q, k, v, self._terms)
        self._lse.copy_(lse)
        self._delta.copy_((do.float() * output.float()).sum(-1))

    def start(self, direction: str, launch: Launch) -> Any:
        """Start one kernel; what Triton compiled it to, None if it had been compiled before, or is interpreted.

        Raises what Triton raises, `OutOfResources` for a launch that does not fit.
        """
        case, kernel = self._case, _Watched(_KERNELS[direction])
        heads = case.B * (case.G if direction == "dkdv" else case.H)
        tensors = {
            "forward": (self._output, self._found_lse),
            "dkdv": (self._lse, self._delta, self._dk, self._dv),
            "dq": (self._lse, self._delta, self._dq),
        }[direction]

        def rest(launch: Launch) -> tuple[int, tuple[Tensor, ...], tuple[int, ...]]:
            tiles = blocks(case.S, launch.block_s) if direction == "dkdv" else blocks(case.T, launch.block_t)
            return tiles * heads, tensors, ()

        operands = self._operands[:3] if direction == "forward" else self._operands
        self._call.start(direction, kernel, operands, heads, rest, override=launch)
        return kernel.compiled

    def results(self, direction: str, launch: Launch) -> dict[str, Tensor]:
        """By their names in `Truth`, written into memory that held NaN."""
        found = {
            "forward": {"output": self._output, "lse": self._found_lse},
            "dkdv": {"dk": self._dk, "dv": self._dv},
            "dq": {"dq": self._dq},
        }[direction]
        for x in found.values():
            x.fill_(math.nan)
        self.start(direction, launch)
        if direction == "forward":  # minus infinity where a query sees nothing
            found["lse"] = found["lse"].masked_fill(found["lse"] == -math.inf, 0.0).unsqueeze(-1)
        return found


class _Watched:
    """A kernel that keeps what Triton compiles it to."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.__name__ = kernel, kernel.__name__
        self.compiled: Any = None

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            self.compiled = self._kernel[programs](*args, **options)
            return self.compiled

        return start


class Job(NamedTuple):
    """A launch to compile, for a problem like `case`."""

    case: Case
    dtype: torch.dtype
    device: torch.device
    dense: bool
    direction: str
    launch: Launch


class Built(NamedTuple):
    """What Triton made of a launch; None where it does not say."""

    registers: int | None = None
    """Of a thread."""
    spills: int | None = None
    """Numbers of 4 bytes that a thread keeps in memory for want of registers."""
    shared: int | None = None
    """Bytes of a program."""
    status: str = "ok"
    """Or too large, or failed, and `why`."""
    why: str | None = None


def like(case: Case) -> Case:
    """The smallest problem that has the same kernels: lengths, heads and the window's reach are read when they run."""
    T, S = (128 + length % 16 for length in (case.T, case.S))
    window = None if case.window is None else (*(None if side is None else 1 for side in case.window),)
    documents = None if case.documents is None else (T,)
    return replace(case, B=1, H=1, G=1, T=T, S=S, window=window, documents=documents)


def build(job: Job) -> Built:
    """Compile a launch and run it once. In a process of its own: Triton keeps what it compiles on the disk."""
    try:
        inputs = make_inputs(job.case, device=job.device, dtype=job.dtype, seed=0)
        bias = inputs.q.new_zeros(job.case.H, job.case.T, job.case.S) if job.dense else None
        compiled = Kernels(job.case, inputs, bias).start(job.direction, job.launch)
        torch.cuda.synchronize(job.device)
        return Built(compiled.n_regs, compiled.n_spills, compiled.metadata.shared) if compiled else Built()
    except OutOfResources as error:
        return Built(status="too large", why=f"it takes {error.required} of {error.name}, {error.limit} there are")
    except Exception as error:
        return Built(status="failed", why=failure(error))


def failure(error: Exception) -> str:
    """Its class, and the first line that it has to say."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def in_processes(
    work: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int
) -> Iterator[tuple[_Job, _Result | None]]:
    """Each job with what `work` returns, as they get ready; None for one that its process did not survive."""
    left = list(jobs)
    while left:
        done = []
        try:
            with _pool(workers) as pool:
                futures = {pool.submit(work, job): job for job in left}
                for future in as_completed(futures):
                    yield futures[future], future.result()
                    done.append(futures[future])
        except BrokenProcessPool:  # at one of those that were begun, in their order
            left = [job for job in left if job not in done]
            suspects, left = left[: 2 * workers], left[2 * workers :]
            yield from ((job, _alone(work, job)) for job in suspects)
        else:
            return


def _alone(work: Callable[[_Job], _Result], job: _Job) -> _Result | None:
    try:
        with _pool(1) as pool:
            return pool.submit(work, job).result()
    except BrokenProcessPool:
        return None


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # a forked process has no CUDA
