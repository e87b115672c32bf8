"""A recorded step that can be asked: what was alive when, and what would have been with other blocks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from flash_train.memory.live import CATEGORIES, Block, Event, Peak, round_up
from flash_train.memory.logits import Logits
from flash_train.memory.scores import Scores

LSE = torch.float32
"""What flash attention keeps for each row of scores: one number of this type."""
SCORES, LOGITS = "score matrices", "logits and their loss"
Size = Callable[[Block], int]


@dataclass(frozen=True)
class TensorBytes:
    """Blocks alike, alive at one moment."""

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
    culprit: str
    """The category, or that they are score matrices, or logits and their loss."""


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
    culprits: dict[str, int]
    """The same bytes by category, with the score matrices and the logits and their loss apart; largest first."""

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
class Saving:
    """What a change would take off, by the recorded step with the blocks replaced that the change replaces."""

    saved: int
    """Bytes between forward and backward."""
    peak: int
    """Bytes of the step's peak."""
    phases: dict[str, int]
    """Bytes of each phase's peak."""
    then: str
    """What the peak would mostly consist of (see `PhaseMemory.culprits`)."""


@dataclass(frozen=True)
class Moment:
    """When a step asked for a block."""

    tensor: TensorBytes
    """That block."""
    memory: PhaseMemory
    """What was alive, the block not counted."""


class Trace:
    """The births and deaths of one step, in order. Every figure is in bytes, each block rounded as the allocator does.

    Args:
        events: (phase, block, whether it was born).
        owners: whose a block is, where that is not who made it.
        ends: how many events there had been when a forward ended.
        rounded_to: the allocator's unit.
    """

    def __init__(
        self,
        events: list[Event],
        *,
        owners: Mapping[Block, str],
        scores: list[Scores],
        logits: list[Logits],
        ends: Iterable[int],
        rounded_to: int,
    ) -> None:
        self.scores, self.logits = scores, logits
        self._events, self._owners, self._ends, self._rounded_to = events, owners, set(ends), rounded_to
        self._score_blocks = {block for group in scores for block in group.blocks}
        self._logit_blocks = {block for group in logits for block in group.blocks}
        self._rows = {block: number for group in scores for block, number in group.rows.items()}
        self._spikes: dict[Block, int] = {}
        for group in logits:
            for block, size in group.chunked():
                self._spikes[block] = self._spikes.get(block, 0) + size

    @property
    def phases(self) -> list[str]:
        return [phase for phase in dict.fromkeys(phase for phase, *_ in self._events) if phase]

    # What would have been

    def saving(self, *, flash: bool = False, chunked: bool = False) -> Saving:
        """With the score matrices left out and the log-sum-exps put in, the logits left out and a chunk of them put
        in, or both. The workspaces of attention's kernels are not counted."""

        def size(block: Block) -> int:
            if flash and block in self._score_blocks:
                return self._rows.get(block, 0) * LSE.itemsize
            return 0 if chunked and block in self._logit_blocks else block.size

        def change(block: Block) -> int:
            return self._round(block.size) - self._round(size(block))

        before, _ = self._highest(lambda block: block.size)
        after, at = self._highest(size, self._spikes if chunked else {})
        saved, _ = self.alive_of(change)
        phases = {phase: before[phase] - after[phase] for phase in before}
        highest = max(after, key=lambda phase: after[phase])
        then = self._culprits(self._alive(at[highest]), size)
        spike = self._spikes.get(self._events[at[highest]][1], 0) if chunked else 0
        then[LOGITS] = then.get(LOGITS, 0) + spike
        return Saving(saved, max(before.values()) - after[highest], phases, max(then, key=lambda name: then[name]))

    def _highest(self, size: Size, spikes: Mapping[Block, int] | None = None) -> tuple[dict[str, int], dict[str, int]]:
        """Each phase's peak, and the event at which it was."""
        highest, at, total = dict.fromkeys(self.phases, -1), dict.fromkeys(self.phases, 0), 0
        for index, (phase, block, born) in enumerate(self._events):
            total += self._round(size(block)) * (1 if born else -1)
            now = total + (spikes.get(block, 0) if born and spikes else 0)
            if phase and now > highest[phase]:
                highest[phase], at[phase] = now, index
        return highest, at

    def alive_of(self, size: Size) -> tuple[int, int]:
        """Bytes alive of what `size` counts: at the most at the ends of forwards, and at the most at all."""
        saved, most, total = 0, 0, 0
        for index, (_, block, born) in enumerate(self._events):
            if index in self._ends:
                saved = max(saved, total)
            total += self._round(size(block)) * (1 if born else -1)
            most = max(most, total)
        return (max(saved, total) if len(self._events) in self._ends else saved), most

    # What was

    def memory(self, peak: Peak, measured: int | None = None) -> PhaseMemory:
        """`peak` by whatever it can be told by."""
        modules: Counter[str] = Counter()
        alike: Counter[TensorBytes] = Counter()
        for block in peak.blocks:
            modules[self.module_of(block)] += self._round(block.size)
            alike[self._describe(block)] += 1
        tensors = [
            TensorBytes(**{**vars(one), "size": one.size * count, "count": count}) for one, count in alike.items()
        ]
        return PhaseMemory(
            peak.size if measured is None else measured,
            dict(peak.categories),
            dict(modules.most_common()),
            tuple(sorted(tensors, key=lambda tensor: -tensor.size)),
            self._culprits(peak.blocks, lambda block: block.size),
        )

    def moment(
        self, phase: str, fits: Callable[[int], bool], *, module: str | None = None, allocated: int | None = None
    ) -> Moment | None:
        """When a block of a size that `fits` was asked for in `phase`; None if none was.

        Of several, one in `module`, if there is one; then the one that found most nearly `allocated` bytes, or, where
        that is not known, the most.
        """
        found: list[tuple[bool, int, int]] = []
        total = 0
        for index, (where, block, born) in enumerate(self._events):
            if born and where == phase and block.operation and block.size and fits(block.size):
                distance = -total if allocated is None else abs(allocated - total)
                found.append((module is not None and self.module_of(block) != module, distance, index))
            total += self._round(block.size) * (1 if born else -1)
        if not found:
            return None
        _, _, index = min(found)
        before = self._alive(index - 1)
        categories = {name: 0 for name in CATEGORIES}
        for block in before:
            categories[block.category] += self._round(block.size)
        memory = self.memory(Peak(sum(categories.values()), categories, tuple(before)))
        return Moment(self._describe(self._events[index][1]), memory)

    def _describe(self, block: Block) -> TensorBytes:
        return TensorBytes(
            self._round(block.size), 1, block.shape, dtype_name(block.dtype), block.operation, self.module_of(block),
            block.category, block.phase, self._culprit(block),
        )  # fmt: skip

    def _alive(self, index: int) -> list[Block]:
        alive: dict[Block, None] = {}
        for _, block, born in self._events[: index + 1]:
            if born:
                alive[block] = None
            else:
                alive.pop(block, None)
        return sorted((block for block in alive if block.size), key=lambda block: -block.size)

    def _culprits(self, blocks: Iterable[Block], size: Size) -> dict[str, int]:
        parts: Counter[str] = Counter()
        for block in blocks:
            parts[self._culprit(block)] += self._round(size(block))
        return {name: number for name, number in parts.most_common() if number}

    def _culprit(self, block: Block) -> str:
        if block in self._score_blocks:
            return SCORES
        return LOGITS if block in self._logit_blocks else block.category

    def module_of(self, block: Block) -> str:
        """Whose it is; in parentheses the phase that made it, if nobody's."""
        if block.category == "inputs":
            return "(inputs)"
        name = self._owners.get(block, block.module)
        return name or f"({block.phase or 'before the step'})"

    def _round(self, size: int) -> int:
        return round_up(size, self._rounded_to)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
