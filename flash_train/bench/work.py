"""One contestant's work on one problem: its calls in each direction, and its results; compiled, or as a CUDA graph."""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from flash_train.bench.cases import Case, Inputs
from flash_train.bench.contestants import Contestant, heads_first, laid_out

Call = Callable[[], object]
_RESULTS = ("output", "dq", "dk", "dv")


class Work:
    """What can be called. Nothing is kept from one call to the next, but a backward's own forward.

    With `gradients` the inputs ask for them, so that a forward saves what its backward needs, as in training; without,
    it is the forward of inference.
    """

    def __init__(self, contestant: Contestant, case: Case, inputs: Inputs, *, gradients: bool) -> None:
        self._contestant = contestant
        self._case = case
        self._inputs = inputs
        self._gradients = gradients

    def call(self, direction: str) -> Call:
        """A function that does the work of `direction` once. For "backward" the forward has been done here."""
        leaves, do = self._leaves()
        attend = self._contestant.attend
        if direction == "forward":
            return lambda: attend(*leaves)
        if direction == "both":
            return lambda: torch.autograd.grad(attend(*leaves), leaves, do)
        output = attend(*leaves)
        return lambda: torch.autograd.grad(output, leaves, do, retain_graph=True)

    def results(self, *, graph: bool) -> dict[str, Tensor]:
        """The output [B, H, T, E] and, with gradients, dq, dk and dv. As a CUDA graph, what its replay leaves behind in
        memory that held NaN before.
        """
        layout, found = self._contestant.layout, self._once()
        if graph:
            replay, found = captured(lambda: self._once, 1)
            for x in found:
                x.fill_(math.nan)
            replay()
        whole = [heads_first(x, layout, self._case.B) for x in found]
        return dict(zip(_RESULTS, whole, strict=False))

    def _once(self) -> tuple[Tensor, ...]:
        leaves, do = self._leaves()
        output = self._contestant.attend(*leaves)
        return output.detach(), *(torch.autograd.grad(output, leaves, do) if self._gradients else ())

    def _leaves(self) -> tuple[list[Tensor], Tensor]:
        q, k, v, do = (laid_out(x, self._contestant.layout).detach() for x in self._inputs)
        return [x.requires_grad_(self._gradients) for x in (q, k, v)], do


def compiled(contestant: Contestant, mode: str) -> Contestant:
    """The contestant inside torch.compile. Its function gets a code object of its own: torch.compile counts
    recompilations by code object, gives up above a few, and contestants share theirs.
    """
    attend = contestant.attend
    assert isinstance(attend, FunctionType)
    own = FunctionType(attend.__code__.replace(), attend.__globals__, attend.__name__, None, attend.__closure__)
    return contestant._replace(attend=torch.compile(own, dynamic=False, mode=mode))


def captured(make: Callable[[], Callable[[], Any]], count: int) -> tuple[Call, Any]:
    """(the replay of a CUDA graph of `count` calls of what `make` returns, the last call's results).

    `make` runs on the capturing stream: gradients are computed on the stream that their forward ran on.
    """
    stream, result = torch.cuda.Stream(), None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = make()
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            result = call()
    return (lambda kept=call: graph.replay()), result  # `call` holds tensors that the graph reads
