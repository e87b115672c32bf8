"""What torch's allocator reserves for a recorded step: more than is alive, as its blocks are cut from segments."""

from collections.abc import Sequence

from flash_train.memory.allocator import CachingAllocator, OutOfMemory, Piece
from flash_train.memory.live import Block, Event

STEPS = 3
"""The first finds no gradients and no optimizer state, and where it puts them they lie in the way of the others."""
UNLIMITED = 2**62
_PRODUCTS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}


class Replay:
    """The start of a training, made of a recorded step in steady state.

    Args:
        events: of the step, with the last of its micro-batches.
        before: of the first micro-batch, if that is another.
        cublas: what cuBLAS takes for the forward's products and the backward's together, in bytes; of several sizes
            the one counts with which most is reserved.
    """

    def __init__(self, events: Sequence[Event], *, before: Sequence[Event] = (), cublas: Sequence[int]) -> None:
        self._held = [block for phase, block, born in events if born and not phase and block.size]
        self._events = [event for event in (*before, *events) if event[0]]
        self._unlimited = {size: self.train(UNLIMITED, cublas=size).peak_reserved for size in cublas}

    def reserved(self, limit: int = UNLIMITED) -> int:
        """The most bytes of segments where there are `limit` for them. Where the training runs out of memory, what
        they are without a limit, which is more than `limit`."""
        return max(self._reserved(limit, cublas) for cublas in self._unlimited)

    def _reserved(self, limit: int, cublas: int) -> int:
        if self._unlimited[cublas] > limit:
            try:
                return self.train(limit, cublas=cublas).peak_reserved
            except OutOfMemory:
                pass
        return self._unlimited[cublas]

    def train(self, limit: int, *, cublas: int) -> CachingAllocator:
        """The allocator as `STEPS` steps leave it. Raises OutOfMemory."""
        allocator = CachingAllocator(limit)
        alive = {block: allocator.alloc(block.size) for block in self._held_as("parameters")}
        left: list[Piece] = []
        for step in range(STEPS):
            left = self._step(allocator, alive, left, cublas=None if step else cublas)
        return allocator

    def _step(
        self, allocator: CachingAllocator, alive: dict[Block, Piece], left: list[Piece], *, cublas: int | None
    ) -> list[Piece]:
        """What the step leaves behind, as its gradients, where the one before it has `left` the same; with `cublas` the
        first."""
        made = {block: allocator.alloc(block.size) for block in self._held_as("inputs")}
        started: set[str] = set()
        for phase, block, born in self._events:
            if cublas is not None and phase == "optimizer" and phase not in started:
                started.add(phase)
                alive |= {state: allocator.alloc(state.size) for state in self._held_as("optimizer state")}
            if not block.size:
                continue
            if born:
                made[block] = allocator.alloc(block.size)
                if cublas is not None and phase not in started and block.operation in _PRODUCTS:
                    started.add(phase)  # the forward's thread has a handle, and the backward's another
                    allocator.alloc(cublas // 2)
            elif block in made:
                allocator.free(made.pop(block))
            elif block in alive:
                allocator.free(alive.pop(block))
            elif left:  # what the recorded step found is what the one before it made
                allocator.free(left.pop())
        for piece in left:
            allocator.free(piece)
        return list(made.values())

    def _held_as(self, category: str) -> list[Block]:
        return [block for block in self._held if block.category == category]
