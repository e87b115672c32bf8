import json
import math
from pathlib import Path

import pytest

from flash_train.commands import evaluate, export, train
from flash_train.training.data.corpus import Corpus, build_corpus
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
    assert found["sources"] == {} and found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert seen_in_training["perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)


def test_a_cap_of_the_logits_is_the_run_s_own_also_where_it_is_judged_and_resumed(
    command: Command, tmp_path: Path
) -> None:
    """Under so small a cap every loss is the logarithm of the vocabulary, whatever the weights are."""
    (tmp_path / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 300)
    given = ("data=text", "data.paths=text.txt", "model.logit_soft_cap=1e-4", "loss=chunked", "loss.z_loss=1e-4")
    assert command(train.main, *SHORT, *given).code == 0
    assert command(train.main, "resume_from=run", "trainer.max_steps=4").code == 0
    uniform = math.log(256)
    for change, capped in (("loss=full", True), ("loss=chunked", True), ("model.logit_soft_cap=null", False)):
        answer = command(evaluate.main, "checkpoint=run", "json=found.json", change)
        assert answer.code == 0, answer.err
        loss = json.loads((tmp_path / "found.json").read_text())["loss"]
        assert (abs(loss - uniform) < 3e-4) is capped, (change, loss)
    curve = json.loads((tmp_path / "run" / "result.json").read_text())["loss_curve"]
    assert [loss for _, loss in curve] == pytest.approx([uniform + 1e-4 * uniform**2] * 4, abs=3e-4)
    answer = command(export.main, "checkpoint=run", "output=exported")
    assert answer.code == 2 and "transformers' gpt2 has no logit_soft_cap, got logit_soft_cap=0.0001" in answer.err


def test_each_source_has_the_score_that_it_has_alone_and_together_tokens_weigh(
    command: Command, tmp_path: Path
) -> None:
    texts = {"web": "It was a bright cold day in April. ", "code": "for i in range(9): print(i)\n"}
    for (name, text), count in zip(texts.items(), (400, 90), strict=True):
        (tmp_path / f"{name}.txt").write_text(text * count)
        build_corpus(Corpus([str(tmp_path / f"{name}.txt")], 0.3), tmp_path / name)
    mixed = ("data=tokens", "data.paths=[web,code]", "trainer.overfit_batches=0", "trainer.limit_val_batches=1.0")
    fitted = command(train.main, *SHORT, *mixed, "validate_every=2", "loggers=csv")
    assert fitted.code == 0, fitted.err
    logged = json.loads((tmp_path / "run" / "result.json").read_text())["validation"]
    metrics = (tmp_path / "run" / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    kinds = ("loss", "perplexity", "bits_per_byte")
    names = {f"validation/{source}{kind}" for source in ("", "web/", "code/") for kind in kinds}
    assert names == {name for name in metrics if name.startswith("validation/")}

    def found(*overrides: str) -> dict:
        answer = command(evaluate.main, "checkpoint=run", "json=found.json", "data.batch_size=5", *overrides)
        assert answer.code == 0, answer.err
        for name in ("web", "code", "all"):
            assert overrides or f"│ {name} " in answer.out
        return json.loads((tmp_path / "found.json").read_text())

    together, alone = found(), {name: found(f"data.paths=[{name}]") for name in texts}
    sizes = {name: alone[name]["tokens"] for name in texts}
    assert sizes["web"] > 3 * sizes["code"] and together["tokens"] == sum(sizes.values())
    for name in texts:
        assert together["sources"][name] == pytest.approx({kind: alone[name][kind] for kind in (*kinds, "tokens")})
        assert logged[f"{name}/loss"] == pytest.approx(alone[name]["loss"], rel=1e-5)
    weighted = sum(alone[name]["loss"] * sizes[name] for name in texts) / together["tokens"]
    assert together["loss"] == pytest.approx(weighted) and together["loss"] != pytest.approx(
        sum(each["loss"] for each in alone.values()) / 2, rel=1e-3
    )


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
