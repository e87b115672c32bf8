"""Launch choices as data: (architecture, bytes an element) -> direction -> tile width -> block sizes, warps, stages.

Where they come from:
- sm_90, 2 bytes: chosen by time on one NVIDIA H200 (torch 2.11.0+cu130, triton 3.6.0, 2026-11-29), causal, bf16, from
  4 to 6 candidates a row at B2 H32 T8192 D64, B2 H16 T8192 D128 and B2 H8 T8192 D256 (`triton.testing.do_bench`).
- its rows for a bias or boolean mask ("dense"), D 64 and 128: the same way on 2026-11-30, from 5 or 6 candidates a row,
  with a bf16 bias [1, H, T, T]; their tiles take shared memory from the stages.
- all others: by registers, spills and shared memory of the compiled kernel alone (triton 3.7.1); never timed.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Launch:
    block_t: int
    """Rows of a query tile."""
    block_s: int
    """Rows of a key tile."""
    warps: int
    stages: int


DIRECTIONS = ("forward", "dkdv", "dq")
"""dkdv: a tile of keys stays while queries pass by; dq: a tile of queries stays while keys pass by."""

_FP32 = {  # IEEE products run on the ordinary cores: small tiles, so that the accumulators stay in registers
    "forward": {64: Launch(32, 32, 4, 1), 128: Launch(32, 32, 4, 1), 256: Launch(16, 16, 4, 1)},
    "dkdv": {64: Launch(32, 32, 4, 1), 128: Launch(16, 32, 8, 1), 256: Launch(16, 16, 8, 1)},
    "dq": {64: Launch(32, 32, 4, 1), 128: Launch(32, 16, 8, 1), 256: Launch(16, 16, 8, 1)},
}
_SM_90 = {
    "forward": {64: Launch(64, 64, 4, 3), 128: Launch(64, 64, 4, 3), 256: Launch(128, 64, 8, 2)},
    "dkdv": {64: Launch(64, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(64, 64, 8, 1)},
    "dq": {64: Launch(128, 64, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(128, 64, 8, 1)},
    "forward_dense": {64: Launch(64, 32, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(128, 64, 8, 1)},
    "dkdv_dense": {64: Launch(64, 64, 4, 1), 128: Launch(64, 64, 4, 1), 256: Launch(64, 64, 8, 1)},
    "dq_dense": {64: Launch(64, 32, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(128, 64, 8, 1)},
}
_SM_80 = {
    "forward": {64: Launch(128, 32, 4, 3), 128: Launch(128, 64, 8, 2), 256: Launch(64, 32, 8, 2)},
    "dkdv": {64: Launch(32, 128, 8, 2), 128: Launch(32, 64, 8, 2), 256: Launch(32, 32, 8, 1)},
    "dq": {64: Launch(64, 64, 4, 2), 128: Launch(64, 64, 8, 2), 256: Launch(64, 16, 8, 1)},
}
_SM_86 = {
    "forward": {64: Launch(128, 32, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(64, 16, 8, 1)},
    "dkdv": {64: Launch(32, 128, 8, 2), 128: Launch(32, 64, 8, 2), 256: Launch(32, 32, 8, 1)},
    "dq": {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 8, 1), 256: Launch(32, 16, 8, 1)},
}
_SMALL = Launch(32, 16, 4, 1)

TABLE: dict[tuple[str, int], dict[str, dict[int, Launch]]] = {
    ("sm_90", 2): _SM_90,
    ("sm_100", 2): _SM_90,
    ("sm_80", 2): _SM_80,
    ("sm_86", 2): _SM_86,
    ("gfx942", 2): _SM_86,
    ("interpreter", 2): {direction: {256: _SMALL} for direction in DIRECTIONS},
    ("interpreter", 4): {direction: {256: _SMALL} for direction in DIRECTIONS},
    **{(name, 4): _FP32 for name in ("sm_90", "sm_100", "sm_80", "sm_86", "gfx942")},
}


def lookup(architecture: str, direction: str, itemsize: int, width: int, *, dense: bool = False) -> Launch:
    """The row for tiles of `width` columns (the head size, padded to a power of two); `dense`: with a bias or mask."""
    table = TABLE[architecture, itemsize]
    rows = table.get(f"{direction}_dense", table[direction]) if dense else table[direction]
    return rows[min(size for size in rows if size >= width)]


def smaller(launch: Launch) -> Launch | None:
    """The next launch that takes less shared memory: fewer stages, then fewer keys, then fewer queries a tile."""
    if launch.stages > 1:
        return replace(launch, stages=launch.stages - 1)
    if launch.block_s > 16:
        return replace(launch, block_s=launch.block_s // 2)
    return replace(launch, block_t=launch.block_t // 2) if launch.block_t > 16 else None
