"""result.json: what became of a run, for people and for `flash-compare`. Bytes, seconds and milliseconds."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from flash_train.commands.environment import describe_environment
from flash_train.commands.objects import Objects
from flash_train.modules.attention import SelfAttention
from flash_train.ops.attention import choose_implementation
from flash_train.training.history import LossHistory

_COMPUTE_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the whole file or none of it: a reader never sees half a result."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(content, indent=2, default=str) + "\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def describe_start(objects: Objects) -> dict[str, Any]:
    """What is known of a run before its first step."""
    model, device = objects.module.model, objects.trainer.strategy.root_device
    dtype = _COMPUTE_DTYPES.get(str(objects.trainer.precision), next(model.parameters()).dtype)
    return {
        "device": str(device),
        "environment": describe_environment(device),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "initial_weights_sha256": weights_sha256(model),
        "data": objects.data.provenance,
        "attention": describe_attention(model, device=device, dtype=dtype),
    }


def describe_end(objects: Objects) -> dict[str, Any]:
    """What a run has measured so far: a callback that has a `result()` gives it under its own name."""
    metrics = objects.trainer.callback_metrics
    validation = {
        name.partition("/")[2]: float(value) for name, value in metrics.items() if name.startswith("validation/")
    }
    found: dict[str, Any] = {
        "steps": objects.trainer.global_step,
        "rewritten_by_compiler": rewritten_by_compiler(),
        "memory": None,
        "speed": None,
        "loss_curve": [],
        "validation": validation,
    }
    for name, callback in objects.callbacks.items():
        if isinstance(callback, LossHistory):
            found["loss_curve"] = callback.curve()
        elif isinstance(callback, ModelCheckpoint) and callback.best_model_score is not None:
            found["best"] = {callback.monitor: float(callback.best_model_score), "checkpoint": callback.best_model_path}
        elif callable(measured := getattr(callback, "result", None)):
            found[name] = measured()
    return found


def weights_sha256(model: nn.Module) -> str:
    """A hash of every parameter and buffer with its name, so that equal starts can be told from different ones."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def describe_attention(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Which implementation the model asked for, which one runs on such tensors, and why if it is another."""
    layer = next((module for module in model.modules() if isinstance(module, SelfAttention)), None)
    if layer is None:
        return {"asked": None, "ran": None, "reason": "the model has no SelfAttention"}
    q = torch.empty(1, layer.heads, 1, layer.head_size, device=device, dtype=dtype)
    k = torch.empty(1, layer.kv_heads, 1, layer.head_size, device=device, dtype=dtype)
    choice = choose_implementation(layer.implementation, q, k, k)
    return {"asked": layer.implementation, "ran": choice.name, "reason": choice.reason}


def rewritten_by_compiler() -> int:
    """How many attentions Inductor has replaced by SDPA in this process: a naive arm that it did is not naive."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fuse_attention"])
