"""Train GPT models with a Triton FlashAttention op, and see what it saves.

The names below are imported when they are first used: `import flash_train` alone imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_train.diagnostics.leaks import LeakDetector
    from flash_train.diagnostics.memory import MemoryMonitor
    from flash_train.diagnostics.oom import OOMExplainer
    from flash_train.diagnostics.peak import measured_peak
    from flash_train.diagnostics.probe import MemoryProbe, probe_memory
    from flash_train.diagnostics.snapshot_callback import MemorySnapshot
    from flash_train.diagnostics.snapshot_page import write_snapshot_page
    from flash_train.diagnostics.speed import SpeedMonitor
    from flash_train.memory.advice import memory_advice
    from flash_train.memory.predict import predict_peak
    from flash_train.models.gpt import GPT
    from flash_train.modules.attention import SelfAttention
    from flash_train.ops.attention import (
        choose_implementation,
        flash_attention,
        flash_attention_packed,
        flash_attention_qkv,
        flash_attention_with_lse,
    )
    from flash_train.ops.cross_entropy import chunked_cross_entropy
    from flash_train.ops.features import Documents, Mask, Score
    from flash_train.ops.partials import merge

__version__ = "0.1.0"
__all__ = [
    "Documents",
    "GPT",
    "LeakDetector",
    "Mask",
    "MemoryMonitor",
    "MemoryProbe",
    "MemorySnapshot",
    "OOMExplainer",
    "Score",
    "SelfAttention",
    "SpeedMonitor",
    "choose_implementation",
    "chunked_cross_entropy",
    "flash_attention",
    "flash_attention_packed",
    "flash_attention_qkv",
    "flash_attention_with_lse",
    "measured_peak",
    "memory_advice",
    "merge",
    "predict_peak",
    "probe_memory",
    "write_snapshot_page",
]

_MODULES = {
    "Documents": "ops.features",
    "GPT": "models.gpt",
    "LeakDetector": "diagnostics.leaks",
    "Mask": "ops.features",
    "MemoryMonitor": "diagnostics.memory",
    "MemoryProbe": "diagnostics.probe",
    "MemorySnapshot": "diagnostics.snapshot_callback",
    "OOMExplainer": "diagnostics.oom",
    "Score": "ops.features",
    "SelfAttention": "modules.attention",
    "SpeedMonitor": "diagnostics.speed",
    "choose_implementation": "ops.attention",
    "chunked_cross_entropy": "ops.cross_entropy",
    "flash_attention": "ops.attention",
    "flash_attention_packed": "ops.attention",
    "flash_attention_qkv": "ops.attention",
    "flash_attention_with_lse": "ops.attention",
    "measured_peak": "diagnostics.peak",
    "memory_advice": "memory.advice",
    "merge": "ops.partials",
    "predict_peak": "memory.predict",
    "probe_memory": "diagnostics.probe",
    "write_snapshot_page": "diagnostics.snapshot_page",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"flash_train.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'flash_train' has no attribute {name!r}")
