"""The pre-norm transformer block."""

from torch import Tensor, nn

from flash_train.modules.norm import make_norm


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; ``[B, T, C]`` to ``[B, T, C]``.

    ``attention`` and ``feed_forward`` are modules from ``[B, T, C]`` to ``[B, T, C]`` that do their own residual
    dropout; ``norm`` and ``bias`` are those of ``make_norm``.
    """

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, *, width: int, norm: str = "layer", bias: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(norm, width, bias=bias)
        self.attention = attention
        self.feed_forward_norm = make_norm(norm, width, bias=bias)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on ``x`` ``[B, T, C]``."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))
