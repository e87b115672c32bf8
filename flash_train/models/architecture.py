"""What a GPT is, read from the model itself."""

from typing import Any

from torch import nn

from flash_train.models.gpt import GPT
from flash_train.modules.attention import SelfAttention
from flash_train.modules.block import Block
from flash_train.modules.feed_forward import GeluFeedForward, SwigluFeedForward


def architecture(model: GPT) -> dict[str, Any]:
    """The arguments of ``GPT`` that say which weights a model has and which function they make, all spelled out.

    Two models whose answers are equal give the same logits for the same weights. Left out is what acts in training
    alone (dropout, checkpointing), and how it is computed (implementation, padding of the vocabulary). ``rotary_base``
    is None where positions are not rotary. Raises ``TypeError`` for another class than ``GPT``, and for one whose
    parts were replaced by other classes.
    """
    block = next(iter(model.blocks)) if isinstance(model, GPT) else model
    attention, network = getattr(block, "attention", None), getattr(block, "feed_forward", None)
    if (
        not isinstance(model, GPT)
        or not isinstance(block, Block)
        or not isinstance(attention, SelfAttention)
        or not isinstance(network, GeluFeedForward | SwigluFeedForward)
    ):
        raise TypeError(f"the model must be a GPT with the parts that it was made with, got {type(model).__name__}")
    learned, rotary = model.position_embedding is not None, attention.rotary
    windows = set(model.windows)
    return {
        "vocabulary_size": model.vocabulary_size,
        "context_length": model.context_length,
        "width": model.width,
        "depth": model.depth,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "positions": "learned" if learned else "alibi" if rotary is None else "rotary",
        "rotary_base": None if rotary is None else rotary.base,
        "window": model.windows[0] if len(windows) == 1 else model.windows,
        "soft_cap": attention.soft_cap,
        "logit_soft_cap": model.logit_soft_cap,
        "sinks": attention.sinks is not None,
        "norm": "rms" if isinstance(model.final_norm, nn.RMSNorm) else "layer",
        "norm_epsilon": model.final_norm.eps,
        "feed_forward": _feed_forward(network),
        "hidden_size": network.projection.in_features,
        "qk_norm": attention.query_norm is not None,
        "tied_embeddings": model.head is None,
        "bias": attention.qkv.bias is not None,
    }


def _feed_forward(network: GeluFeedForward | SwigluFeedForward) -> str:
    if isinstance(network, SwigluFeedForward):
        return "swiglu"
    return "gelu_tanh" if network.approximate == "tanh" else "gelu"
