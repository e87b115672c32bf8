"""What torch's allocator makes of a recorded step: it reserves more than is alive, as its blocks are cut from segments,
and counts more as allocated, as it leaves small rests uncut."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain

from flash_train.memory.allocator import CachingAllocator, OutOfMemory, Piece
from flash_train.memory.live import Block, Event

STEPS = 3
"""The first finds no gradients and no optimizer state, and where it puts them they lie in the way of the others."""
UNLIMITED = 2**62
_PRODUCTS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}


class Replay:
    """The start of a training, made of a recorded step in steady state; of one that accumulates, of its last
    micro-batch, which tells the first one as well.

    Args:
        events: of the step.
        cublas: what cuBLAS takes for the forward's products and the backward's together, in bytes; of several sizes
            the one counts with which most is reserved.
    """

    def __init__(self, events: Sequence[Event], *, cublas: Sequence[int]) -> None:
        self._held = [block for phase, block, born in events if born and not phase and block.size]
        self._events = [event for event in (*_first_micro_batch(events), *events) if event[0]]
        self._cublas = tuple(cublas)
        self._known: dict[int, tuple[dict[str, int], int]] = {}

    @property
    def allocated(self) -> dict[str, int]:
        """The most bytes that are allocated in each phase, with the first of cuBLAS's sizes."""
        return self._unlimited(self._cublas[0])[0]

    def reserved(self, limit: int = UNLIMITED) -> int:
        """The most bytes of segments where there are `limit` for them. Where the training runs out of memory, what
        they are without a limit, which is more than `limit`."""
        return max(self._reserved(limit, cublas) for cublas in self._cublas)

    def _reserved(self, limit: int, cublas: int) -> int:
        _, unlimited = self._unlimited(cublas)
        if unlimited > limit:
            try:
                return self.train(limit, cublas=cublas).allocator.peak_reserved
            except OutOfMemory:
                pass
        return unlimited

    def _unlimited(self, cublas: int) -> tuple[dict[str, int], int]:
        """What is allocated in each phase, and what is reserved."""
        if cublas not in self._known:
            training = self.train(UNLIMITED, cublas=cublas)
            self._known[cublas] = training.phases, training.allocator.peak_reserved
        return self._known[cublas]

    def train(self, limit: int, *, cublas: int) -> "Training":
        """The first `STEPS` steps. Raises OutOfMemory."""
        training = Training(self._held, limit, cublas)
        for _ in range(STEPS):
            training.step(self._events)
        return training


def _first_micro_batch(events: Sequence[Event]) -> Iterator[Event]:
    """Of a step whose last one has these: it finds the gradients of the step before, which die between forward and
    backward, and what the last one adds to its own stays."""
    if not any(block.added and block.phase == "backward" for _, block, _ in events):
        return
    found = [block for phase, block, _ in events if not phase and block.category == "gradients"]
    copies: dict[Block, Block] = {}
    for phase, block, born in events:
        if phase == "backward" and found:
            yield from (("forward", gradient, False) for gradient in found)
            found = []
        if born and phase in ("forward", "backward"):
            yield phase, copies.setdefault(block, copy(block)), True
        elif not born and block in copies and not block.added:
            yield "backward" if phase == "optimizer" else phase, copies[block], False


class Training:
    """A training's steps, one after the other, in memory of `limit` bytes.

    `allocator` is as the last one has left it; `phases` are the most bytes allocated in each phase.
    """

    def __init__(self, held: Sequence[Block], limit: int, cublas: int) -> None:
        self.allocator = CachingAllocator(limit)
        self.phases: dict[str, int] = {}
        self._held, self._cublas = held, cublas
        self._alive = self._hold("parameters")
        self._left: dict[int, list[Piece]] = {}
        self._started: set[str] = set()

    def step(self, events: Sequence[Event]) -> None:
        """One more, after which lies what it leaves behind, as its gradients, where the one before it left the same."""
        inputs, left, allocator = self._hold("inputs"), self._left, self.allocator
        made = dict(inputs)
        for phase, block, born in events:
            if phase == "optimizer" and phase not in self._started:
                self._started.add(phase)
                self._alive |= self._hold("optimizer state")
            if born and block.size:
                made[block] = allocator.alloc(block.size)
                if phase not in self._started and block.operation in _PRODUCTS:
                    self._started.add(phase)  # the forward's thread has a handle, and the backward's another
                    allocator.alloc(self._cublas // 2)
            elif not born and block in made:
                allocator.free(made.pop(block))
            elif not born and block in self._alive:
                allocator.free(self._alive.pop(block))
            elif not born and left.get(block.size):  # what the recorded step found is what the one before it made
                allocator.free(left[block.size].pop())
            if allocator.allocated > self.phases.get(phase, 0):
                self.phases[phase] = allocator.allocated
        for piece in (*chain(*left.values()), *(made.pop(block) for block in inputs if block in made)):
            allocator.free(piece)
        self._left = {}
        for block, piece in made.items():
            self._left.setdefault(block.size, []).append(piece)

    def _hold(self, category: str) -> dict[Block, Piece]:
        return {block: self.allocator.alloc(block.size) for block in self._held if block.category == category}
