"""One training run: build, fit, and say what became of it. Whatever happens, result.json says it too."""

import errno
import json
import logging
import secrets
import sys
import textwrap
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flash_train.commands.budget import check_budget, limit_memory
from flash_train.commands.hydra_app import ExitCode, complain
from flash_train.commands.initial import other_model
from flash_train.commands.objects import Config, Objects, build_objects
from flash_train.commands.result import describe_end, describe_start, write_json
from flash_train.commands.values import master_weights
from flash_train.models.parameters import parameter_count, parameter_table
from flash_train.ops.sdpa import Unsupported
from flash_train.training.data.store import write_whole
from flash_train.training.guard import NonFiniteLoss
from flash_train.training.resume import CheckpointHeader, find_checkpoint, load_weights, read_header

# A disk that is full, a quota or a limit that is used up, and one that has become read-only or broken.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_GOES_ON = "resume_from=<its folder> goes on at its last checkpoint"
_LESS_MEMORY = "attention=flash, loss=chunked, checkpointing=block or a smaller data.batch_size needs less"


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
    objects = checkpoint = header = None
    try:
        if config["resume_from"]:
            checkpoint = find_checkpoint(config["resume_from"])
            header = read_header(checkpoint)
            check_resumable(header, config)
            if is_finished(header, config, folder):
                return ExitCode.OK
            announce(checkpoint, header, config, folder)
        else:
            write_yaml(folder / "config.yaml", config)
        budget = check_budget(config)
        run_id = header.wandb_run_id if header and header.wandb_run_id else secrets.token_hex(4)
        objects = build_objects(config, run_id=run_id, run_config={"config": config, "overrides": overrides})
        limits = limit_memory(budget, objects.trainer.strategy.root_device)
        introduce(objects, folder)
        result |= {"resumed_from": str(checkpoint) if checkpoint else None, **describe_start(objects)}
        result["environment"] |= limits
        if checkpoint:
            load_weights(checkpoint, objects.module)  # Lightning would too, with a traceback if they do not fit
            write_yaml(folder / "config.yaml", config)
        objects.trainer.fit(objects.module, datamodule=objects.data, ckpt_path=checkpoint)
        ending = Ending("ok", ExitCode.OK)
    except BaseException as error:  # also Ctrl-C, which Lightning turns into SystemExit
        ending = judge(error)
        result["traceback"] = traceback.format_exc()
        if ending.surprising:
            traceback.print_exc()
    if objects is not None:
        result |= describe_end(objects)
    result = {"status": ending.status, "error": ending.error, **result, "seconds": time.monotonic() - begin}
    went_on = header is not None and objects is not None and objects.trainer.global_step > header.step
    # What a run has measured before it was asked in vain to go on stays.
    keep = config["resume_from"] and ending.code == ExitCode.BAD_INPUT and not went_on
    written = conclude(None if keep else result, folder, ending)
    return ending.code if written is not False else (ending.code or ExitCode.FAILURE)


def check_resumable(header: CheckpointHeader, config: Config) -> None:
    """Raise ValueError for another model than the checkpoint's, even where its weights would fit (another window, soft
    cap or number of heads), for weights without the fp32 masters that they had, for another kind of optimizer, and for
    fewer steps than it has done.

    Other data is refused by `TokenData`, and other groups of parameters by the optimizer. Any other change, of dropout
    or the learning rate, is the user's, and `announce` prints it.
    """
    earlier = (header.run_config or {}).get("config", config)
    if config["init_from"] not in (None, earlier.get("init_from")):
        raise ValueError("a run resumes with its own weights; leave out init_from, or start a new run with it")
    steps = config["trainer"].get("max_steps", -1)
    if 0 <= steps < header.step:
        raise ValueError(
            f"trainer.max_steps must be at least the {header.step} steps that the checkpoint has done, got {steps}; "
            "give more, or resume from an earlier checkpoint"
        )
    if master_weights(earlier) and not master_weights(config):
        raise ValueError(
            f"the run keeps its weights in fp32 masters, and precision.lightning={config['precision']['lightning']} "
            "would go on with what bf16 left of them; resume with precision=bf16_masters, or start a new run with "
            "init_from"
        )
    kinds = [settings["optimizer"].get("_target_") for settings in (earlier, config)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"a run must resume with the optimizer whose state it has, {kinds[0]}, and now it is {kinds[1]}; leave it "
            "as it was, or start a new run with init_from"
        )
    different = other_model(header, config)
    if different:
        name, old, new = different
        raise ValueError(
            f"a run must resume with the model of its checkpoint, where model.{name} is {old}, and now it is "
            f"{new}; leave it as it was, or start a new run"
        )


def is_finished(header: CheckpointHeader, config: Config, folder: Path) -> bool:
    """Whether nothing is left to do in `folder`, not even its result; then it is said."""
    steps, file = config["trainer"].get("max_steps", -1), folder / "result.json"
    if not 0 <= steps <= header.step or not file.is_file() or json.loads(file.read_text())["status"] != "ok":
        return False
    print(f"{folder} has done its trainer.max_steps={steps} steps; more of them continue it")
    return True


def quieten() -> None:
    """Keep what the summary says better, or what does not concern this run, off the terminal."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Batches are slices of a memory-mapped file: worker processes would cost more than they bring.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Who sets trainer=cpu beside a GPU means it.
    warnings.filterwarnings("ignore", message="GPU available but not used")
    # Lightning 2.6 asks torch's pytree, and gathers from ranks, in ways that torch 2.13 wants to end.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"torch.distributed.nn.functional.all_gather is deprecated")
    if getattr(rank_zero_only, "rank", 0):  # one process speaks for all
        logging.getLogger("flash_train").setLevel(logging.ERROR)
    # They mean steps of an epoch; here a run may have many short ones.
    warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")


def judge(error: BaseException) -> Ending:
    """What an exception means for the run."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = lines[0]
    if text.startswith("Caught ") and "DataLoader worker" in text:  # torch puts the worker's traceback before its words
        text = lines[-1].partition(": ")[2]
    if isinstance(error, SIGTERMException):
        return Ending("interrupted", ExitCode.TERMINATED, f"ended by SIGTERM; {_GOES_ON}")
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Ending("interrupted", ExitCode.INTERRUPTED, "interrupted")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        detail = ". ".join(text.split(". ")[:2])  # what follows in torch's text is a survey of the allocator
        return Ending("oom", ExitCode.OUT_OF_MEMORY, f"out of memory ({detail}); {_LESS_MEMORY}")
    if isinstance(error, Unsupported):
        return Ending("refused", ExitCode.BAD_INPUT, text)
    if isinstance(error, RuntimeError) and text.startswith("DataLoader worker"):
        advice = f"{_GOES_ON}, and with data.workers=0 no worker is needed"
        return Ending("failed", ExitCode.FAILURE, f"a process that reads the data died ({text.rstrip('. ')}); {advice}")
    if isinstance(error, NonFiniteLoss):
        return Ending("failed", ExitCode.FAILURE, text)
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        place = error.filename2 or error.filename or "in the run folder"
        why = f"cannot write {place} ({error.strerror}); what was written before is whole: make room, and {_GOES_ON}"
        return Ending("failed", ExitCode.FAILURE, why)
    if isinstance(error, ConnectionError):
        why = f"a connection broke ({text}), as when wandb's own process dies; {_GOES_ON}, also with loggers=csv"
        return Ending("failed", ExitCode.FAILURE, why)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return Ending("failed", ExitCode.BAD_INPUT, f"cannot use {error.filename2 or error.filename}: {error.strerror}")
    errors = sys.modules.get("wandb.errors")  # only if a logger imported it
    if isinstance(error, getattr(errors, "CommError", ())):
        way_out = "loggers.wandb.offline=true keeps it all for wandb sync, loggers=csv does without"
        return Ending("failed", ExitCode.BAD_INPUT, f"wandb cannot be reached ({text}); {way_out}")
    wandb_error = getattr(errors, "Error", ())
    if isinstance(error, (ValueError, MisconfigurationException, OSError, wandb_error)):
        return Ending("failed", ExitCode.BAD_INPUT, text)
    return Ending("failed", ExitCode.FAILURE, f"{type(error).__name__}: {text}", surprising=True)


@rank_zero_only
def announce(checkpoint: Path, header: CheckpointHeader, config: Config, folder: Path) -> None:
    """Say which checkpoint is continued and where, and what differs from the configuration it was written under."""
    print(f"continues {checkpoint} (step {header.step}) in {folder}")
    earlier = (header.run_config or {}).get("config", {})
    before, now = dict(_leaves(earlier)), dict(_leaves(config))
    # What the run folder's own name is part of differs by itself when the run goes on elsewhere.
    own = {"resume_from", *(key for key, value in now.items() if isinstance(value, str) and str(folder) in value)}
    for key in sorted({*before, *now} - own if earlier else ()):
        if before.get(key) != now.get(key):
            print(f"  changed: {key}: {before.get(key)!r} -> {now.get(key)!r}")


@rank_zero_only
def introduce(objects: Objects, folder: Path) -> None:
    """Print where the run writes, and its model's parameters by part."""
    print(f"run folder: {folder}\nparameters:")
    print(textwrap.indent(parameter_table(parameter_count(objects.module.model)), "  "))


def _leaves(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(node, dict):
        return [(prefix, node)]
    return [leaf for key, value in node.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else key)]


@rank_zero_only
def conclude(result: dict[str, Any] | None, folder: Path, ending: Ending) -> bool:
    """Write result.json unless that of before is to stay, close wandb, and tell the person what they did not want.

    Returns whether result.json is as it should be.
    """
    if (wandb := sys.modules.get("wandb")) is not None:
        try:
            wandb.finish(exit_code=ending.code)
        except Exception as error:  # its own process died
            complain("train", f"wandb could not be finished: {error or type(error).__name__}")
    if ending.error is not None and not ending.surprising:
        complain("train", ending.error)
    try:
        if result is not None:
            write_json(folder / "result.json", result)
    except OSError as error:
        complain("train", f"cannot write {folder / 'result.json'}: {error.strerror}")
        return False
    return True


@rank_zero_only
def write_yaml(path: Path, config: Config) -> None:
    """Write resolved plain values."""
    write_whole(path, yaml.safe_dump(config, sort_keys=False))
