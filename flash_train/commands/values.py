"""What a configuration may hold beside the arguments of its `_target_`s, looked at before anything is built."""

import inspect
import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from flash_train.commands.construct import check, check_arguments

Config = dict[str, Any]

_TOP: dict[str, Any] = {
    "seed": int,
    "vocabulary_multiple": int,
    "validate_every": int,
    "gradient_clip": float | None,
    "resume_from": str | None,
    "init_from": str | None,
}
# Groups that are no call of their own: their values go to the model, the module and the trainer.
_GROUPS: dict[str, dict[str, Any]] = {
    "attention": {"implementation": str},
    "checkpointing": {"granularity": str, "every": int},
    "loss": {"chunk_rows": int | None, "z_loss": float},
    "compile": {
        "enabled": bool,
        "mode": Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        "memory_budget": float,
    },
    "precision": {
        "lightning": str | int,
        # torch only warns of one that it does not know, and keeps what it had.
        "float32_matmul": Literal["highest", "high", "medium"],
        "residual": Literal["fp32", "bf16"],
        "fp8": Literal["tensorwise", "rowwise"] | None,
        "master_weights": bool,
        "fp32_gradients": bool,
    },
}
# Arguments that follow from other keys, and these: given beside them they would be ignored.
_ELSEWHERE = {
    "trainer": {
        "precision": "precision=bf16_mixed",
        "accumulate_grad_batches": "batch_tokens=TOKENS",
        "max_epochs": "trainer.max_steps=STEPS",
        "val_check_interval": "validate_every=STEPS",
        "check_val_every_n_epoch": "validate_every=STEPS",
        "num_sanity_val_steps": "validate_every=STEPS",
        "gradient_clip_val": "gradient_clip=NORM",
        "callbacks": "callbacks.NAME",
        "logger": "loggers.NAME",
        "enable_checkpointing": "callbacks.checkpoint=null",
        "enable_progress_bar": "callbacks.progress=null",
        "enable_model_summary": "callbacks",
    },
    "model": {
        "vocabulary_size": "vocabulary_size=V",
        "context_length": "data.sequence_length=T",
        "implementation": "attention=NAME",
        "vocabulary_multiple": "vocabulary_multiple=64",
        "checkpointing": "checkpointing=block",
        "checkpoint_every": "checkpointing.every=2",
        "half_residual": "precision.residual=bf16",
    },
    "optimizer": {
        "master_weights": "precision=bf16_masters",
        "fp32_gradients": "precision.fp32_gradients=true",
    },
}


def check_values(config: Config) -> None:
    """Look at every value before anything is built: a wrong one should not cost the preparation of the data.

    Raises ValueError that names the key, the rule and the value.
    """
    for key, hint in _TOP.items():
        check_arguments({key: config[key]}, {key: hint}, key="")
    if not 0 <= config["seed"] < 2**32:  # numpy's
        raise ValueError(f"seed must be a whole number from 0 to {2**32 - 1}, got {config['seed']}")
    if config["validate_every"] < 1:
        raise ValueError(f"validate_every must be a positive whole number, got {config['validate_every']}")
    for group, hints in _GROUPS.items():
        check_arguments(config[group], hints, key=group)
    if not 0 <= config["loss"].get("z_loss", 0.0) < math.inf:
        raise ValueError(
            f"loss.z_loss must be a finite number from 0 on, got {config['loss']['z_loss']}; 1e-4 is usual"
        )
    _check_levers(config)
    for group, elsewhere in _ELSEWHERE.items():
        for name in elsewhere.keys() & config[group].keys():
            raise ValueError(f"{group}.{name} follows from other settings and cannot be given; see {elsewhere[name]}")
    for key in ("trainer", "data", "model", "optimizer", "schedule"):
        check(config[key], key=key)
    for group in ("callbacks", "loggers"):
        for name, node in config[group].items():
            if node is not None:
                check(node, key=f"{group}.{name}")
    _check_master_weights(config)
    check_device(config["trainer"])


def _check_levers(config: Config) -> None:
    precision, budget = config["precision"], config["compile"]["memory_budget"]
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"compile.memory_budget must be a share of the activations from 0 to 1, got {budget}")
    if budget < 1.0 and not config["compile"]["enabled"]:
        raise ValueError("compile.memory_budget is the compiler's; give compile=on with it, or checkpointing=selective")
    if precision["residual"] == "bf16" and precision["lightning"] not in ("bf16-mixed", "bf16-true"):
        raise ValueError(
            f"precision.residual=bf16 needs a model that computes in bf16, got precision.lightning="
            f"{precision['lightning']}; choose precision=bf16_mixed"
        )
    if precision["fp8"] is not None and precision["lightning"] not in ("bf16-mixed", "bf16-true"):
        raise ValueError(
            f"precision.fp8 goes with bf16, got precision.lightning={precision['lightning']}; choose precision=fp8"
        )


def master_weights(config: Config) -> dict[str, bool]:
    """What the optimizer is to be told of them: nothing where there are to be none."""
    wanted = {name: config["precision"].get(name, False) for name in ("master_weights", "fp32_gradients")}
    return {name: True for name, value in wanted.items() if value}


def _check_master_weights(config: Config) -> None:
    precision, wanted = config["precision"], master_weights(config)
    if "fp32_gradients" in wanted and "master_weights" not in wanted:
        raise ValueError("precision.fp32_gradients needs fp32 master weights; choose precision=bf16_masters")
    if wanted and precision["lightning"] not in ("bf16-true", "16-true"):
        raise ValueError(
            f"precision.master_weights are of weights in half precision, got precision.lightning="
            f"{precision['lightning']}, which keeps them in fp32; choose precision=bf16_masters"
        )
    target = config["optimizer"].get("_target_", "")
    if wanted and "master_weights" not in inspect.signature(resolve_name(target)).parameters:
        raise ValueError(
            f"precision.master_weights needs an optimizer that keeps them, and {target} takes no master_weights; "
            "choose optimizer=adamw, or another precision"
        )


def check_precision(config: Config) -> None:
    """Raise ValueError for a precision that the device does not have: Lightning would take another, or torch fail."""
    precision, on_cpu = config["precision"], config["trainer"]["accelerator"] == "cpu"
    if on_cpu and precision["lightning"] in ("16-mixed", "16-true"):
        raise ValueError(
            "fp16 needs a GPU: on a CPU Lightning would take bf16 in its place; choose precision=bf16_mixed"
        )
    if precision["fp8"] is not None:
        if on_cpu or torch.cuda.get_device_capability() < (8, 9):
            what = "a CPU" if on_cpu else torch.cuda.get_device_name()
            raise ValueError(
                f"fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper), and this is {what}; choose "
                "precision=bf16_mixed"
            )
        tokens = config["data"]["batch_size"] * config["data"]["sequence_length"]
        if tokens % 16:
            raise ValueError(
                f"fp8 products need a multiple of 16 tokens in a micro-batch, got data.batch_size x "
                f"data.sequence_length = {tokens}; change one of them"
            )


def check_device(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError if the configuration names no device, or asks for GPUs that torch does not see.

    An automatic choice is refused: what a run measures must not depend on where it happens to be started.
    """
    accelerator = trainer.get("accelerator")
    if accelerator not in ("cpu", "cuda"):
        raise ValueError(f"trainer.accelerator must be cpu or cuda, got {accelerator!r}")
    count_devices(trainer)
    if accelerator == "cpu":
        if isinstance(trainer.get("devices"), list):
            raise ValueError(f"on a CPU trainer.devices is a number of processes, got {trainer['devices']}")
        return
    seen = torch.cuda.device_count()
    if not seen:
        raise ValueError("trainer=cuda needs a CUDA device and torch sees none; choose trainer=cpu")
    if isinstance(trainer.get("devices"), int) and trainer["devices"] > seen:
        raise ValueError(f"trainer.devices={trainer['devices']} asks for more CUDA devices than torch sees: {seen}")


def count_devices(trainer: Mapping[str, Any]) -> int:
    """Devices of all nodes together. Raises ValueError unless they are a positive number or a list of numbers."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, list) and devices:
        devices = len(devices)
    elif not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ValueError(f"trainer.devices must be a positive number or a list of device numbers, got {devices!r}")
    return devices * trainer.get("num_nodes", 1)
