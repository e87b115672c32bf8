"""What filled the memory of one step that really ran: by category, by module, by tensor, and what scores took of it."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from flash_train.memory.live import Block, Inside, LiveBytes, storage_of
from flash_train.memory.logits import LogitFinder
from flash_train.memory.scores import ScoreFinder, Scores, in_backward
from flash_train.memory.sdpa_calls import SdpaCalls
from flash_train.memory.trace import LSE, PhaseMemory, Saving, Trace, dtype_name


@dataclass(frozen=True)
class ScoreMatrices:
    """The T x S blocks of the attention in one module: scores, probabilities, masks made for them, gradients."""

    module: str
    shape: tuple[int, ...]
    """Of the probabilities."""
    dtype: str
    saved: int
    """Bytes that the forward left for the backward, at most."""
    most: int
    """Bytes alive at once, at most."""
    flash_keeps: int
    """What flash attention keeps in their place, the log-sum-exp of each row."""


@dataclass(frozen=True)
class LossLogits:
    """The logits of one layer that a cross-entropy was taken of: with copies, log-probabilities and gradients."""

    module: str
    shape: tuple[int, ...]
    """As log_softmax took them."""
    dtype: str
    saved: int
    """Bytes that the forward left for the backward, at most."""
    most: int
    """Bytes alive at once, at most."""


@dataclass(frozen=True)
class SdpaUse:
    """torch's scaled_dot_product_attention in one module, by the back end that it took."""

    module: str
    backend: str
    calls: int
    shape: tuple[int, ...]
    """Of the first call's query."""
    dtype: str
    reason: str
    """For math: why no fused back end."""


@dataclass(frozen=True)
class Breakdown:
    """One probed step. All sizes in bytes."""

    step: int
    device: str
    source: str
    """Who measured: "allocator" (a GPU's own mark), "profiler" (a CPU allocator's events), "tracker" (nobody but the
    tracker, so that nothing can be untracked), "prediction" (the step was taken on fake tensors)."""
    phases: dict[str, PhaseMemory]
    """forward, backward and optimizer; under manual optimization, step."""
    score_matrices: tuple[ScoreMatrices, ...]
    flash_saves: Saving | None
    """None without score matrices."""
    logits: tuple[LossLogits, ...]
    chunked_loss_saves: Saving | None
    """What a cross-entropy would that makes the logits of 2,048 rows at a time; None without logits."""
    both_save: Saving | None
    """Flash attention and a chunked loss together; None unless there is something for both."""
    sdpa: tuple[SdpaUse, ...]
    compiled: bool
    """Whether the model, or a part, is compiled: the probed step then ran uncompiled, and these are its figures."""
    notes: tuple[str, ...] = ()
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """The step itself, which can be asked more; it is in no file."""

    @property
    def phase(self) -> str:
        """The one that has the peak."""
        return max(self.phases, key=lambda name: self.phases[name].measured)

    @property
    def peak(self) -> PhaseMemory:
        """That phase's."""
        return self.phases[self.phase]

    def to_json(self, *, tensors: int = 50) -> dict[str, Any]:
        """Everything, in lists, dictionaries, numbers and strings; of the tensors, the largest of each phase."""
        document = {"peak_phase": self.phase, "peak_bytes": self.peak.measured, **asdict(replace(self, trace=None))}
        del document["trace"]
        for name, phase in self.phases.items():
            document["phases"][name] |= {"tracked": phase.tracked, "untracked": phase.untracked}
            document["phases"][name]["tensors"] = document["phases"][name]["tensors"][:tensors]
        return _plain(document)


class Recorder(LiveBytes):
    """LiveBytes of a real step, with the flow of scores and SDPA's back ends.

    Whatever fails in the bookkeeping ends it, and the operators run on: `error` tells.
    """

    def __init__(self, module: nn.Module, *, device: str, inside: Inside | None = None, sdpa: bool = True) -> None:
        super().__init__(module, device=device, inside=None if inside is None else self._unless_failed(inside))
        # torch.compile's wrapper is no module of the user's.
        names = {part: name.replace("_orig_mod.", "") for name, part in module.named_modules()}
        self._stack.names = {part: name for part, name in names.items() if name != "_orig_mod"}
        self._scores = ScoreFinder(self._find)
        self._logits = LogitFinder(self._find, self._scores.is_weight)
        self._calls = SdpaCalls(self._stack.top)
        self._watches_sdpa = sdpa
        self._arguments: Any = ()
        self._owners: dict[Block, str] = {}
        self._forward_ends: list[int] = []
        self._nodes: dict[int, str] = {}  # module by the sequence number of autograd's node
        self.error: Exception | None = None

    def __enter__(self) -> "Recorder":
        super().__enter__()
        if self._watches_sdpa:
            self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watches_sdpa:
            self._calls.__exit__(*error)
        super().__exit__(*error)
        # From here on the death of a storage is nobody's business.
        self._alive.clear()

    def hold_training(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """As before, and each with the module that it belongs to."""
        optimizers = list(optimizers)
        super().hold_training(optimizers)
        owner: dict[Any, str] = {
            parameter: name for name, part in self._parts() for parameter in part.parameters(recurse=False)
        }
        for name, part in self._parts():
            self._own(name, [*part.parameters(recurse=False), *part.buffers(recurse=False)])
        for parameter, state in ((p, s) for optimizer in optimizers for p, s in optimizer.state.items()):
            if isinstance(state, Mapping):
                self._own(owner.get(parameter, ""), [x for x in state.values() if isinstance(x, torch.Tensor)])

    def hold_gradients(self) -> None:
        super().hold_gradients()
        for name, part in self._parts():
            self._own(name, [p.grad for p in part.parameters(recurse=False) if p.grad is not None])

    def hold_activations(self) -> None:
        super().hold_activations()
        self._forward_ends.append(len(self._events))

    def _parts(self) -> list[tuple[str, nn.Module]]:
        return [(name, part) for part, name in self._stack.names.items()]

    def _own(self, name: str, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            block = self._find(tensor)
            if block is not None:
                self._owners[block] = name

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before, self._arguments = len(self._events), (args, kwargs)
        try:
            results = super().__torch_dispatch__(operator, types, args, kwargs)
        finally:
            self._arguments = ()  # which would keep them alive
        if self.error is None and self._phase != "optimizer":
            try:
                if not in_backward():
                    # The last node made is this operator's, or, if it needs none, one that was noted already.
                    made = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
                    self._nodes.setdefault(made - 1, self._stack.top())
                self._calls.observe(operator)
                self._scores.observe(operator, args, results)
                self._logits.observe(operator, args, results)
                for _, block, born in self._events[before:]:
                    if born and block.category == "workspaces":
                        self._scores.adopt(block, args)
            except Exception as error:
                self.error = error
        return results

    def _notice(self, tensor: torch.Tensor, operator: Any) -> None:
        if self._watches_sdpa and self._device == "cpu" and self._find(tensor) is None and self._was_given(tensor):
            return  # there before the step, as a data set or DDP's buckets are: no event tells a CPU's meter of it
        if self.error is None:
            try:
                super()._notice(tensor, operator)
            except Exception as error:
                self.error = error

    def _was_given(self, tensor: torch.Tensor) -> bool:
        """To the operator that returns it, or a view of it."""
        storage = storage_of(tensor)
        return any(storage_of(x) is storage for x in tree_leaves(self._arguments) if isinstance(x, torch.Tensor))

    def _block(self, *args: Any, **kwargs: Any) -> Block:
        block = super()._block(*args, **kwargs)
        node = torch._C._current_autograd_node() if block.operation and in_backward() else None
        if node is not None:
            block.module = self._nodes.get(node._sequence_nr(), "")
        return block

    def _unless_failed(self, inside: Inside) -> Inside:
        def guarded(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any) -> int:
            try:
                return inside(operator, args, kwargs, results)
            except Exception as error:  # an operator's own declaration may be wrong
                self.error = error
                return 0

        return guarded

    # What came of it

    def breakdown(
        self, measured: Mapping[str, int], *, step: int, source: str, rounded_to: int = 1, compiled: bool = False,
        notes: tuple[str, ...] = (),
    ) -> Breakdown:  # fmt: skip
        """`measured`: bytes by phase, as far as there are any."""
        trace = Trace(self._events, owners=self._owners, scores=self._scores.found, logits=self._logits.found,
                      ends=self._forward_ends, rounded_to=rounded_to)  # fmt: skip
        peaks = {phase: peak for phase, peak in self.peaks(rounded_to=rounded_to).items() if phase}
        scores, logits = trace.scores, trace.logits
        return Breakdown(
            step=step,
            device=self._device,
            source=source,
            phases={phase: trace.memory(peak, measured.get(phase)) for phase, peak in peaks.items()},
            score_matrices=tuple(_score_matrices(trace)),
            flash_saves=trace.saving(flash=True) if scores else None,
            logits=tuple(_loss_logits(trace)),
            chunked_loss_saves=trace.saving(chunked=True) if logits else None,
            both_save=trace.saving(flash=True, chunked=True) if scores and logits else None,
            sdpa=tuple(
                SdpaUse(call.module, call.backend, call.calls, call.shape, dtype_name(call.dtype), call.reason)
                for call in self._calls.found
            ),
            compiled=compiled,
            notes=notes,
            trace=trace,
        )


def _score_matrices(trace: Trace) -> Iterable[ScoreMatrices]:
    by_module: dict[str, list[Scores]] = {}
    for group in trace.scores:
        by_module.setdefault(group.module, []).append(group)
    for module, own in by_module.items():
        blocks = {block for group in own for block in group.blocks}
        rows = {block: number for group in own for block, number in group.rows.items()}
        saved, most = trace.alive_of(lambda block, own=blocks: block.size if block in own else 0)
        keeps, _ = trace.alive_of(lambda block, rows=rows: rows.get(block, 0) * LSE.itemsize)
        first = next(iter(rows))
        yield ScoreMatrices(module, first.shape, dtype_name(first.dtype), saved, most, keeps)


def _loss_logits(trace: Trace) -> Iterable[LossLogits]:
    for group in trace.logits:
        saved, most = trace.alive_of(lambda block, own=group.blocks: block.size if block in own else 0)
        first = group.first[False]
        yield LossLogits(trace.module_of(first), group.shape, dtype_name(first.dtype), saved, most)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wraps it or a part of it, or compiles one in place."""
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is, and to import it takes a second
    return dynamo is not None and any(
        isinstance(part, dynamo.OptimizedModule) or part._compiled_call_impl is not None for part in module.modules()
    )


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _plain(value) for name, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list | tuple) else tree
