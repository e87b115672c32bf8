"""The pre-norm transformer block."""

from torch import Tensor, nn

from flash_train.modules.norm import EPSILON, make_norm, normalize
from flash_train.ops.features import Documents


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; ``[B, T, C]`` to ``[B, T, C]``.

    ``attention`` and ``feed_forward`` are modules from ``[B, T, C]`` to ``[B, T, C]`` that do their own residual
    dropout; ``norm``, ``bias`` and ``epsilon`` are those of ``make_norm``. Only with documents must ``attention`` know
    the word.
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        width: int,
        norm: str = "layer",
        bias: bool = False,
        epsilon: float = EPSILON,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(norm, width, bias=bias, epsilon=epsilon)
        self.attention = attention
        self.feed_forward_norm = make_norm(norm, width, bias=bias, epsilon=epsilon)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, *, documents: Tensor | Documents | None = None) -> Tensor:
        """Run the block on ``x`` ``[B, T, C]``; ``documents`` are those of ``SelfAttention``."""
        normed = normalize(self.attention_norm, x)
        x = x + (self.attention(normed) if documents is None else self.attention(normed, documents=documents))
        return x + self.feed_forward(normalize(self.feed_forward_norm, x))
