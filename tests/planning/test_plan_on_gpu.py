"""A plan keeps its word on a GPU that is made as small as the one that was planned for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUDGET = "24GiB"


def command(name: str, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        f"flash_train.commands.{name}",
        "recipes=gpt2_124m",
        "loss=full",
        "loggers=none",
        *overrides,
    ]


def training(arm: str, length: int, folder: Path, *more: str) -> list[str]:
    """Three steps of what was planned: eager, one row of T tokens, accumulated."""
    return command(
        "train", f"attention={arm}", "data=python_docs", f"data.sequence_length={length}", "data.batch_size=1",
        f"batch_tokens={2 * length}", "compile=off", "trainer.max_steps=3", "trainer.limit_val_batches=0",
        "schedule.warmup_steps=1", "callbacks.checkpoint=null", "callbacks.memory.predict=false",
        f"hydra.run.dir={folder}", *more,
    )  # fmt: skip


def outcomes(folder: Path, arm: str, lengths: list[int], *more: str) -> list[dict[str, Any]]:
    """What became of a run at each of `lengths`, one after the other: of three arms at once each has its 24 GiB."""
    found = []
    for length in lengths:
        run = folder / str(length)
        subprocess.run(training(arm, length, run, *more), capture_output=True, timeout=120)
        found.append(json.loads((run / "result.json").read_text()))
    return found


def test_the_runs_that_confirm_a_plan_are_what_was_planned(tmp_path: Path) -> None:
    small = ("model.width=32", "model.depth=1", "model.heads=2", "trainer=cpu", "precision=fp32")
    (found,) = outcomes(tmp_path, "flash", [64], *small)
    assert (found["status"], found["steps"]) == ("ok", 3), found["error"]


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["naive", "sdpa", "flash"])
def test_the_longest_length_of_a_plan_fits_its_budget_and_a_tenth_more_does_not(arm: str, tmp_path: Path) -> None:
    planned = tmp_path / "plan"
    subprocess.run(command("plan", f"budget={BUDGET}", f"arms=[{arm}]", f"hydra.run.dir={planned}"), check=True)
    longest = json.loads((planned / "results.json").read_text())["arms"][arm]["longest_length"]
    longer = round(1.1 * longest / 64) * 64
    fits, dies = outcomes(tmp_path, arm, [longest, longer], f"budget={BUDGET}")
    taken = (fits["memory"] or {}).get("peak_allocated_bytes") or 0
    print(f"\n{arm}: T={longest} takes {taken / 2**30:.2f} GiB of {BUDGET}; T={longer}: {dies['error']}")
    assert fits["status"] == "ok", fits["error"]
    assert fits["environment"]["budget_bytes"] == 24 * 2**30
    assert dies["status"] == "oom", dies["error"]
