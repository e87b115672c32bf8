"""One training run: build, fit, and say what became of it. Whatever happens, result.json says it too."""

import logging
import os
import secrets
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from flash_train.commands.environment import describe_environment
from flash_train.commands.hydra_app import ExitCode
from flash_train.commands.objects import Config, Objects, build_objects
from flash_train.commands.result import describe_attention, rewritten_by_compiler, weights_sha256, write_json


@dataclass(frozen=True)
class Ending:
    """How a run ended: the status and error of result.json, the exit code, and whether a traceback helps."""

    status: str
    code: ExitCode
    error: str | None = None
    surprising: bool = False


def run(config: Config, folder: Path, overrides: list[str]) -> int:
    """Train as `config` says, in `folder`; the exit code. `overrides` go into the checkpoints for `resume_from`."""
    quieten()
    begin = time.monotonic()
    result: dict[str, Any] = {}
    objects = None
    try:
        write_yaml(folder / "config.yaml", config)
        run_config = {"config": config, "overrides": overrides, "run_id": secrets.token_hex(4)}
        objects = build_objects(config, run_id=run_config["run_id"], run_config=run_config)
        result |= describe_start(objects)
        objects.trainer.fit(objects.module, datamodule=objects.data)
        ending = Ending("ok", ExitCode.OK)
    except BaseException as error:
        ending = judge(error)
        result["traceback"] = traceback.format_exc()
        if ending.surprising:
            traceback.print_exc()
    if objects is not None:
        result |= describe_end(objects)
    result = {"status": ending.status, "error": ending.error, **result, "seconds": time.monotonic() - begin}
    conclude(result, folder, ending)
    return ending.code


def quieten() -> None:
    """Keep what the summary says better, or what does not concern this run, off the terminal."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # Batches are slices of a memory-mapped file: worker processes would cost more than they bring.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # An offline run has nothing to announce; wandb reads this before it prints.
    os.environ.setdefault("WANDB_SILENT", "true")


def judge(error: BaseException) -> Ending:
    """What an exception means for the run."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Lightning makes the second of the first
        return Ending("interrupted", ExitCode.INTERRUPTED, "interrupted")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return Ending("oom", ExitCode.OUT_OF_MEMORY, f"out of memory: {text}")
    if isinstance(error, ValueError | MisconfigurationException | OSError):
        return Ending("failed", ExitCode.BAD_INPUT, text)
    return Ending("failed", ExitCode.FAILURE, f"{type(error).__name__}: {text}", surprising=True)


def describe_start(objects: Objects) -> dict[str, Any]:
    """What is known of a run before its first step."""
    module, device = objects.module, objects.trainer.strategy.root_device
    parameter = next(module.parameters())
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    true = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
    dtype = {**mixed, **true}.get(str(objects.trainer.precision), parameter.dtype)
    return {
        "device": str(device),
        "environment": describe_environment(device),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "initial_weights_sha256": weights_sha256(module.model),
        "data": objects.data.provenance,
        "attention": describe_attention(module.model, device=device, dtype=dtype),
    }


def describe_end(objects: Objects) -> dict[str, Any]:
    """What the run measured: every callback that has a `result()` gives it under its own name."""
    metrics = objects.trainer.callback_metrics
    measured = {name: callback.result() for name, callback in objects.callbacks.items() if hasattr(callback, "result")}
    validation = {
        name.partition("/")[2]: float(value) for name, value in metrics.items() if name.startswith("validation/")
    }
    return {
        "steps": objects.trainer.global_step,
        "rewritten_by_compiler": rewritten_by_compiler(),
        "validation": validation or None,
        **measured,
    }


@rank_zero_only
def conclude(result: dict[str, Any], folder: Path, ending: Ending) -> None:
    """Write result.json, close wandb, and tell the person what happened if it was not what they wanted."""
    program = Path(sys.argv[0]).stem
    if "wandb" in sys.modules:
        import wandb

        wandb.finish(exit_code=ending.code)
    if ending.error is not None and not ending.surprising:
        print(f"{program}: {ending.error}", file=sys.stderr)
    try:
        write_json(folder / "result.json", result)
    except OSError as error:
        print(f"{program}: cannot write {error.filename}: {error.strerror}", file=sys.stderr)


@rank_zero_only
def write_yaml(path: Path, config: Config) -> None:
    """Write resolved plain values."""
    path.write_text(yaml.safe_dump(config, sort_keys=False))
