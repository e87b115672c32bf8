"""What a reader should know before trusting a number about memory: one sentence each."""

from collections.abc import Iterator, Sequence

from flash_train.comparison.results import Cell, Row
from flash_train.memory.sizes import human_bytes, human_error

FRAGMENTED = 0.1
UNSTABLE = 0.01
FAR_OFF = 10.0  # per cent


def cautions(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """Allocator retries, fragmentation, SDPA's math back end, resets from outside, repeats and predictions apart."""
    measured = [row for row in rows if row.measured]
    return [*_of_runs(measured), *_of_math(measured), *_of_repeats(measured), *_of_predictions(cells)]


def _of_runs(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.alloc_retries:
            yield (
                f"{row.name}: the allocator emptied its cache and tried again, {row.alloc_retries} times, which is "
                "slow: memory was all but full."
            )
        reserved, allocated = row.peak_reserved_bytes or 0, row.peak_allocated_bytes or 0
        if allocated and reserved - allocated > FRAGMENTED * reserved:
            yield (
                f"{row.name}: fragmentation, {1 - allocated / reserved:.0%} of the {human_bytes(reserved)} reserved "
                "were never allocated; PYTORCH_ALLOC_CONF=expandable_segments:True may need less."
            )
        if row.outside_resets:
            yield (
                f"{row.name}: somebody else reset the allocator's peaks {row.outside_resets} times, so that they may "
                "be too low."
            )


def _of_math(rows: Sequence[Row]) -> Iterator[str]:
    told: dict[tuple[str, str], None] = {}
    for row in rows:
        uses = (row.breakdown or {}).get("sdpa") or () if row.arm != "sdpa_math" else ()
        for use in uses:
            if use["backend"] == "math":
                told[row.arm, use["reason"]] = None
    for arm, reason in told:
        yield f"{arm}: SDPA took its math back end, which keeps the scores: {reason}"


def _of_repeats(rows: Sequence[Row]) -> Iterator[str]:
    groups: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        if row.status == "ok" and row.peak_allocated_bytes:
            groups.setdefault((row.arm, row.length), []).append(row.peak_allocated_bytes)
    for (arm, length), peaks in groups.items():
        if max(peaks) > (1 + UNSTABLE) * min(peaks):
            yield (
                f"{arm} at T={length}: unstable, its repeats peaked from {human_bytes(min(peaks))} to "
                f"{human_bytes(max(peaks))}."
            )


def _of_predictions(cells: Sequence[Cell]) -> Iterator[str]:
    for cell in cells:
        error = cell.prediction_error_percent
        if error is not None and abs(error) > FAR_OFF:
            yield (
                f"{cell.arm} at T={cell.length}: the predicted peak is off by {human_error(error)}; a compiled step, "
                "another back end of SDPA, or an operator that declares no workspace would explain it."
            )
