"""Results as children leave them, invented: nothing here trains."""

from collections.abc import Mapping, Sequence
from typing import Any

from flash_train.comparison.plan import Run
from flash_train.comparison.results import Row, row_from_result

MIB = 2**20


def breakdown(peak: int, **changes: Any) -> dict[str, Any]:
    """A predicted step as a run's result.json has it: a tenth parameters, the rest activations, in two modules."""

    def phase(size: int) -> dict[str, Any]:
        parts = {"parameters": peak // 10, "activations": size - peak // 10}
        modules = {"model.blocks.0": size - 7, "(inputs)": 7}
        return {"measured": size, "categories": parts, "modules": modules, "culprits": {"score matrices": size}}

    phases = {"forward": phase(peak // 2), "backward": phase(peak), "optimizer": phase(peak // 3)}
    return {"source": "prediction", "phases": phases, "sdpa": [], **changes}


ADVICE = {"change": "flash attention", "saves": 60 * MIB, "peak": 41 * MIB, "fits": None, "basis": "modelled"}


def result(
    *,
    peak: int = 100 * MIB,
    speed: float = 1000.0,
    losses: Sequence[float] = (5.0, 4.0, 3.5),
    device: str = "cpu",
    asked: str = "naive",
    ran: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A result.json of flash-train's schema; `changes` replace its entries."""
    same = {"flash": "tiled", "sdpa": "sdpa_flash"} if device == "cpu" else {"flash": "triton", "sdpa": "sdpa_flash"}
    return {
        "status": "ok",
        "error": None,
        "steps": len(losses),
        "device": device,
        "environment": {"torch": "2.13.0", "git_commit": "abc", "device_name": "a device", "threads": 2},
        "parameters": 123_456,
        "initial_weights_sha256": "weights",
        "data": {"source": "docs", "first_batches_sha256": "batches"},
        "attention": {"asked": asked, "ran": ran or same.get(asked, asked), "reason": None},
        "rewritten_by_compiler": 0,
        "memory": {
            "device": device,
            "source": "profiler",
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": None,
            "phases": {"forward": peak // 2, "backward": peak, "optimizer": peak // 3, "validation": None},
            "alloc_retries": 0,
            "predicted_bytes": peak * 101 // 100,
            "prediction_error_percent": 1.0,
            "prediction_refusal": None,
            "prediction": breakdown(peak * 101 // 100),
            "advice": [ADVICE] if asked == "naive" else [],
            "outside_resets": 0,
        },
        "speed": {"tokens_per_second": speed, "step_ms": 7.0, "data_wait_percent": 0.1, "mfu_percent": None},
        "loss_curve": [[step, loss] for step, loss in enumerate(losses)],
        "seconds": 3.0,
        **changes,
    }


def row(arm: str, length: int, *, repeat: int = 1, measured: bool = True, **changes: Any) -> Row:
    """The row of an invented result."""
    run = Run(arm=arm, length=length, repeat=repeat, measured=measured)
    return row_from_result(run, result(asked=arm, **changes), seconds=3.0, folder=run.name)


def judged_rows(losses: Mapping[str, Sequence[float]], *, length: int = 37) -> list[Row]:
    """The runs that a judgement at `length` needs, by arm; the reference's second run repeats its first."""
    rows = [row(arm, length, losses=curve) for arm, curve in losses.items()]
    return [*rows, row("naive", length, repeat=2, measured=False, losses=losses["naive"])]
