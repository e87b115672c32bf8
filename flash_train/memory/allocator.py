"""What torch's CUDA allocator makes of a limit: blocks cut from segments, and what lies between them unused.

By its defaults, as torch's notes on CUDA memory management and the comments in c10's CUDACachingAllocator tell them:
one stream, no expandable segments, no largest size of a split.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from flash_train.memory.cards import MIB, ROUNDING
from flash_train.memory.live import round_up

SMALL = MIB
"""Blocks up to so many bytes have segments of their own, and the rest of a large block is cut off above it."""
SMALL_SEGMENT, MIDDLE_SEGMENT = 2 * MIB, 20 * MIB
MIDDLE = 10 * MIB
"""Larger blocks below it share segments; from it on a segment is made for one block."""


class OutOfMemory(Exception):
    """`asked` bytes were neither free in one piece nor left below the limit."""

    def __init__(self, asked: int) -> None:
        super().__init__(asked)
        self.asked = asked


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a segment, taken or free, between its neighbours there. Bytes."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "Piece | None" = None
    after: "Piece | None" = None


class CachingAllocator:
    """Takes segments of a device with `limit` bytes, and gives blocks out of them. All sizes in bytes.

    >>> allocator = CachingAllocator(64 * MIB)
    >>> block = allocator.alloc(12 * MIB)
    >>> allocator.free(block)
    >>> _ = allocator.alloc(5 * MIB)  # 12 MiB are free, and 5 of them taken
    >>> allocator.reserved // MIB, allocator.allocated // MIB
    (12, 5)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """How often what was free was given back to the device for another segment."""
        self._free: dict[bool, list[tuple[int, int, Piece]]] = {True: [], False: []}
        """(size, address, piece), sorted, of small pieces and of large ones."""
        self._end = 0

    def alloc(self, size: int) -> Piece:
        """A block, to be given to `free`. Raises OutOfMemory."""
        size = max(ROUNDING, round_up(size, ROUNDING))
        small = size <= SMALL
        piece = self._best(size, small) or self._segment(size, small)
        rest = piece.size - size
        if rest >= ROUNDING if small else rest > SMALL:
            self._split(piece, size)
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return piece

    def free(self, piece: Piece) -> None:
        """Give a block back to its segment, where it becomes one with its free neighbours."""
        self.allocated -= piece.size
        if (before := piece.before) is not None and before.free:
            self._forget(before)
            piece = self._join(before, piece)
        if (after := piece.after) is not None and after.free:
            self._forget(after)
            piece = self._join(piece, after)
        self._keep(piece)

    def _best(self, size: int, small: bool) -> Piece | None:
        """The smallest that is free, and of these the first."""
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        *_, piece = free.pop(at)
        piece.free = False
        return piece

    def _segment(self, size: int, small: bool) -> Piece:
        middle = MIDDLE_SEGMENT if size < MIDDLE else round_up(size, 2 * MIB)
        segment = SMALL_SEGMENT if small else middle
        if self.reserved + segment > self.limit:
            self._give_back()
            if self.reserved + segment > self.limit:
                raise OutOfMemory(size)
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._end += segment
        return Piece(self._end - segment, segment, small)

    def _give_back(self) -> None:
        """All segments that are free as a whole."""
        self.retries += 1
        for free in self._free.values():
            for entry in list(free):
                size, _, piece = entry
                if piece.before is None and piece.after is None:
                    free.remove(entry)
                    self.reserved -= size

    def _split(self, piece: Piece, size: int) -> None:
        rest = Piece(piece.address + size, piece.size - size, piece.small, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.size, piece.after = size, rest
        self._keep(rest)

    def _join(self, first: Piece, second: Piece) -> Piece:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _keep(self, piece: Piece) -> None:
        piece.free = True
        insort(self._free[piece.small], (piece.size, piece.address, piece))

    def _forget(self, piece: Piece) -> None:
        free = self._free[piece.small]
        del free[bisect_left(free, (piece.size, piece.address))]
        piece.free = False
