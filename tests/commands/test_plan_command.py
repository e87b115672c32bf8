"""flash-plan as a person types it."""

import itertools
import json
from pathlib import Path

import pytest

from flash_train.commands.plan import main
from tests.commands.conftest import Command

SMALL = (
    "recipes=gpt2_124m", "model.width=32", "model.depth=2", "model.heads=2", "vocabulary_size=211",
    "data.sequence_length=2048", "budget=1.25GiB", "hydra.run.dir=run",
)  # fmt: skip


def test_it_plans_a_recipe_without_its_data_or_a_gpu(command: Command, tmp_path: Path) -> None:
    answer = command(main, *SMALL, "arms=[naive,flash]", "length_step=256")
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    naive, flash = (found["arms"][arm]["longest_length"] for arm in ("naive", "flash"))
    assert 0 < naive < flash and naive % 256 == 0
    assert "flash fits T = " in answer.out and "of compute capability 8.0" in answer.out
    assert found["command"].startswith("flash-plan recipes=gpt2_124m")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"results.json", "results.csv", "memory.png"}


def test_what_takes_less_memory_goes_further(command: Command, tmp_path: Path) -> None:
    longest = []
    residual, full = "precision.residual=bf16", "loss=full"
    none, activation, selective, block = (
        f"checkpointing={kind}" for kind in ("none", "activation", "selective", "block")
    )
    chunked = (block, "loss=chunked", "loss.z_loss=1e-4")
    for changes in (
        (full, none), (full, none, residual), (full, activation, residual), (full, selective, residual),
        (full, block, residual), chunked,
    ):  # fmt: skip
        answer = command(
            main, *SMALL, "arms=[flash]", "model.depth=6", "data.sequence_length=16384", "length_step=1024", *changes
        )
        assert answer.code == 0, answer.err
        found = json.loads((tmp_path / "run" / "results.json").read_text())
        longest.append(found["arms"]["flash"]["longest_length"])
    assert all(one < more for one, more in itertools.pairwise(longest))
    assert "checkpointing of each block, loss in chunks of 2,048 rows, z-loss 0.0001, eager" in answer.out


def test_an_arm_that_refuses_is_named_and_the_others_go_on(command: Command, tmp_path: Path) -> None:
    answer = command(main, *SMALL, "arms=[sdpa,flash]", "precision=fp32", "length_step=512", "loggers=wandb")
    assert answer.code == 0, answer.err
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1 and "wandb failed" not in answer.out
    assert "sdpa: refused: implementation='sdpa': torch's back end takes no q" in answer.out
    answer = command(main, *SMALL, "arms=[sdpa]", "precision=fp32")
    assert answer.code == 1 and "every arm refuses this model" in answer.out


@pytest.mark.parametrize(
    "change, text",
    [
        ("budget=null", "flash-plan: a plan must have a budget or a card"),
        ("trainer.devices=2", "flash-plan: a plan is for one device, got trainer.devices=2"),
        ("data.separate_documents=true", "flash-plan: a plan does not know where documents end"),
        ("measured=nowhere", "flash-plan: measured must be the results.json of a flash-compare, or its folder"),
        ("optimizer.lr=fast", "flash-plan: optimizer.lr must be float, got 'fast'"),
        ("batch_tokens=many", "flash-plan: batch_tokens must be a positive number of tokens or null, got 'many'"),
    ],
)
def test_a_wrong_setting_is_one_sentence(command: Command, change: str, text: str) -> None:
    answer = command(main, *SMALL, change)
    assert answer.code == 2
    assert answer.err.startswith(text) and answer.err.count("\n") == 1
