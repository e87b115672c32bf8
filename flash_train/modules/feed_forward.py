"""The feed-forward networks of a transformer block."""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flash_train.modules.checks import check_choice, check_dropout, check_positive
from flash_train.ops.activation_linear import activation_linear

_log = logging.getLogger(__name__)


class GeluFeedForward(nn.Module):
    """GPT-2's: ``projection(gelu(expand(x)))``; ``[..., C]`` to ``[..., C]``, hidden size 4 C.

    ``approximate`` is torch's: ``"none"`` for the exact GELU, which nanoGPT takes, ``"tanh"`` for GPT-2's own. With
    ``recompute`` the backward computes the activation again from its input instead of keeping it, unless another
    module was put in ``projection``'s place, or it has hooks; hooks of all modules are not called for it.
    """

    def __init__(
        self,
        width: int,
        *,
        hidden_size: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        approximate: str = "none",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        hidden_size = 4 * width if hidden_size is None else hidden_size
        check_positive("hidden_size", hidden_size)
        check_dropout("dropout", dropout)
        check_choice("approximate", approximate, ("none", "tanh"))
        self.approximate = approximate
        self.recompute = recompute
        self.expand = nn.Linear(width, hidden_size, bias=bias)
        self.projection = nn.Linear(hidden_size, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to each row of ``x`` ``[..., C]``."""
        hidden = self.expand(x)
        if self.recompute and _is_linear(self.projection):
            activation = "gelu" if self.approximate == "none" else "gelu_tanh"
            return self.dropout(_recomputed(hidden, self.projection, activation))
        return self.dropout(self.projection(F.gelu(hidden, approximate=self.approximate)))


class SwigluFeedForward(nn.Module):
    """Llama's: ``projection(silu(gate) * up)`` (Shazeer, 2020, arXiv 2002.05202); ``[..., C]`` to ``[..., C]``.

    The hidden size is 8/3 C, rounded up to a multiple of 64, so that three matrices weigh what GELU's two do. Gate and
    up are the halves of one fused projection, gate first. With ``recompute`` the backward computes silu(gate) and its
    product with up again instead of keeping them, as GeluFeedForward does.
    """

    def __init__(
        self,
        width: int,
        *,
        hidden_size: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        hidden_size = -(-8 * width // (3 * 64)) * 64 if hidden_size is None else hidden_size
        check_positive("hidden_size", hidden_size)
        check_dropout("dropout", dropout)
        self.expand = nn.Linear(width, 2 * hidden_size, bias=bias)
        self.projection = nn.Linear(hidden_size, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to each row of ``x`` ``[..., C]``."""
        hidden = self.expand(x)
        if self.recompute and _is_linear(self.projection):
            return self.dropout(_recomputed(hidden, self.projection, "swiglu"))
        gate, up = hidden.chunk(2, dim=-1)
        return self.dropout(self.projection(F.silu(gate) * up))


def _is_linear(projection: nn.Module) -> bool:
    """Whether it is what its weight and bias say. An adapter in its place, a weight that is made of others, a hook or
    another `forward` is not: then the module itself is called, and the activation is kept."""
    if type(projection) is not nn.Linear:
        reason = f"is a {type(projection).__name__}"
    elif "forward" in vars(projection):
        reason = "has a forward of its own"
    elif any(getattr(projection, name) for name in _HOOKS):  # weight norms and pruning make the weight in one
        reason = "has hooks"
    elif is_traceable_wrapper_subclass(projection.weight):  # quantized, or spread over devices
        reason = f"has a weight that is a {type(projection.weight).__name__}"
    else:
        return True
    if not torch.compiler.is_compiling():
        _log_once(f"a feed-forward network keeps its activation: its projection {reason}")
    return False


_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


@cache
def _log_once(message: str) -> None:
    _log.warning(message)


def _recomputed(hidden: Tensor, projection: nn.Linear, activation: str) -> Tensor:
    """``projection(act(hidden))``, whose backward finds ``hidden`` alone."""
    return activation_linear(hidden, projection.weight, projection.bias, activation=activation)


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "gelu": GeluFeedForward,
    "gelu_tanh": partial(GeluFeedForward, approximate="tanh"),
    "swiglu": SwigluFeedForward,
}


def make_feed_forward(
    kind: str,
    width: int,
    *,
    hidden_size: int | None = None,
    bias: bool = False,
    dropout: float = 0.0,
    recompute: bool = False,
) -> nn.Module:
    """The feed-forward network called ``kind``, one of FEED_FORWARDS; ``ValueError`` for another name."""
    check_choice("feed_forward", kind, tuple(FEED_FORWARDS))
    return FEED_FORWARDS[kind](width, hidden_size=hidden_size, bias=bias, dropout=dropout, recompute=recompute)
