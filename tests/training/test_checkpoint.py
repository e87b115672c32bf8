import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from omegaconf import ListConfig, OmegaConf
from toy_training import ToyData, ToyModel, language_model, trainer

from flash_train.training.checkpoint import AtomicCheckpointIO, Checkpoint
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw
from flash_train.training.resume import checkpoint_files, find_checkpoint, read_header


def run(folder: Path, *, steps: int = 4, keep: int = 2, **options: Any) -> Path:
    """Train for `steps` with a checkpoint after every step; the folder."""
    checkpoint = Checkpoint(dirpath=folder / "checkpoints", every_n_train_steps=1, keep=keep)
    trainer(folder, checkpoint, max_steps=steps, limit_val_batches=0, **options).fit(language_model(), ToyData())
    return folder


def steps_of(folder: Path) -> list[int]:
    return [read_header(file).step for file in checkpoint_files(folder / "checkpoints")]


def test_only_the_newest_few_are_kept(tmp_path: Path) -> None:
    assert steps_of(run(tmp_path, keep=3)) == [4, 3, 2]


def test_a_checkpoint_of_a_model_built_from_a_configuration_holds_plain_values(tmp_path: Path) -> None:
    optimizer = partial(adamw, lr=0.01, betas=ListConfig([0.9, 0.95]))  # pyright: ignore[reportArgumentType]
    config = {"model": {"width": 7, "tied": True}, "arms": ["naive", "flash"], "resume_from": None}
    module = LanguageModel(ToyModel(), optimizer=optimizer, run_config=config)
    trainer(tmp_path, max_steps=2, limit_val_batches=0).fit(module, ToyData())
    path = find_checkpoint(tmp_path)
    torch.load(path, weights_only=True)
    assert read_header(path).run_config == config and read_header(path).tokens_seen == 2 * 3 * 5


@pytest.mark.parametrize("value", [OmegaConf.create({"width": 7}), partial(adamw, lr=0.1), (1, 2)])
def test_a_run_config_that_no_checkpoint_can_hold_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"run_config\.model\[1\] is a .*which a checkpoint cannot hold"):
        LanguageModel(ToyModel(), optimizer=partial(adamw, lr=0.1), run_config={"model": [0, value]})


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "step.ckpt"
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        io.save_checkpoint({"step": 2, "bad": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"step": 1} and os.listdir(tmp_path) == ["step.ckpt"]


@pytest.mark.parametrize(("how", "said"), [("full", "No space left on device"), ("limited", "File too large")])
def test_a_disk_that_takes_no_more_is_named_with_the_file_and_leaves_the_old_one(
    tmp_path: Path, how: str, said: str
) -> None:
    """What torch's writer says of it is `unexpected pos 704 vs 598`."""
    io, path = AtomicCheckpointIO(), tmp_path / "step.ckpt"
    io.save_checkpoint({"step": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if how == "full":
            (tmp_path / ".step.ckpt.partial").symlink_to("/dev/full")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(OSError) as error:
            io.save_checkpoint({"step": 2, "weights": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.strerror, error.value.filename) == (said, str(path))
    assert torch.load(path, weights_only=True) == {"step": 1} and os.listdir(tmp_path) == ["step.ckpt"]


def test_what_a_kill_left_half_written_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step_00000099.ckpt.partial").write_bytes(b"half")
    run(tmp_path, steps=1)
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001.ckpt"]


@pytest.mark.parametrize("how", ["cut short", "changed by a bit", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_offered(tmp_path: Path, how: str) -> None:
    run(tmp_path)
    newest, before = checkpoint_files(tmp_path / "checkpoints")
    assert find_checkpoint(tmp_path) == newest
    content = bytearray(newest.read_bytes())
    weight = torch.load(newest, weights_only=True)["state_dict"]["model.head.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    newest.write_bytes({"cut short": content[:-100], "changed by a bit": content, "empty": b""}[how])
    for path in (tmp_path, newest):
        with pytest.raises(ValueError) as error:
            find_checkpoint(path)
        assert f"{newest} is damaged" in str(error.value) and str(before) in str(error.value)
    before.write_bytes(b"")
    with pytest.raises(ValueError, match="no sound one before it"):
        find_checkpoint(newest)


def test_a_half_written_file_of_a_killed_run_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "checkpoints" / ".step_00000005.ckpt.partial").write_bytes(b"half")
    assert read_header(find_checkpoint(tmp_path)).step == 4


def test_a_path_without_a_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No checkpoint in .*every_n_train_steps"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="does not exist: give the folder of a run"):
        find_checkpoint(tmp_path / "gone")


def test_the_id_of_the_wandb_run_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True, id="abc123", settings={"x_disable_stats": True})
    run(tmp_path, steps=1, logger=logger)
    logger.experiment.finish()
    assert read_header(find_checkpoint(tmp_path)).wandb_run_id == "abc123"


@pytest.mark.parametrize("option", ["every_n_train_steps", "keep"])
def test_a_cadence_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} .*cannot be 0"):
        Checkpoint(dirpath="checkpoints", **{option: 0})  # pyright: ignore[reportArgumentType]
