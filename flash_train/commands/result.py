"""result.json: what became of a run, for people and for `flash-compare`. Bytes, seconds and milliseconds."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flash_train.modules.attention import SelfAttention
from flash_train.ops.attention import choose_implementation


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the whole file or none of it: a reader never sees half a result."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=2, default=str) + "\n")
    os.replace(unfinished, path)


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
