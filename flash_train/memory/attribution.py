"""What filled the memory of one step that really ran: by category, by module, by tensor, and what scores took of it."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from flash_train.memory.live import Block, Inside, LiveBytes, Peak
from flash_train.memory.scores import ScoreFinder, Scores, in_backward
from flash_train.memory.sdpa_calls import SdpaCalls

LSE = torch.float32
"""What flash attention keeps for each row of scores: one number of this type."""


@dataclass(frozen=True)
class TensorBytes:
    """Blocks alike, alive at a peak."""

    size: int
    """Bytes of them together."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    """The operator that made them, as aten.bmm.default; "" for what was there before the step."""
    module: str
    category: str
    phase: str
    """In which they were made."""


@dataclass(frozen=True)
class PhaseMemory:
    """The moment of a phase with the most live bytes. All sizes in bytes, each block rounded as the allocator does."""

    measured: int
    """The allocator's own peak of the phase; where nothing measured one (see `Breakdown.source`), what was tracked."""
    categories: dict[str, int]
    """`live.CATEGORIES`; together they are `tracked`."""
    modules: dict[str, int]
    """The same bytes by module, largest first; in parentheses what belongs to none, by the phase that made it."""
    tensors: tuple[TensorBytes, ...]
    """The same bytes once more, alike blocks as one, largest first."""

    @property
    def tracked(self) -> int:
        return sum(self.categories.values())

    @property
    def untracked(self) -> int:
        """What the allocator counts and no tensor that was seen explains: library workspaces, what operators take
        inside, tensors of others. Below 0 where a storage shrank without its tensor's death, or where the measuring
        missed a birth: under DDP the CPU's profiler misses gradients."""
        return self.measured - self.tracked


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
class FlashSaving:
    """What flash attention would take off, by the recorded step with the score matrices left out and the log-sum-exps
    put in. Its kernels' own workspaces are not counted."""

    saved: int
    """Bytes between forward and backward."""
    peak: int
    """Bytes of the step's peak."""
    phases: dict[str, int]
    """Bytes of each phase's peak."""


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
    tracker, so that nothing can be untracked)."""
    phases: dict[str, PhaseMemory]
    """forward, backward and optimizer; under manual optimization, step."""
    score_matrices: tuple[ScoreMatrices, ...]
    flash_saves: FlashSaving | None
    """None without score matrices."""
    sdpa: tuple[SdpaUse, ...]
    compiled: bool
    """Whether the model, or a part, is compiled: the probed step then ran uncompiled, and these are its figures."""
    notes: tuple[str, ...] = ()

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
        document = {"peak_phase": self.phase, "peak_bytes": self.peak.measured, **asdict(self)}
        for name, phase in self.phases.items():
            document["phases"][name] |= {"tracked": phase.tracked, "untracked": phase.untracked}
            document["phases"][name]["tensors"] = document["phases"][name]["tensors"][:tensors]
        return _plain(document)


class Recorder(LiveBytes):
    """LiveBytes of a real step, with the flow of scores and SDPA's back ends.

    Whatever fails in the bookkeeping ends it, and the operators run on: `error` tells.
    """

    def __init__(self, module: nn.Module, *, device: str, inside: Inside | None = None) -> None:
        super().__init__(module, device=device, inside=None if inside is None else self._unless_failed(inside))
        self._module = module
        # torch.compile's wrapper is no module of the user's.
        names = {part: name.replace("_orig_mod.", "") for name, part in module.named_modules()}
        self._stack.names = {part: name for part, name in names.items() if name != "_orig_mod"}
        self._scores = ScoreFinder(self._find)
        self._calls = SdpaCalls(self._stack.top)
        self._owners: dict[Block, str] = {}
        self._forward_ends: list[int] = []
        self._nodes: dict[int, str] = {}  # module by the sequence number of autograd's node
        self.error: Exception | None = None

    def __enter__(self) -> "Recorder":
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)
        # From here on the death of a storage is nobody's business.
        self._alive.clear()

    def hold_training(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Parameters, gradients and the optimizers' state, each with the module that it belongs to."""
        self.hold("parameters", self._module)
        self.hold_gradients()
        for optimizer in optimizers:
            self.hold("optimizer state", optimizer)
        owner: dict[Any, str] = {
            parameter: name for name, part in self._parts() for parameter in part.parameters(recurse=False)
        }
        for name, part in self._parts():
            self._own(name, [*part.parameters(recurse=False), *part.buffers(recurse=False)])
        for parameter, state in ((p, s) for optimizer in optimizers for p, s in optimizer.state.items()):
            if isinstance(state, Mapping):
                self._own(owner.get(parameter, ""), [x for x in state.values() if isinstance(x, torch.Tensor)])

    def hold_gradients(self) -> None:
        """Whatever the parameters' `grad` are now."""
        for name, part in self._parts():
            gradients = [p.grad for p in part.parameters(recurse=False) if p.grad is not None]
            self.hold("gradients", gradients)
            self._own(name, gradients)

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
        results = super().__torch_dispatch__(operator, types, args, kwargs)
        if self.error is None and self._phase != "optimizer":
            try:
                if not in_backward():
                    # The last node made is this operator's, or, if it needs none, one that was noted already.
                    made = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
                    self._nodes.setdefault(made - 1, self._stack.top())
                self._calls.observe(operator)
                self._scores.observe(operator, args, results)
            except Exception as error:
                self.error = error
        return results

    def _notice(self, tensor: torch.Tensor, operator: Any) -> None:
        if self.error is None:
            try:
                super()._notice(tensor, operator)
            except Exception as error:
                self.error = error

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
        peaks = {phase: peak for phase, peak in self.peaks(rounded_to=rounded_to).items() if phase}
        phases = {
            phase: self._phase_memory(peak, measured.get(phase), rounded_to) for phase, peak in peaks.items()
        }  # fmt: skip
        groups = self._scores.found
        return Breakdown(
            step=step,
            device=self._device,
            source=source,
            phases=phases,
            score_matrices=tuple(self._score_matrices(groups, rounded_to)),
            flash_saves=self._flash_saving(groups, peaks, rounded_to) if groups else None,
            sdpa=tuple(
                SdpaUse(call.module, call.backend, call.calls, call.shape, _name(call.dtype), call.reason)
                for call in self._calls.found
            ),
            compiled=compiled,
            notes=notes,
        )

    def _phase_memory(self, peak: Peak, measured: int | None, rounded_to: int) -> PhaseMemory:
        modules: Counter[str] = Counter()
        alike: Counter[tuple[Any, ...]] = Counter()
        for block in peak.blocks:
            size = _round(block.size, rounded_to)
            module = self._module_of(block)
            modules[module] += size
            key = (size, block.shape, _name(block.dtype), block.operation, module, block.category, block.phase)
            alike[key] += 1
        tensors = sorted((TensorBytes(size * count, count, *rest) for (size, *rest), count in alike.items()),
                         key=lambda tensor: -tensor.size)  # fmt: skip
        return PhaseMemory(
            peak.size if measured is None else measured, dict(peak.categories), dict(modules.most_common()),
            tuple(tensors),
        )  # fmt: skip

    def _module_of(self, block: Block) -> str:
        if block.category == "inputs":
            return "(inputs)"
        name = self._owners.get(block, block.module)
        return name or f"({block.phase or 'before the step'})"

    def _score_matrices(self, groups: list[Scores], rounded_to: int) -> Iterable[ScoreMatrices]:
        by_module: dict[str, list[Scores]] = {}
        for group in groups:
            by_module.setdefault(group.module, []).append(group)
        for module, own in by_module.items():
            blocks = {block for group in own for block in group.blocks}
            rows = {block: number for group in own for block, number in group.rows.items()}
            saved, most = self._alive_of(lambda block, own=blocks: block.size if block in own else 0, rounded_to)
            keeps, _ = self._alive_of(lambda block, rows=rows: rows.get(block, 0) * LSE.itemsize, rounded_to)
            first = next(iter(rows))
            yield ScoreMatrices(module, first.shape, _name(first.dtype), saved, most, keeps)

    def _flash_saving(self, groups: list[Scores], peaks: Mapping[str, Peak], rounded_to: int) -> FlashSaving:
        blocks = {block for group in groups for block in group.blocks}
        rows = {block: number for group in groups for block, number in group.rows.items()}

        def size(block: Block) -> int:
            return rows.get(block, 0) * LSE.itemsize if block in blocks else block.size

        def change(block: Block) -> int:
            return _round(block.size, rounded_to) - _round(size(block), rounded_to)

        after, total = dict.fromkeys(peaks, 0), 0
        for phase, block, born in self._events:
            total += _round(size(block), rounded_to) * (1 if born else -1)
            if phase in after:
                after[phase] = max(after[phase], total)
        saved, _ = self._alive_of(change)
        phases = {phase: peaks[phase].size - after[phase] for phase in peaks}
        peak = max(peak.size for peak in peaks.values()) - max(after.values())
        return FlashSaving(saved, peak, phases)

    def _alive_of(self, size: Callable[[Block], int], rounded_to: int = 1) -> tuple[int, int]:
        """Bytes alive of what `size` counts: at the most at the ends of forwards, and at the most at all."""
        ends, saved, most, total = set(self._forward_ends), 0, 0, 0
        for index, (_, block, born) in enumerate(self._events):
            if index in ends:
                saved = max(saved, total)
            total += _round(size(block), rounded_to) * (1 if born else -1)
            most = max(most, total)
        return (max(saved, total) if len(self._events) in ends else saved), most


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wraps it or a part of it, or compiles one in place."""
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is, and to import it takes a second
    return dynamo is not None and any(
        isinstance(part, dynamo.OptimizedModule) or part._compiled_call_impl is not None for part in module.modules()
    )


def _round(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _plain(value) for name, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list | tuple) else tree
