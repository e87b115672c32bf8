"""Self-attention as a module that fits into any model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_train.modules.alibi import alibi_slopes
from flash_train.modules.checks import check_choice, check_dropout, check_positive
from flash_train.modules.norm import Norm, make_norm
from flash_train.modules.rotary import RotaryEmbedding
from flash_train.ops.attention import IMPLEMENTATIONS, flash_attention, flash_attention_qkv
from flash_train.ops.checks import LARGEST, check_flag, check_number
from flash_train.ops.features import Documents, Mask, Score, split_heads

SINK_DEVIATION = 0.02  # transformers' gpt-oss, at its default initializer_range


class SelfAttention(nn.Module):
    """Multi-head self-attention with grouped key/value heads: ``[B, T, C]`` to ``[B, T, C]``.

    Queries, keys and values come from one fused projection and reach the op as views; nothing is copied on the way in
    or out, except by QK-norm and rotation, which make new values anyway. What the model is has its place among the
    arguments here, what differs from batch to batch among those of the call.

    Arguments:
        width: C, the size of the last dimension of input and output.
        heads: H, the number of query heads.
        kv_heads: G, the number of key/value heads, a divisor of H (default H: every query head has its own).
        head_size: D (default C / H, which must then be a whole number).
        causal: whether a position sees only itself and the positions before it.
        window: (left, right): a position sees at most ``left`` positions before and ``right`` after its own; None in
            it is unbounded. With ``causal``, right is 0 whatever it says.
        rotary: turns queries and keys; share one instance among the layers of a model.
        alibi: True for the slopes of ``alibi_slopes``, or the slopes themselves, H finite numbers: each times the
            distance is taken from the scores. They are not learned and no part of the state dict.
        qk_norm: RMS-normalize each head's queries and keys, with learned gains, before the rotation.
        scale: of the scores (default 1 / sqrt(D)).
        soft_cap: the scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2).
        sinks: whether each head has one more logit, learned, in the softmax's denominator alone (gpt-oss): the
            parameter ``sinks`` [H], drawn from N(0, 0.02) as transformers draws gpt-oss's.
        bias: whether the two projections have biases.
        dropout: probability of dropping an element of the output (residual dropout), in training only.
        attention_dropout: probability of dropping a softmax probability, likewise.
        deterministic: as ``flash_attention`` has it; None follows torch's own switch.
        implementation: a name from ``flash_train.ops.attention.IMPLEMENTATIONS``. The ``"sdpa"`` ones refuse, when
            they are called, what torch's function lacks.

    Raises ``ValueError`` for sizes that do not divide, numbers out of range, slopes that require a gradient and an
    unknown implementation, and ``TypeError`` for arguments of another class.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        rotary: RotaryEmbedding | None = None,
        alibi: bool | Sequence[float] | Tensor = False,
        qk_norm: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        deterministic: bool | None = None,
        implementation: str = "flash",
    ) -> None:
        super().__init__()
        check_choice("implementation", implementation, IMPLEMENTATIONS)
        check_features(causal, window, scale, soft_cap, sinks, deterministic)
        check_flag("qk_norm", qk_norm)
        check_flag("bias", bias)
        check_dropout("dropout", dropout)
        check_dropout("attention_dropout", attention_dropout)
        self.heads, self.kv_heads, self.head_size = resolve_heads(width, heads, kv_heads, head_size)
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise TypeError(
                f"rotary must be a RotaryEmbedding, got {type(rotary).__name__}: "
                f"build it as RotaryEmbedding({self.head_size}, context_length)"
            )
        if rotary is not None and rotary.head_size != self.head_size:
            raise ValueError(
                f"rotary turns heads of size {rotary.head_size}, but these have {self.head_size}: "
                f"build it as RotaryEmbedding({self.head_size}, context_length)"
            )
        self.width = width
        self.causal = causal
        self.window = window
        self.scale = scale
        self.soft_cap = soft_cap
        self.attention_dropout = attention_dropout
        self.deterministic = deterministic
        self.implementation = implementation
        self.rotary = rotary
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head_size, bias=bias)
        self.query_norm = make_norm("rms", self.head_size) if qk_norm else None
        self.key_norm = make_norm("rms", self.head_size) if qk_norm else None
        self.projection = nn.Linear(self.heads * self.head_size, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self._add_slopes(resolve_slopes(alibi, self.heads))
        self.sinks = nn.Parameter(torch.empty(self.heads)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the sinks anew, in place; the projections are modules of their own."""
        if self.sinks is not None:
            nn.init.normal_(self.sinks, std=SINK_DEVIATION)

    def _add_slopes(self, slopes: list[float] | None) -> None:
        self._slopes = slopes
        buffer = None if slopes is None else torch.empty(self.heads, dtype=torch.float32)
        self.register_buffer("alibi_slopes", buffer, persistent=False)
        self._fill_slopes()

    def _fill_slopes(self) -> None:
        if self.alibi_slopes is not None:
            dtype = torch.promote_types(self.alibi_slopes.dtype, torch.float32)
            self.alibi_slopes = torch.tensor(self._slopes, dtype=dtype, device=self.alibi_slopes.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SelfAttention":
        # module.to(bfloat16) would round the slopes, and to_empty() leaves them unset, so they are made anew.
        super()._apply(fn, recurse)
        self._fill_slopes()
        return self

    def forward(
        self,
        x: Tensor,
        *,
        documents: Tensor | Documents | None = None,
        allowed: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend within each row of ``x`` ``[B, T, C]``; the result is ``[B, T, C]``, of the projections' dtype.

        Arguments:
            documents: integer ids ``[B, T]``, or ``Documents`` made of them once for all layers: a position sees
                only its own run of equal ids. Rotary positions run on through the row, for they act by differences.
            allowed: boolean, broadcastable to ``[B, H, T, T]``: True where a query may see a key.
            bias: floating, broadcastable to ``[B, H, T, T]``, added to the scores; it has a gradient.

        Raises ``ValueError`` for another number of dimensions or another C, and as ``flash_attention`` does.
        """
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise ValueError(
                f"x must be [B, T, C] with C = width = {self.width}, got {list(x.shape)}: "
                "add a missing batch dimension with unsqueeze(0)"
            )
        options: dict[str, Any] = dict(
            mask=Mask(self.causal, self.window, documents=documents, allowed=allowed),
            score=Score(self.soft_cap, self.alibi_slopes, bias, self.sinks),
            scale=self.scale,
            dropout=self.attention_dropout if self.training else 0.0,
            deterministic=self.deterministic,
            implementation=self.implementation,
        )
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_size))
        if self.rotary is None and self.query_norm is None:
            attended = flash_attention_qkv(qkv, self.heads, **options)
        else:
            q, k, v = split_heads(qkv, self.heads)
            q = self._normalize_and_turn(q, self.query_norm)
            k = self._normalize_and_turn(k, self.key_norm)
            attended = flash_attention(q, k, v, **options)
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
        features = {
            "window": self.window,
            "alibi": self.alibi_slopes is not None or None,
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks is not None or None,
            "attention_dropout": self.attention_dropout or None,
        }
        chosen = "".join(f", {name}={value}" for name, value in features.items() if value is not None)
        return f"{sizes}, causal={self.causal}{chosen}, implementation={self.implementation!r}"


def check_features(
    causal: bool,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: bool,
    deterministic: bool | None,
) -> None:
    """What the first call would refuse, in the same words, and flags that are none."""
    Mask(causal, window)
    Score(soft_cap)
    if scale is not None:
        check_number("scale", scale)
        if not 0 < scale <= LARGEST:
            raise ValueError(
                f"scale must be positive and at most {LARGEST:g}, got {scale}: None is 1 / sqrt(head_size)"
            )
    check_flag("sinks", sinks)
    if deterministic is not None:
        check_flag("deterministic", deterministic)


def resolve_slopes(alibi: bool | Sequence[float] | Tensor, heads: int) -> list[float] | None:
    """The slopes that ``alibi`` stands for, None for none; ``ValueError`` unless they are H finite, fixed numbers."""
    if isinstance(alibi, bool):
        return alibi_slopes(heads) if alibi else None
    parts = alibi if isinstance(alibi, Iterable) and not isinstance(alibi, Tensor) else [alibi]
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        raise ValueError(
            "alibi must be slopes that are not learned, got a tensor that requires a gradient: "
            "give alibi.detach(), or learn a bias and give it to each call"
        )
    try:
        slopes = torch.as_tensor(alibi, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"alibi must be True, False or one number for each of heads={heads}, got {alibi!r}: True makes the paper's"
        ) from error
    if slopes.shape != (heads,):
        raise ValueError(
            f"alibi must have one slope a head, [{heads}], got shape {list(slopes.shape)}: True makes the paper's"
        )
    if not slopes.float().isfinite().all():  # which they are kept in
        raise ValueError(f"alibi must be finite in fp32, got {slopes.tolist()}: a slope of 0 leaves its head alone")
    return slopes.tolist()


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
