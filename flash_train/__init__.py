"""Train GPT models with a Triton FlashAttention op, and see what it saves.

The names below are imported when they are first used: `import flash_train` alone imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_train.diagnostics.memory import MemoryMonitor
    from flash_train.diagnostics.speed import SpeedMonitor
    from flash_train.models.gpt import GPT
    from flash_train.modules.attention import SelfAttention
    from flash_train.ops.attention import choose_implementation, flash_attention, flash_attention_with_lse

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "MemoryMonitor",
    "SelfAttention",
    "SpeedMonitor",
    "choose_implementation",
    "flash_attention",
    "flash_attention_with_lse",
]

_MODULES = {
    "GPT": "models.gpt",
    "MemoryMonitor": "diagnostics.memory",
    "SelfAttention": "modules.attention",
    "SpeedMonitor": "diagnostics.speed",
    "choose_implementation": "ops.attention",
    "flash_attention": "ops.attention",
    "flash_attention_with_lse": "ops.attention",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"flash_train.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'flash_train' has no attribute {name!r}")
