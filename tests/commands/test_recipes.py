"""Every recipe says what it shows, and takes a step: on this CPU, with the sizes cut down and nothing else."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from flash_train.commands.train import main
from flash_train.config import config_root
from flash_train.training.data.corpus import Corpus, build_corpus
from tests.commands.conftest import Command

RECIPES = sorted((config_root() / "recipes").glob("*.yaml"))

CUT_DOWN = (
    "model.width=24",
    "model.depth=1",
    "model.heads=2",
    "data.sequence_length=19",
    "data.batch_size=2",
    "batch_tokens=76",
    "trainer=cpu",
    "trainer.max_steps=1",
    "trainer.limit_val_batches=1",
    "++trainer.overfit_batches=0",
    "compile=off",
    "precision=fp32",
    "schedule.warmup_steps=0",
    "validate_every=1",
    "loggers=csv",
    "hydra.run.dir=run",
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_has_its_header(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    header = dict(re.findall(r"^# (\w+): +(\S.*)$", "\n".join(lines[1:5]), flags=re.MULTILINE))
    assert list(header) == ["Shows", "Run", "Takes", "Expect"]
    assert f"recipes={recipe.stem}" in header["Run"]
    assert header["Run"].startswith(("flash-train ", "flash-compare "))
    for sentence in ("Shows", "Takes", "Expect"):
        assert header[sentence].endswith("."), sentence
    assert re.search(r"\d", header["Expect"]), "an expectation is a figure"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_says_where_it_runs(recipe: Path) -> None:
    assert re.search(r"^  - override /trainer: (cpu|cuda)$", recipe.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_takes_a_step(command: Command, tmp_path: Path, recipe: Path) -> None:
    if "override /hydra/sweeper: optuna" in recipe.read_text() and not importlib.util.find_spec("optuna"):
        pytest.skip("needs flash_train[optuna]")
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 50)
    paths = ["data.paths=text.txt"] if "override /data: text" in recipe.read_text() else []
    if "override /data: tokens" in recipe.read_text():
        (tmp_path / "lines.txt").write_text("It was a bright cold day in April.\n" * 50)
        build_corpus(Corpus(["lines.txt"], ["lines.txt"]), tmp_path / "tokens")
        paths = ["data.paths=tokens"]
    answer = command(main, f"recipes={recipe.stem}", *CUT_DOWN, *paths)
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["steps"] == 1 and len(found["loss_curve"]) == 1
    assert "loss" in found["validation"]
