"""Which runs a comparison consists of, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

REFERENCE = "naive"
REORDERED = "naive_reversed"
JUDGED_LENGTHS = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """One child process: one implementation at one sequence length.

    A run that is `measured` is a point on the charts; the others only serve the noise floor of the losses.
    """

    arm: str
    length: int
    repeat: int = 1
    measured: bool = True

    @property
    def name(self) -> str:
        return f"{self.arm}_T{self.length}_{self.repeat}"

    def __str__(self) -> str:
        repeat = f", repeat {self.repeat}" if self.repeat > 1 else ""
        return f"{self.arm} at T={self.length}{repeat}"


def check_arms(arms: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError unless `arms` names at least one implementation, each of them `known` and named once."""
    _check_listed("arms", "implementations", arms, f"arms=[{','.join(known[:1])}]")
    unknown = [arm for arm in arms if arm not in known]
    if unknown:
        raise ValueError(f"arms must name known implementations, got {unknown[0]!r}; known are {', '.join(known)}")


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise ValueError unless `lengths` holds at least one sequence length, each a positive integer given once."""
    _check_listed("lengths", "sequence lengths", lengths, "lengths=[512,1024]")
    for length in lengths:
        check_positive("lengths", length)


def check_positive(key: str, value: object) -> None:
    """Raise ValueError unless `value`, given as `key`, is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be made of positive integers, got {value!r}")


def _check_listed(key: str, what: str, values: Sequence[object], example: str) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{key} must be a list of {what}, got {values!r}; write it as {example}")
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ValueError(f"{key} must name each of its {what} once, got {repeated[0]!r} twice; see also repeats=2")


def plan_runs(arms: Sequence[str], lengths: Sequence[int], *, repeats: int, judged: Sequence[int]) -> list[Run]:
    """The runs in their order: lengths from short to long; every second repeat visits the arms backwards, so that
    a machine that warms up or slows down favours no arm. The noise floor adds its runs at the `judged` lengths:
    the reference twice, and the reference with the keys visited in reverse order.
    """
    runs: list[Run] = []
    for length in sorted(lengths):
        for repeat in range(1, repeats + 1):
            ordered = arms if repeat % 2 else tuple(reversed(arms))
            runs += [Run(arm=arm, length=length, repeat=repeat) for arm in ordered]
        if length in judged:
            for arm, repeat in ((REFERENCE, 1), (REFERENCE, 2), (REORDERED, 1)):
                if arm not in arms or repeat > repeats:
                    runs.append(Run(arm=arm, length=length, repeat=repeat, measured=False))
    return runs


def rows_per_micro_batch(length: int, *, batch_size: int, micro_batch_tokens: int | None) -> int:
    """Rows of `length` tokens in a micro-batch: always `batch_size`, or as many as make `micro_batch_tokens`."""
    if micro_batch_tokens is None:
        return batch_size
    if micro_batch_tokens % length:
        raise ValueError(
            f"micro_batch_tokens must be a multiple of every length, got {micro_batch_tokens} for T={length}; "
            f"{max(1, micro_batch_tokens // length) * length} would do for this length"
        )
    return micro_batch_tokens // length


def check_batch_tokens(batch_tokens: int | None, *, rows: int, length: int, devices: int) -> None:
    """Raise ValueError unless a global batch of `batch_tokens` is a whole number of micro-batches at this length."""
    at_once = rows * length * devices
    if batch_tokens is not None and batch_tokens % at_once:
        raise ValueError(
            f"batch_tokens must be a multiple of the micro-batch at every length, got {batch_tokens} for "
            f"{at_once} tokens ({rows} rows of T={length} on {devices} devices); give micro_batch_tokens, or "
            "batch_tokens=null"
        )
