"""What the README says to paste, works."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
SHORTER = {
    "flash-train": ["trainer.max_steps=4", "schedule.warmup_steps=1", "data.sequence_length=33", "data.batch_size=1"],
    "flash-compare": ["lengths=[32,48]", "steps=4"],
}
SHORTER["flash-train"] += ["validate_every=4", "trainer.limit_val_batches=1"]
for changes in SHORTER.values():
    changes += ["model.width=24", "model.depth=1", "loggers=csv"]
SHORTER["flash-tune"] = ["model.width=24", "model.depth=1", "data.sequence_length=33", "learning_rate.steps=20"]
SHORTER["flash-prepare"] = ["vocabulary_size=300", "validation=0.3", "processes=1"]
SHORTER["flash-bench"] = ["seconds=1e-6", "rounds=1"]
SHORTER["flash-plan"] = ["model.width=24", "model.depth=1", "model.heads=2", "vocabulary_size=211", "length_step=4096"]


CHAIN = "flash-export"  # in a block whose every line goes on from those before


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def lines(block: str) -> list[str]:
    stripped = [line.split("#")[0].strip() for line in block.splitlines()]
    return [line for line in stripped if line and not line.startswith(("make ", "wandb "))]


def commands() -> list[str]:
    """Those that run alone."""
    return [line for block in blocks("bash") if CHAIN not in block for line in lines(block)]


def run(command: list[str], folder: Path) -> str:
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, f"{shlex.join(command)}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"Text {number} says what texts say, as texts do. " * 9)


def test_the_two_commands_come_first():
    assert re.findall(r"^make \w+", blocks("bash")[0], re.MULTILINE) == ["make demo", "make test"]


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, tmp_path):
    name, *arguments = shlex.split(command)
    program = Path(sys.executable).parent / name
    shorter = [] if "--help" in arguments else SHORTER[name]
    if "-m" in arguments:  # what the recipe says of its own data stays
        shorter = [change for change in shorter if not change.startswith("data.")]
    if name == "flash-prepare" or "data=tokens" in arguments:
        write_texts(tmp_path / "texts")
    if "data=tokens" in arguments:  # which the command before it prepares
        before = next(command for command in commands() if "output=prepared" in command)
        run([str(program.with_name("flash-prepare")), *shlex.split(before)[1:], *SHORTER["flash-prepare"]], tmp_path)
    if name == "flash-compare":
        arguments = [argument for argument in arguments if not argument.startswith("lengths=")]
    run([str(program), *arguments, *shorter], tmp_path)


def test_a_run_becomes_text_and_a_transformers_folder_and_that_a_run(tmp_path):
    (block,) = [block for block in blocks("bash") if CHAIN in block]
    for line in lines(block):
        name, *arguments = shlex.split(line)
        shorter = {"flash-train": SHORTER["flash-train"], "flash-generate": ["max_new_tokens=9"]}.get(name, [])
        said = run([str(Path(sys.executable).parent / name), *arguments, *shorter], tmp_path)
        assert name != "flash-generate" or said.startswith("def ")


def test_the_first_example_prints_memory_and_speed(tmp_path):
    example = blocks("python")[0]
    assert 20 <= len(example.splitlines()) <= 45
    (tmp_path / "example.py").write_text(example)
    peak, speed = run([sys.executable, "example.py"], tmp_path).split()[-2:]
    assert int(peak) > 0 and float(speed) > 0


@pytest.mark.parametrize("number", range(1, len(blocks("python"))))
def test_every_other_example_runs(number, tmp_path):
    (tmp_path / "example.py").write_text(blocks("python")[number])
    run([sys.executable, "example.py"], tmp_path)
