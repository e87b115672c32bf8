"""Which launches of a portable kernel are worth compiling."""

from itertools import product

from flash_train.ops.kernels.tables import Launch

_BLOCKS = (16, 32, 64, 128)
_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)
_SCORES = 1024
"""A warp has as many bytes of a tile of scores at least, in the inputs' type: below, most of its time is overhead."""
_THREADS = 32
_REGISTERS = 232
"""Of a thread's 255; addresses and the rows' state need some."""

_IN_REGISTERS = ("sm_80", "sm_86", "sm_90")
"""Where accumulators lie in threads' registers, 255 a thread: sm_100 has a memory for them, gfx942 other registers."""


def candidates(
    architecture: str, direction: str, widths: tuple[int, int], itemsize: int, *, shared_bytes: int
) -> dict[Launch, str | None]:
    """A grid of launches, each with the reason why it is not even compiled, or None.

    A reason is certain: accumulators and scores alone need more registers than a thread has, where we know how many
    that are, or the tiles that wait (one fewer than there are stages) more than `shared_bytes`. `widths` are
    `launch.tile_widths`.
    """
    d, e = widths
    found = {}
    for t, s, warps, stages in product(_BLOCKS, _BLOCKS, _WARPS, _STAGES):
        numbers = {
            "forward": t * e + t * s,
            "dkdv": s * (d + e) + 2 * s * t,
            "dq": t * d + 2 * t * s,
        }[direction] / (_THREADS * warps)  # fp32, a register each  # fmt: skip
        held, passing = (s, t) if direction == "dkdv" else (t, s)
        waiting = (stages - 1) * passing * (d + e) * itemsize
        if held < 32 or t * s * itemsize < _SCORES * warps:
            continue
        reason = None
        if architecture in _IN_REGISTERS and numbers > _REGISTERS:
            reason = f"its accumulators and scores take {numbers:.0f} registers of a thread, {_REGISTERS} there are"
        elif waiting > shared_bytes:
            reason = f"its waiting tiles take {waiting} bytes of shared memory, {shared_bytes} there are"
        found[Launch(t, s, warps, stages)] = reason
    return found
