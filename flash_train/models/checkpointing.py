"""Activation checkpointing: what a block forgets in the forward, and computes again in the backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flash_train.ops import library

CHECKPOINTING = ("none", "activation", "block", "selective")
WHOLE_BLOCKS = ("block", "selective")
"""Those by which a block runs again; "activation" is its feed-forward network's own (``recompute``)."""

# Attention as one operator: ours, and the ones that torch's SDPA chooses among.
ATTENTION = frozenset(
    {
        library.attention,
        library.qkv_attention,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def run_checkpointed(kind: str, block: Callable[..., Tensor], x: Tensor, **arguments: Any) -> Tensor:
    """``block(x, **arguments)``, of which the backward finds the input alone and makes the rest again.

    With ``"selective"`` the results of attention, output and log-sum-exp, are kept too: the longest part of a block is
    not computed twice. Attention that is no operator of its own (naive) has no result to keep.
    """
    selected = partial(create_selective_checkpoint_contexts, _keep_attention)
    more: dict[str, Any] = {"context_fn": selected} if kind == "selective" else {}
    return checkpoint(block, x, use_reentrant=False, **more, **arguments)  # pyright: ignore[reportReturnType]


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
