"""Launch choices of the Hopper kernels as data: tile width (the wider of D and E, padded) -> sizes.

Timed on an NVIDIA H200 (torch 2.11.0+cu130, triton 3.6.0, 2026-11-30): the rows of 64 and 128 against other sizes in
sketches of these kernels, the rows of 256 alone.
"""

from typing import NamedTuple

from flash_train.ops.features import Terms


def tile_width(size: int) -> int:
    """The width of a head size's tiles: a power of two, and whole swizzled rows of 128 bytes."""
    return max(64, 1 << (size - 1).bit_length())


class Forward(NamedTuple):
    consumers: int
    """Warpgroups of 64 queries each."""
    block_s: int
    """Rows of a key tile."""
    stages: int
    """Key tiles that wait in shared memory, and as many value tiles."""
    registers: int
    """Of a thread of a consumer."""
    few_registers: int
    """Of a thread of the producer."""


FORWARD = {
    64: Forward(consumers=3, block_s=128, stages=4, registers=160, few_registers=32),
    128: Forward(consumers=2, block_s=128, stages=2, registers=240, few_registers=24),
    256: Forward(consumers=2, block_s=64, stages=2, registers=240, few_registers=24),
}


class Backward(NamedTuple):
    block_t: int
    """Rows of a query tile: two warpgroups share dQ of it in halves of 64 rows and 64 columns."""
    block_s: int
    """Keys of a program: 128 in `backward.py`, 64 in `backward_wide.py`."""
    stages: int
    """Query tiles that wait in shared memory, and as many tiles of dO (one in `backward_wide.py`)."""
    registers: int
    """Of a thread of a consumer."""
    few_registers: int
    """Of a thread of the producer."""


BACKWARD = {
    64: Backward(block_t=128, block_s=128, stages=2, registers=240, few_registers=24),
    128: Backward(block_t=64, block_s=128, stages=2, registers=240, few_registers=24),
    256: Backward(block_t=64, block_s=64, stages=2, registers=240, few_registers=24),
}


def heads_together(T: int, width: int) -> int:
    """How many heads the backward's programs take at a time. Few keep Q, dO and dQ's sums in the L2 cache; but programs
    of one head that start at the same time wait for each other (`backward_deliver.py`), and short ones for much of
    their time: at T = 512 and width 64, 8 are 7 % slower than 64, and at T = 8,192, 16 are 3 % slower than 8."""
    return max(8, 2**21 // (max(T, 1) * width))


ENOUGH = 1024
"""Programs of the backward, of which the longest have twice the mean's work, for 132 multiprocessors."""


def programs_a_head(programs: int, group: int, terms: Terms) -> int:
    """Into how many programs one for keys of a head is split where `group` query heads share these: under a mask the
    fewest with which there are `ENOUGH`, each with as many heads and a dK and dV of its own, which are added up. Of few
    programs the longest leave most of the GPU idle in the end: with T = 8,192, D = 128 and one key head for 32, causal,
    the unsplit backward reaches 355 TFLOP/s, one in 4 530, in 8 to 32 550; without a mask 555, and as much split.
    """
    if not terms.is_bounded:
        return 1
    return next((split for split in range(1, group) if group % split == 0 and programs * split >= ENOUGH), group)


SHARED_BYTES = 227 * 1024
"""Of a program."""
