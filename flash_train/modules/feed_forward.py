"""The feed-forward networks of a transformer block."""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.modules.checks import check_choice, check_dropout, check_positive
from flash_train.ops.activation_linear import activation_linear

_log = logging.getLogger(__name__)


class GeluFeedForward(nn.Module):
    """GPT-2's: ``projection(gelu(expand(x)))``; ``[..., C]`` to ``[..., C]``, hidden size 4 C.

    ``approximate`` is torch's: ``"none"`` for the exact GELU, which nanoGPT takes, ``"tanh"`` for GPT-2's own. With
    ``recompute`` the backward computes the activation again from its input instead of keeping it, unless another
    module was put in ``projection``'s place; hooks of ``projection`` are then not called.
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
    """Whether it is what its weight and bias say. An adapter in its place, or a weight that is made of others, is not:
    then the module itself is called, and the activation is kept."""
    if type(projection) is nn.Linear:
        return True
    if not torch.compiler.is_compiling():
        _log_once(f"a feed-forward network keeps its activation: its projection is a {type(projection).__name__}")
    return False


@cache
def _log_once(message: str) -> None:
    _log.warning(message)


def _recomputed(hidden: Tensor, projection: nn.Linear, activation: str) -> Tensor:
    """``projection(act(hidden))``, whose backward finds ``hidden`` alone; hooks of ``projection`` are not called."""
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
