"""`flash-train` from the command line to what lies in the run folder."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock

from flash_train.commands import objects
from flash_train.commands.run import judge
from flash_train.commands.train import main
from tests.commands.conftest import SHORT, Command


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_its_configuration_and_what_it_measured(command: Command, tmp_path: Path) -> None:
    answer = command(main, *SHORT, "data.sequence_length=37", "validate_every=2", "trainer.limit_val_batches=1")
    assert answer.code == 0, answer.err
    found = result(tmp_path / "run")
    assert f"run folder: {tmp_path / 'run'}" in answer.out
    assert re.search(rf"^  total +{found['parameters']:,} +100.0 %$", answer.out, re.MULTILINE)
    assert (found["status"], found["error"], found["steps"], found["device"]) == ("ok", None, 2, "cpu")
    assert found["attention"] == {"asked": "flash", "ran": "tiled", "reason": found["attention"]["reason"]}
    assert len(found["loss_curve"]) == 2 and len(found["initial_weights_sha256"]) == 64
    assert found["environment"]["torch"] == torch.__version__
    assert {"memory", "speed", "data", "parameters", "seconds", "rewritten_by_compiler"} <= set(found)
    assert found["memory"]["source"] == "profiler" and found["validation"]["bits_per_byte"] > 1
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["schedule"]["warmup_steps"] == 1 and config["data"]["sequence_length"] == 37
    assert "${" not in (tmp_path / "run" / "config.yaml").read_text()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002.ckpt"]


def test_the_probe_is_one_more_callback_and_writes_into_the_run_folder(command: Command, tmp_path: Path) -> None:
    answer = command(main, *SHORT, "callbacks=[default,probe]", "attention=naive", "data.sequence_length=37")
    assert answer.code == 0, answer.err
    assert "untracked" in answer.out and "Score matrices in model.blocks.0.attention" in answer.out
    found = result(tmp_path / "run")["probe"]
    assert found == json.loads((tmp_path / "run" / "memory_probe.json").read_text()) | {"phases": found["phases"]}
    assert found["step"] == 1 and (tmp_path / "run" / "memory_probe.png").exists()


def test_packed_documents_windows_and_every_attention_feature_are_a_matter_of_overrides(
    command: Command, tmp_path: Path
) -> None:
    features = ("model.positions=alibi", "model.window=[5,null]", "model.soft_cap=30", "model.sinks=true")
    packing = ("model.attention_dropout=0.1", "data.separate_documents=true", "checkpointing=block", "loss=chunked")
    answer = command(main, *SHORT, *features, *packing)
    assert answer.code == 0, answer.err
    assert result(tmp_path / "run")["data"]["separate_documents"] is True


def test_another_optimizer_schedule_and_average_are_overrides_and_resumed(command: Command, tmp_path: Path) -> None:
    choices = ("optimizer=muon", "optimizer.no_decay=[*_embedding.*]", "schedule=wsd", "callbacks=[default,ema]")
    answer = command(main, *SHORT, *choices)
    assert answer.code == 0, answer.err
    answer = command(main, "resume_from=run", "trainer.max_steps=4")
    assert answer.code == 0, answer.err
    assert result(tmp_path / "run")["steps"] == 4
    answer = command(main, *SHORT, "optimizer.no_decay=[embeddings]")
    assert answer.code == 2 and "'embeddings' names no trainable parameter" in answer.err


def test_a_refused_run_still_leaves_a_result(command: Command, tmp_path: Path) -> None:
    command(main, *SHORT, "optimizer.lr=-1")
    found = result(tmp_path / "run")
    assert (found["status"], found["error"]) == ("failed", "Invalid learning rate: -1")
    assert "Traceback" in found["traceback"]


def test_what_an_implementation_does_not_take_is_a_refusal_and_no_failure(command: Command, tmp_path: Path) -> None:
    answer = command(main, *SHORT, "attention=sdpa", "model.attention_dropout=0.1")
    found = result(tmp_path / "run")
    assert answer.code == 2 and found["status"] == "refused" and "Traceback" not in answer.err
    assert found["error"] == "implementation='sdpa' does not take dropout on a CPU; use 'flash' or 'naive'"


def test_a_run_that_runs_out_of_memory_ends_with_code_3(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total of 1.00 GiB.")

    monkeypatch.setattr(objects.LanguageModel, "training_step", out_of_memory)
    answer = command(main, *SHORT)
    assert answer.code == 3 and "out of memory" in answer.err and "Traceback" not in answer.err
    assert result(tmp_path / "run")["status"] == "oom"
    text = "[enforce fail at alloc_cpu.cpp:126] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    assert judge(RuntimeError(text)).status == "oom"


def test_two_runs_do_not_write_into_one_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        answer = command(main, *SHORT)
    assert answer.code == 2 and answer.err.startswith(f"flash-train: another run is at work in {tmp_path / 'run'}; ")
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert command(main, *SHORT).code == 0


def test_what_nobody_expected_keeps_its_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.LanguageModel, "training_step", lambda *_: 1 / 0)
    answer = command(main, *SHORT)
    assert answer.code == 1 and "Traceback" in answer.err and "ZeroDivisionError" in answer.err


def test_a_folder_that_cannot_be_written_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    answer = command(main, *SHORT)
    assert answer.code == 2 and len(answer.err.splitlines()) == 1 and "config.yaml" in answer.err


@pytest.mark.parametrize(
    ("blocked", "code", "said"),
    [
        ("checkpoints", 2, "checkpoints: File exists"),
        (".lock/x", 2, "run: Is a directory"),
        ("result.json/x", 1, "result.json: Is a directory"),
    ],
)
def test_what_stands_in_the_way_of_a_file_is_named(
    command: Command, tmp_path: Path, blocked: str, code: int, said: str
) -> None:
    (tmp_path / "run" / blocked).parent.mkdir(parents=True)
    (tmp_path / "run" / blocked).touch()
    answer = command(main, *SHORT)
    (line,) = [line for line in answer.err.splitlines() if line.startswith("flash-train")]
    assert answer.code == code and line.endswith(said) and str(tmp_path / "run") in line
    assert not list((tmp_path / "run").glob(".result*"))


def test_the_global_batch_decides_the_accumulation(command: Command) -> None:
    trainer = {"devices": 2, "num_nodes": 1}
    data = {"batch_size": 4, "sequence_length": 32}
    assert objects.accumulate({"batch_tokens": 768, "data": data, "trainer": trainer}) == 3
    assert objects.accumulate({"batch_tokens": None, "data": data, "trainer": trainer}) == 1
    with pytest.raises(ValueError, match=r"4 x 32 x 2 = 256; the nearest that are: 512 or 768$"):
        objects.accumulate({"batch_tokens": 700, "data": data, "trainer": trainer})


@pytest.mark.parametrize("repeated", [0, 1])
def test_a_run_is_continued_in_its_folder_with_its_wandb_id(command: Command, tmp_path: Path, repeated: int) -> None:
    begun = [argument for argument in SHORT if not argument.startswith(("hydra.", "trainer.max_", "loggers"))]
    begun.append(f"trainer.overfit_batches={repeated}")
    assert command(main, *begun, "loggers=none", "hydra.run.dir=whole", "trainer.max_steps=4").code == 0
    assert command(main, *begun, "loggers=wandb", "hydra.run.dir=run", "trainer.max_steps=2").code == 0
    answer = command(main, "resume_from=run", "trainer.max_steps=4")
    assert answer.code == 0, answer.err
    assert "continues run/checkpoints/step_00000002.ckpt (step 2) in " in answer.out
    assert "changed: trainer.max_steps: 2 -> 4" in answer.out
    continued = result(tmp_path / "run")
    assert continued["resumed_from"] == "run/checkpoints/step_00000002.ckpt"
    assert continued["loss_curve"] == result(tmp_path / "whole")["loss_curve"]
    folders = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(folders) == 2 and len({name.rpartition("-")[2] for name in folders}) == 1


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("trainer.max_steps=2", 0, "has done its trainer.max_steps=2 steps; more of them continue it"),
        ("trainer.max_steps=1", 2, "must be at least the 2 steps that the checkpoint has done, got 1; give more"),
        ("model.depth=1", 2, "resume with the model of its checkpoint, where model.depth is 2, and now it is 1; leave"),
        ("model.window=3", 2, "where model.window is None, and now it is 3; leave it as it was, or start a new run"),
        ("vocabulary_size=300", 2, "does not fit this model and data: size mismatch"),
        ("data.separate_documents=true", 2, "where separate_documents is False, and now it is True"),
        ("data.seed=5", 2, "use the checkpoint's text and data.seed"),
        ("optimizer=muon", 2, "training.optimizer.adamw, and now it is flash_train.training.optimizer.muon; leave it"),
    ],
)
def test_a_run_that_cannot_go_on_keeps_what_it_had(
    command: Command, tmp_path: Path, change: str, code: int, said: str
) -> None:
    assert command(main, *SHORT).code == 0
    before = (tmp_path / "run" / "result.json").read_text()
    more = ["trainer.max_steps=4"] if code else []
    answer = command(main, "resume_from=run", *more, change)
    assert answer.code == code and "Traceback" not in answer.err, answer.err
    assert said in (answer.err if code else answer.out).splitlines()[-1]
    assert (tmp_path / "run" / "result.json").read_text() == before


def test_a_sweep_of_jobs_with_two_devices_runs_each_once_and_in_one_folder(tmp_path: Path, cache: str) -> None:
    sweep = ["-m", "model.heads=3,2", "attention=naive", "hydra.sweep.dir=sweep", "callbacks=none"]
    sweep += ["trainer.devices=2", "trainer.overfit_batches=0"]
    short = [argument for argument in SHORT if not argument.startswith("hydra.")]
    answer = subprocess.run(
        [sys.executable, "-m", "flash_train.commands.train", *short, *sweep],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1, answer.stderr
    assert "2 jobs: 1 ok, 1 failed" in answer.stdout and "exit 2: " in answer.stdout
    assert answer.stderr.startswith("flash-train: heads must divide width") and "Traceback" not in answer.stderr
    jobs = [result(tmp_path / "sweep" / str(number)) for number in range(2)]
    assert [job["status"] for job in jobs] == ["failed", "ok"]
    assert jobs[1]["attention"]["ran"] == "naive" and jobs[1]["steps"] == 2
    assert (tmp_path / "sweep" / "1" / "train_ddp_process_1.log").exists()  # the other rank's, beside the first's
    assert {path.name for path in tmp_path.iterdir()} == {"sweep"}
    assert {path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()} == {".jobs", "0", "1"}


def test_ctrl_c_leaves_a_checkpoint_and_a_result(tmp_path: Path, cache: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "flash_train.commands.train", *SHORT, "trainer.max_steps=100000"],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    while not run.stdout.readline().startswith("step 2/"):
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err, err
    found = result(tmp_path / "run")
    assert (found["status"], found["error"]) == ("interrupted", "interrupted")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{found['steps']:08d}.ckpt"
