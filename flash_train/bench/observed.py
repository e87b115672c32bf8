"""The process that `ncu` observes: each contestant's calls, once each, between marks.

python -m flash_train.bench.observed CONFIGURATION REPORT: the composed configuration as JSON, and the file that gets
what became of each contestant.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from flash_train.bench.measure import admitted, noted
from flash_train.bench.settings import Contest, read_traffic

CALL, REST = "call", "rest"
"""The two stretches of a measurement: the call, then what pushes that call's results out of the cache."""


def mark(case: int, contestant: str, direction: str, stretch: str) -> str:
    """The name of a stretch; the case by its number."""
    return f"traffic.{case}.{contestant}.{direction}.{stretch}"


class Observer(Protocol):
    def sweep(self) -> None:
        """Leave nothing in the cache that was there before, and nothing that has still to be written to memory."""

    def stretch(self, name: str) -> Any:
        """A context manager: what kernels do inside is counted under `name`."""


class Ncu:
    """Marks that `ncu` sees."""

    def __init__(self, device: torch.device) -> None:
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
        self._filling = torch.zeros(size // 4, device=device)

    def sweep(self) -> None:
        """By reading: what has only been read is not written when its place is taken."""
        self._filling.max()
        torch.cuda.synchronize()

    @contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        number = torch.cuda.nvtx.range_start(name)  # push and pop mark one thread, and backwards run in another
        try:
            yield
            torch.cuda.synchronize()
        finally:
            torch.cuda.nvtx.range_end(number)
            torch.cuda.profiler.stop()


def run(contest: Contest, observer: Observer) -> list[dict[str, Any]]:
    """Every call of the contest between marks; what became of each contestant on each problem."""
    found = []
    for number, case in enumerate(contest.cases):
        with admitted(case, contest) as (entries, works):
            for entry in entries:
                if entry.status == "ok":
                    with noted(entry):
                        for direction in contest.directions:
                            call = works[entry.contestant].call(direction)
                            observer.sweep()
                            with observer.stretch(mark(number, entry.contestant, direction, CALL)):
                                call()
                            with observer.stretch(mark(number, entry.contestant, direction, REST)):
                                observer.sweep()
                print(f"{case}: {entry.contestant}: {entry.status}", flush=True)
                found.append(
                    {
                        "case": number,
                        "contestant": entry.contestant,
                        "ran": entry.ran,
                        "status": entry.status,
                        "why": entry.why,
                    }
                )
    return found


def main() -> None:
    contest = read_traffic(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(run(contest, Ncu(contest.device))))


if __name__ == "__main__":
    main()
