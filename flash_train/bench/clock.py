"""Seconds a call and bytes a call, on a GPU by its events and its allocator, on a CPU by perf_counter and profiler."""

import time
from collections.abc import Callable
from statistics import median

import torch

from flash_train.bench.work import Call
from flash_train.diagnostics.cpu_peak import PeakProbe

SAMPLES = 5
"""Of a round, if its seconds allow as many."""
_MATMUL = {"cuda": 8192, "cpu": 1024}
_LARGEST_GRAPH = 50


def sample(call: Call, *, seconds: float, device: torch.device, each: int = 1) -> tuple[float, ...]:
    """Seconds a call: up to `SAMPLES` stretches of calls, one behind the other as a model makes them, `seconds` in all
    and at least one. `each`: how many calls `call` stands for.

    The inputs of small problems stay in the cache, as those that a projection has just written do.
    """
    once = stretch(call, 1, device)
    if once < 1e-3:
        once = stretch(call, 10, device)
    samples = max(1, min(SAMPLES, int(seconds / once)))
    count = max(1, round(seconds / samples / once))
    return tuple(stretch(call, count, device) / each for _ in range(samples))


def stretch(call: Call, count: int, device: torch.device) -> float:
    """Seconds of `call`, the mean of `count` calls behind one that is not timed: while a GPU is at that one, the host
    gets ahead if it can, so that the time is the slower one's of the two.
    """
    if device.type == "cpu":
        call()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def graph_size(once: float) -> int:
    """How many calls of `once` seconds a CUDA graph holds, so that starting it is a small part of its time."""
    return max(1, min(_LARGEST_GRAPH, int(5e-3 / once)))


def peak_bytes(make: Callable[[], Call], device: torch.device) -> int:
    """The most that is allocated at once during a call of what `make` returns, beyond what was there before it: a
    backward's inputs are what its forward has left. On a CPU the tensors' own bytes.
    """
    call = make()
    call()
    if device.type == "cpu":
        probe = PeakProbe()
        probe.start()
        probe.begin("call", [])
        call()
        return probe.stop().overall
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def matmul_flops_per_second(
    dtype: torch.dtype, device: torch.device, *, rounds: int, seconds: float
) -> tuple[float, ...]:
    """What a large square matrix product of normally distributed numbers reaches, by round."""
    n = _MATMUL[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return tuple(
        2 * n**3 / median(sample(lambda: torch.mm(a, b, out=out), seconds=seconds, device=device))
        for _ in range(rounds)
    )
