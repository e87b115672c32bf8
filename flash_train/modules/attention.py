"""Self-attention as a module that fits into any model."""

from torch import Tensor, nn

from flash_train.modules.checks import check_choice, check_positive
from flash_train.modules.norm import Norm, make_norm
from flash_train.modules.rotary import RotaryEmbedding
from flash_train.ops.attention import IMPLEMENTATIONS, flash_attention


class SelfAttention(nn.Module):
    """Multi-head self-attention with grouped key/value heads: ``[B, T, C]`` to ``[B, T, C]``.

    Queries, keys and values come from one fused projection and reach the op as views; nothing is copied on the way in
    or out, except by QK-norm and rotation, which make new values anyway.

    Arguments:
        width: C, the size of the last dimension of input and output.
        heads: H, the number of query heads.
        kv_heads: G, the number of key/value heads, a divisor of H (default H: every query head has its own).
        head_size: D (default C / H, which must then be a whole number).
        causal: whether a position sees only itself and the positions before it.
        rotary: turns queries and keys; share one instance among the layers of a model.
        qk_norm: RMS-normalize each head's queries and keys, with learned gains, before the rotation.
        bias: whether the two projections have biases.
        dropout: probability of dropping an element of the output (residual dropout).
        implementation: a name from ``flash_train.ops.attention.IMPLEMENTATIONS``.

    Raises ``ValueError`` for sizes that do not divide and for an unknown implementation.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        causal: bool = True,
        rotary: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        implementation: str = "flash",
    ) -> None:
        super().__init__()
        check_choice("implementation", implementation, IMPLEMENTATIONS)
        self.heads, self.kv_heads, self.head_size = resolve_heads(width, heads, kv_heads, head_size)
        if rotary is not None and rotary.head_size != self.head_size:
            raise ValueError(
                f"rotary turns heads of size {rotary.head_size}, but these have {self.head_size}: "
                f"build it as RotaryEmbedding({self.head_size}, context_length)"
            )
        self.width = width
        self.causal = causal
        self.implementation = implementation
        self.rotary = rotary
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head_size, bias=bias)
        self.query_norm = make_norm("rms", self.head_size) if qk_norm else None
        self.key_norm = make_norm("rms", self.head_size) if qk_norm else None
        self.projection = nn.Linear(self.heads * self.head_size, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each row of ``x`` ``[B, T, C]``; the result is ``[B, T, C]``, of the projections' dtype.

        Raises ``ValueError`` for another number of dimensions or another C.
        """
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise ValueError(
                f"x must be [B, T, C] with C = width = {self.width}, got {list(x.shape)}: "
                "add a missing batch dimension with unsqueeze(0)"
            )
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q = self._normalize_and_turn(q, self.query_norm)
        k = self._normalize_and_turn(k, self.key_norm)
        attended = flash_attention(q, k, v, causal=self.causal, implementation=self.implementation)
        return self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))

    def _normalize_and_turn(self, x: Tensor, norm: Norm | None) -> Tensor:
        dtype = x.dtype
        if norm is not None:
            # Autocast hands over half precision with a float32 gain, a pair that torch's fused kernel does not take.
            x = norm(x.to(norm.weight.dtype))
        if self.rotary is not None:
            x = self.rotary(x)
        return x.to(dtype)

    def extra_repr(self) -> str:
        sizes = f"heads={self.heads}, kv_heads={self.kv_heads}, head_size={self.head_size}"
        return f"{sizes}, causal={self.causal}, implementation={self.implementation!r}"


def resolve_heads(width: int, heads: int, kv_heads: int | None, head_size: int | None) -> tuple[int, int, int]:
    """H, G and D with their defaults filled in; ``ValueError`` unless H divides the width and G divides H."""
    kv_heads = heads if kv_heads is None else kv_heads
    check_positive("width", width)
    check_positive("heads", heads)
    check_positive("kv_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(
            f"kv_heads must divide heads, got kv_heads={kv_heads} and heads={heads}: choose a divisor of {heads}"
        )
    if head_size is None:
        if width % heads:
            raise ValueError(
                f"heads must divide width, got heads={heads} and width={width}: "
                f"choose a width of {(width // heads + 1) * heads}, or another number of heads"
            )
        head_size = width // heads
    check_positive("head_size", head_size)
    return heads, kv_heads, head_size
