"""flash-prepare from its command line, and the run that follows it."""

import json
from pathlib import Path

from flash_train.commands.evaluate import main as evaluate
from flash_train.commands.prepare import main
from flash_train.commands.train import main as train
from tests.commands.conftest import SHORT, Command


def test_texts_become_tokens_that_a_run_trains_on_and_an_evaluation_reads(command: Command, tmp_path: Path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"Text {number} says what texts say, as texts do. " * 9)
    given = ["paths=[*.txt]", "output=tokens", "tokenizer=bpe", "vocabulary_size=300", "processes=1", "validation=0.2"]
    answer = command(main, *given)
    assert answer.code == 0, answer.err
    assert "a vocabulary of 300" in answer.out and "flash-train data=tokens data.paths=tokens" in answer.out
    dataset = json.loads((tmp_path / "tokens" / "dataset.json").read_text())
    assert sum(part["documents"] for parts in dataset["splits"].values() for part in parts) == 40
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".txt"} == {"tokens"}
    written = (tmp_path / "tokens" / "dataset.json").stat().st_mtime_ns
    assert "a vocabulary of 300" in command(main, *given).out
    assert (tmp_path / "tokens" / "dataset.json").stat().st_mtime_ns == written, "the same command finds it done"
    options = ["data=tokens", "data.paths=tokens", "data.separate_documents=true", "trainer.overfit_batches=0"]
    answer = command(train, *SHORT, *options, "trainer.limit_val_batches=1.0", "validate_every=2")
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["data"]["source"] == "tokens" and found["data"]["tokenizer"] == "subwords"
    assert found["validation"]["bits_per_byte"] > 0
    answer = command(evaluate, "checkpoint=run", "json=found.json")
    assert answer.code == 0, answer.err
    assert json.loads((tmp_path / "found.json").read_text())["loss"] == found["validation"]["loss"]


def test_tokens_of_nobody_knows_which_bytes_train_and_evaluate_without_bits_per_byte(command: Command, tmp_path: Path):
    (tmp_path / "gpt").mkdir()
    for name in ("train.bin", "val.bin"):
        (tmp_path / "gpt" / name).write_bytes(bytes(range(1, 97)) * 20)
    options = ["data=tokens", "data.paths=gpt", "data.vocabulary_size=65536", "vocabulary_size=65536"]
    answer = command(train, *SHORT, *options, "trainer.limit_val_batches=1", "validate_every=2", "model.width=8")
    assert answer.code == 0, answer.err
    answer = command(evaluate, "checkpoint=run", "json=found.json")
    assert answer.code == 0, answer.err
    assert json.loads((tmp_path / "found.json").read_text())["bits_per_byte"] is None


def test_a_wrong_command_line_is_answered_in_one_sentence(command: Command, tmp_path: Path):
    (tmp_path / "a.txt").write_text("a text")
    for given, words in (
        (["output=out"], "flash-prepare: paths has no default; give paths=..."),
        (["paths=b.txt", "output=out"], "b.txt is not (No such file or directory); check the path"),
        (["paths=a.txt", "output=out", "validation=2"], "validation must be a share between 0 and 1, or files, got 2"),
        (["paths=a.txt", "output=out", "processes=0"], "processes must be a positive number or null, got 0"),
        (["paths=a.txt", "output=out", "format=csv"], "format must be text, jsonl, dataset or null, got csv"),
        (["paths=a.txt", "output=out", "shard_bytes=many"], "shard_bytes must be int, got 'many'"),
        (["paths=a.txt", "output=a.txt/out"], "cannot write a.txt/out: Not a directory"),
    ):
        answer = command(main, *given)
        assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) == 1, answer.err
