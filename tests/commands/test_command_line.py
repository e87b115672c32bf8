"""What a person is told who types something that is not right: one line, exit code 2, nothing of Hydra's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_train.commands.overrides import merge
from flash_train.commands.train import main
from tests.commands.conftest import SHORT, Command

WRONG = {
    ("atention=naive",): "there is no 'atention'; did you mean attention?",
    ("attention=flesh",): "attention has no 'flesh'; did you mean flash?",
    ("recipes=shakespear",): "recipes has no 'shakespear'; did you mean shakespeare_char?",
    ("model.dept=3",): "there is no 'model.dept'; did you mean model.depth",
    ("max_steps=3",): "there is no 'max_steps'; did you mean trainer.max_steps?",
    ("+model.colour=red",): "model takes no 'colour'",
    ("attention=[naive,flash]",): "flash-compare, or run one after the other with -m attention=naive,flash",
    ("callbacks=[default,prob]",): "callbacks has no 'prob'; did you mean probe?",
    ("attention=naive,flash",): "add -m to run one after the other",
    ("-m", "attention=naive,flesh"): "attention has no 'flesh'",
    ("-m", "hydra/sweeper=basik", "seed=1,2"): "hydra/sweeper has no 'basik' (set in a recipe?); did you mean basic?",
    ("loggers=null",): "write loggers=none",
    ("~trainer",): "trainer cannot be taken away",
    ("eval",): "'eval' is not an override; write key=value",
    ("data.batch_size=[1,",): "cannot read the value of 'data.batch_size=[1,'",
    ("data.batch_size=many",): "data.batch_size must be int, got 'many'",
    ("trainer.max_steps=1.5",): "trainer.max_steps must be int, got 1.5",
    ("trainer.accelerator=auto",): "trainer.accelerator must be cpu or cuda, got 'auto'",
    ("precision.float32_matmul=tf32",): "precision.float32_matmul must be highest, high or medium",
    ("seed=lucky",): "seed must be int, got 'lucky'",
    ("seed=4294967296",): "seed must be a whole number from 0 to 4294967295, got 4294967296",
    ("gradient_clip=much",): "gradient_clip must be float | None, got 'much'",
    ("compile.enabled=maybe",): "compile.enabled must be bool, got 'maybe'",
    ("compile.mode=fast",): "compile.mode must be default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs",
    ("+compile.dynamic=true",): "compile takes no 'dynamic'",
    ("trainer.devices=auto",): "trainer.devices must be a positive number or a list of device numbers, got 'auto'",
    ("trainer.devices=[0,1]",): "on a CPU trainer.devices is a number of processes, got [0, 1]",
    ("optimizer.weight_decay=-1", *SHORT): "weight_decay cannot be -1",
    # What would be accepted and then overruled by what other keys say.
    (
        "+trainer.precision=bf16-mixed",
    ): "trainer.precision follows from other settings and cannot be given; see precision",
    ("+trainer.max_epochs=3",): "see trainer.max_steps",
    ("+model.context_length=9",): "see data.sequence_length",
    # What nothing would read.
    ("+atention=naive",): "there is no 'atention' (set in a recipe?); did you mean attention?",
    ("+recipes=demo",): "recipes has a choice already; write recipes=demo, without the +",
    ("--recipes", "demo"): "unrecognized arguments: --recipes; overrides have no dashes",
    ("--cfg", "jop"): "invalid choice: 'jop'",
    ("~callbacks.memori",): "there is no 'callbacks.memori'; did you mean callbacks.memory",
    ("optimizer.lr=fast",): "optimizer.lr must be float, got 'fast'",
    ("model.heads=3", *SHORT): "heads must divide width",
    ("optimizer.lr=-1", *SHORT): "Invalid learning rate",
    ("batch_tokens=1000",): "the nearest that are: 4096",
    ("data=text",): "paths",
    ("resume_from=nowhere",): "nowhere does not exist",
    ("-m", "resume_from=a,b"): "resume_from recalls the command line of one run; leave out -m",
    ("hydra.run.dir=/dev/null/run",): "/dev/null/run: Not a directory",
    ("callbacks.checkpoint.every_n_train_steps=0", *SHORT): "every_n_train_steps",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_command_line_is_answered_in_one_line(command: Command, arguments: tuple[str, ...]) -> None:
    answer = command(main, *arguments)
    assert answer.code == 2
    lines = [line for line in answer.err.splitlines() if line]
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("flash-train: ") and WRONG[arguments] in lines[0]
    assert "HYDRA_FULL_ERROR" not in answer.out + answer.err and "Traceback" not in answer.out + answer.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_said_in_one_line(command: Command) -> None:
    answer = command(main, "trainer=cuda")
    assert (answer.code, answer.err.strip()) == (
        2,
        "flash-train: trainer=cuda needs a CUDA device and torch sees none; choose trainer=cpu",
    )


def test_a_key_of_a_recipe_that_nothing_reads_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipes").mkdir(parents=True)
    (tmp_path / "mine" / "recipes" / "typo.yaml").write_text("# @package _global_\noptimiser:\n  lr: 1\n")
    answer = command(main, "--config-dir", "mine", "recipes=typo")
    assert answer.code == 2 and "there is no 'optimiser' (set in a recipe?); did you mean optimizer" in answer.err


def test_help_configuration_and_completion_come_without_torch() -> None:
    script = """
import os, sys
from flash_train.commands import train, evaluate
for arguments in (["--help"], ["--cfg", "job", "recipes=demo"], ["-sc", "install=bash"], ["-sc", "query=bash"],
                  ["attention=flesh"], ["--info", "defaults"]):
    sys.argv[1:] = arguments
    for command in (train, evaluate):
        try:
            command.main()
        except SystemExit as stop:
            assert not stop.code or arguments == ["attention=flesh"], arguments
for module in ("torch", "lightning", "triton", "wandb", "numpy"):
    assert module not in sys.modules, module
"""
    environment = {**os.environ, "COMP_LINE": "flash-train recipes=overf", "COMP_POINT": "25"}
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert "recipes: demo" in answer.stdout and "recipes=overfit_tiny" in answer.stdout


def test_a_reader_that_stops_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "flash_train.commands.train", "--help"]
    answer = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert answer.stderr == ""


def test_an_override_given_when_resuming_overrules_the_earlier_ones() -> None:
    saved = [
        "model=gpt_nano",
        "model.depth=3",
        "trainer.max_steps=5",
        "~callbacks.memory",
        "+trainer.overfit_batches=1",
    ]
    assert merge(saved, ["trainer.max_steps=9", "resume_from=run"]) == [
        "model=gpt_nano",
        "model.depth=3",
        "~callbacks.memory",
        "+trainer.overfit_batches=1",
        "trainer.max_steps=9",
        "resume_from=run",
    ]
    assert merge(saved, ["model=gpt_demo"])[0] == "trainer.max_steps=5"  # model.depth belonged to the earlier model
    assert merge(saved, ["recipes=demo", "resume_from=run"]) == ["recipes=demo", "resume_from=run"]
