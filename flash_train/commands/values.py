"""What a configuration may hold beside the arguments of its `_target_`s, looked at before anything is built."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from flash_train.commands.construct import check, check_arguments

Config = dict[str, Any]

_TOP: dict[str, Any] = {"seed": int, "validate_every": int, "gradient_clip": float | None, "resume_from": str | None}
# Groups that are no call of their own: their values go to the model, the module and the trainer.
_GROUPS: dict[str, dict[str, Any]] = {
    "attention": {"implementation": str},
    "checkpointing": {"granularity": str},
    "loss": {"chunk_rows": int | None},
    "compile": {
        "enabled": bool,
        "mode": Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    },
    # torch only warns of a float32_matmul that it does not know, and keeps what it had.
    "precision": {"lightning": str | int, "float32_matmul": Literal["highest", "high", "medium"]},
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
        "checkpointing": "checkpointing=block",
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
    for group, elsewhere in _ELSEWHERE.items():
        for name in elsewhere.keys() & config[group].keys():
            raise ValueError(f"{group}.{name} follows from other settings and cannot be given; see {elsewhere[name]}")
    for key in ("trainer", "data", "model", "optimizer", "schedule"):
        check(config[key], key=key)
    for group in ("callbacks", "loggers"):
        for name, node in config[group].items():
            if node is not None:
                check(node, key=f"{group}.{name}")
    check_device(config["trainer"])


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
