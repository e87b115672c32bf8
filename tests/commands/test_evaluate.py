import json
from pathlib import Path

from flash_train.commands import evaluate, train
from tests.commands.conftest import SHORT, Command


def test_a_checkpoint_is_judged_over_the_whole_validation_split(command: Command, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 300)
    whole = (
        "data=text",
        "data.paths=text.txt",
        "validate_every=2",
        "trainer.limit_val_batches=1.0",
        "trainer.overfit_batches=0",
    )
    fitted = command(train.main, *SHORT, *whole)
    assert fitted.code == 0, fitted.err
    answer = command(
        evaluate.main, "checkpoint=run", "json=evaluation.json", "data.batch_size=33", "trainer.overfit_batches=1"
    )
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "evaluation.json").read_text())
    seen_in_training = json.loads((tmp_path / "run" / "result.json").read_text())["validation"]
    assert abs(found["loss"] - seen_in_training["loss"]) < 1e-5
    assert abs(found["bits_per_byte"] - seen_in_training["bits_per_byte"]) < 1e-5
    assert f"{found['loss']:.4f}" in answer.out and found["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", "run", "text.txt"]


def test_a_model_that_is_not_the_checkpoint_s_is_refused_in_one_line(command: Command) -> None:
    command(train.main, *SHORT)
    answer = command(evaluate.main, "checkpoint=run", "model.width=32")
    assert answer.code == 2 and "does not fit this model and data" in answer.err
    assert len(answer.err.splitlines()) == 1


def test_a_checkpoint_has_to_be_named(command: Command) -> None:
    answer = command(evaluate.main)
    assert (answer.code, answer.err) == (2, "flash-eval: checkpoint has no default; give checkpoint=...\n")


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(command: Command) -> None:
    command(train.main, *SHORT)
    for file in ("nowhere/a.json", "run"):
        answer = command(evaluate.main, "checkpoint=run", f"json={file}")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == f"flash-eval: json must be a file in a folder that exists, got {file!r}\n"
