"""Finding the checkpoint that `resume_from` means, and reading from it what a command must know before it builds a run.

A command resumes in three lines:
    path = find_checkpoint(resume_from)
    header = read_header(path)      # then WandbLogger(id=header.wandb_run_id, ...): the same run goes on
    trainer.fit(module, datamodule, ckpt_path=path, weights_only=True)
"""

import functools
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["CheckpointHeader", "checkpoint_files", "find_checkpoint", "load_weights", "read_header"]


@dataclass(frozen=True)
class CheckpointHeader:
    """What a checkpoint says about its run: optimizer steps and tokens done, the configuration, the wandb run's id, and
    the `state()` of the tokenizer, for `tokenizer_from_state`."""

    step: int
    tokens_seen: int
    run_config: dict[str, Any] | None
    wandb_run_id: str | None
    tokenizer: dict[str, Any] | None = None


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the one written last in a run's folder or its `checkpoints/`.

    Its checksums are verified, which reads the file once.

    Raises:
        ValueError: there is none, or it is damaged; then the text offers the newest sound one written before it.
    """
    path = Path(path)
    if path.is_dir():
        files = checkpoint_files(path / "checkpoints") or checkpoint_files(path)
        if not files:
            raise ValueError(
                f"No checkpoint in {path}: a run writes one after callbacks.checkpoint.every_n_train_steps steps. "
                "Give the folder of a run that got that far, or a .ckpt file."
            )
        path = files[0]
    elif not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder of a run, or one of the .ckpt files in it.")
    damage = _damage(path, _age(path))
    if damage is None:
        return path
    earlier = [file for file in checkpoint_files(path.parent) if _age(file) < _age(path)]
    sound = next((file for file in earlier if _damage(file, _age(file)) is None), None)
    offer = f"Resume from the one before it: {sound}" if sound else "There is no sound one before it: start again."
    raise ValueError(f"The checkpoint {path} is damaged ({damage}). {offer}")


def read_header(path: str | Path) -> CheckpointHeader:
    """What the checkpoint at `path` says about its run; the tensors stay on the disk.

    Raises:
        ValueError: the file is not a training checkpoint.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(checkpoint, dict) or "optimizer_states" not in checkpoint:
        raise ValueError(f"{path} is not a training checkpoint: it holds no optimizer state.")
    return CheckpointHeader(
        step=checkpoint["global_step"],
        tokens_seen=checkpoint.get("tokens_seen", 0),
        run_config=checkpoint.get("run_config"),
        wandb_run_id=checkpoint.get("wandb_run_id"),
        tokenizer=_tokenizer(checkpoint),
    )


def _tokenizer(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Lightning keeps a data module's state under the name of its class, whichever that is."""
    states = (state for state in checkpoint.values() if isinstance(state, dict))
    return next((state["tokenizer"] for state in states if {"tokenizer", "order"} <= state.keys()), None)


def load_weights(path: str | Path, module: nn.Module) -> None:
    """Put the weights of the checkpoint at `path` into the module that it is of.

    Raises:
        ValueError: it is of another model; names the first difference.
    """
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"{path} does not fit this model and data: {first}") from error


def checkpoint_files(folder: Path) -> list[Path]:
    """The .ckpt files of `folder`, the one written last first, whatever step it is of: a run may have gone back."""
    return sorted(folder.glob("*.ckpt"), key=_age, reverse=True)


def _age(file: Path) -> tuple[int, str]:
    return file.stat().st_mtime_ns, file.name


@functools.cache  # a command asks twice: for the overrides, and for the run
def _damage(path: Path, age: tuple[int, str]) -> str | None:
    """In a few words what is wrong with the file as it was written then, None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load would not notice a changed byte of a tensor
            broken = archive.testzip()
        if broken is not None:
            return f"the checksum of {broken} does not match"
        read_header(path)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        return str(error).splitlines()[0]
    return None
