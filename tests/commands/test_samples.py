"""Texts that are drawn after each validation."""

import json
from pathlib import Path

import pytest

from flash_train.commands.train import main
from tests.commands.conftest import SHORT, Command
from tests.comparison.wandb_offline import read_offline_run

SHORTER = ("callbacks.samples.count=2", "callbacks.samples.max_new_tokens=7", "callbacks.samples.prompt=def")
VALIDATED = ("validate_every=1", "trainer.limit_val_batches=1")


def test_samples_go_to_a_file_and_to_wandb_and_leave_training_alone(command: Command, tmp_path: Path) -> None:
    short = [argument for argument in SHORT if not argument.startswith(("loggers", "hydra"))]
    dropout = "model.dropout=0.1"  # so that training draws random numbers too
    assert command(main, *short, dropout, *VALIDATED, "loggers=none", "hydra.run.dir=plain").code == 0
    answer = command(
        main, *short, dropout, *VALIDATED, *SHORTER, "callbacks=[default,ema,samples]", "loggers=wandb",
        "hydra.run.dir=run",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    plain, sampled = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "run"))
    assert sampled["loss_curve"] == plain["loss_curve"]
    text = (tmp_path / "run" / "samples.txt").read_text()
    headings = [line for line in text.splitlines() if line.startswith("--- step")]
    assert headings == [f"--- step {step}, sample {number} ---" for step in (1, 2) for number in (0, 1)]
    assert text.count(" ---\ndef") == 4
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert read_offline_run(folder).complete
    tables = [json.loads(file.read_text()) for file in (folder / "files/media/table/validation").glob("samples_*.json")]
    assert sorted(row[:2] for table in tables for row in table["data"]) == [[1, 0], [1, 1], [2, 0], [2, 1]]
    assert all(table["columns"] == ["step", "sample", "text"] for table in tables)
    assert {row[2] for table in tables for row in table["data"]} <= {
        part.split(" ---\n", 1)[1].rstrip("\n") for part in text.split("--- step")[1:]
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("callbacks.samples.count=0", "count must be a positive number of texts, got 0"),
        ("callbacks.samples.prompt=''", "samples need a prompt of one token at least; set callbacks.samples.prompt="),
        ("callbacks.samples.temperature=-1", "temperature must be a number from 0 on, got -1"),
    ],
)
def test_what_no_sample_can_be_drawn_from_is_refused_before_the_first_step(
    command: Command, override: str, said: str
) -> None:
    answer = command(main, *SHORT, "callbacks=[default,samples]", override)
    assert answer.code == 2 and said in answer.err and "step 1/" not in answer.out
