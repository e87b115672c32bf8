"""What a query sees and what is added to its scores: the public records, and the flat form that the operators take.

The one rule of visibility: query t stands beside key p = t + shift and sees the keys from p - left to p + right, both
ends included, that its document has. `shift` is S - T where the last query is aligned with the last key
("bottom_right"), 0 where the first is with the first ("top_left"); with documents, T, S and the positions are those of
the document. `causal` is right = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_train.ops.checks import (
    DTYPES,
    LARGEST,
    SMALLEST,
    check_device,
    check_flag,
    check_number,
    check_tensor,
    whole_number,
)
from flash_train.ops.documents import Documents

ALIGNMENTS = ("bottom_right", "top_left")
UNBOUNDED = 2**30
"""The window's reach where it has no end."""
SEED_STEP = 0x9E3779B97F4A7C15 - 2**64
"""What document (or batch row) n adds, n times, to the dropout's seed: 2^64 over the golden ratio, as an int64."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees. Everything that is given must allow a pair."""

    causal: bool = False
    """Query t sees no key after the one that it is aligned with."""
    window: tuple[int | None, int | None] | None = None
    """(left, right): a query sees the keys from its own position - left to its position + right; None is unbounded."""
    alignment: str = "bottom_right"
    """Whether the last query stands beside the last key, or the first beside the first ("top_left")."""
    documents: Tensor | Documents | None = None
    """[B, T] ids, T = S: positions see each other inside a run of equal ids. Or `Documents`, prepared."""
    allowed: Tensor | None = None
    """Boolean, broadcastable to [B, H, T, S]: True where the pair takes part."""

    def __post_init__(self) -> None:
        check_flag("causal", self.causal)
        if self.alignment not in ALIGNMENTS:
            raise ValueError(f"alignment must be one of {', '.join(ALIGNMENTS)}, got {self.alignment!r}")
        if self.window is not None:
            _check_window(self.window)
        if self.documents is not None and not isinstance(self.documents, (Tensor, Documents)):
            raise TypeError(
                f"documents must be a [B, T] tensor of ids or Documents, got {type(self.documents).__name__}; "
                "make one with torch.as_tensor"
            )
        if self.allowed is not None:
            check_tensor("allowed", self.allowed)
            if self.allowed.dtype != torch.bool:
                raise ValueError(
                    f"allowed must be boolean, got {self.allowed.dtype}; an additive mask is Score(bias=...)"
                )


def _check_window(window: object) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"window must be (left, right), got {window}; None in it is unbounded, (n, 0) is the last n + 1 keys"
        )
    for side in window:
        number = whole_number(side)
        if side is not None and (number is None or not 0 <= number < UNBOUNDED):
            raise ValueError(
                f"window must hold whole numbers from 0 to {UNBOUNDED - 1}, got {window}; None in it is unbounded"
            )


@dataclass(frozen=True, eq=False)
class Score:
    """What becomes of s = scale q k^T before the softmax, in this order: soft cap, ALiBi, bias; the mask; the sinks."""

    soft_cap: float | None = None
    """s becomes cap tanh(s / cap) (Gemma 2)."""
    alibi_slopes: Tensor | None = None
    """[H]: minus slope times the distance between the aligned query and the key is added (ALiBi); no gradient."""
    bias: Tensor | None = None
    """Floating, broadcastable to [B, H, T, S], added; its gradient is summed over what was broadcast.

    Rows that shall see nothing want `-inf`, or `Mask(allowed=...)`: where all of a row's scores are as low as -1e6, the
    log-sum-exp has no room for the logarithm of their number, and the row's gradients grow (as in torch's own kernels).
    """
    sinks: Tensor | None = None
    """[H]: one more logit a row, in the softmax's denominator alone (and so in the log-sum-exp); has a gradient."""

    def __post_init__(self) -> None:
        if self.soft_cap is not None:
            check_number("soft_cap", self.soft_cap)
            if not 0 < self.soft_cap <= LARGEST:
                raise ValueError(
                    f"soft_cap must be positive and at most {LARGEST:g}, got {self.soft_cap}; None leaves scores alone"
                )
        for name in ("alibi_slopes", "bias", "sinks"):
            x = getattr(self, name)
            if x is None:
                continue
            check_tensor(name, x)
            if x.dtype not in DTYPES:
                hint = "; a boolean mask is Mask(allowed=...)" if x.dtype == torch.bool else "; cast it with .float()"
                raise ValueError(f"{name} must be floating (fp16, bf16, fp32 or float64), got {x.dtype}{hint}")
        if self.alibi_slopes is not None and self.alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes has no gradient, and requires one; detach it, or learn a bias instead")


class Terms(NamedTuple):
    """All that the operators take beside q, k and v, in the order of their schemas; absent tensors are None."""

    scale: float
    bias: Tensor | None = None
    """[B or 1, H or 1, T or 1, S or 1]"""
    allowed: Tensor | None = None
    """likewise"""
    alibi_slopes: Tensor | None = None
    """[B, H], fp32 (float64 beside float64)"""
    sinks: Tensor | None = None
    """likewise"""
    seed: Tensor | None = None
    """[B] int64: the dropout's"""
    bounds: Tensor | None = None
    """This and the next two: see `Documents`."""
    query_document: Tensor | None = None
    key_document: Tensor | None = None
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    top_left: bool = False
    soft_cap: float = 0.0
    """0 is none"""
    dropout: float = 0.0
    output_dtype: torch.dtype | None = None
    """The inputs' if None"""
    deterministic: bool = False
    implementation: str = "flash"

    @property
    def is_bounded(self) -> bool:
        """Whether windows or a causal mask hide a key."""
        return self.left < UNBOUNDED or self.right < UNBOUNDED


TENSORS = slice(Terms._fields.index("bias"), Terms._fields.index("left"))
"""Where `Terms` has its tensors."""


def has_tensors(terms: Terms) -> bool:
    for x in terms[TENSORS]:
        if x is not None:
            return True
    return False


def pack(terms: Terms) -> tuple[Any, ...]:
    """`Terms` as the end of an operator's arguments: in one piece where they are numbers alone, else flat. Autograd
    and the check for watchers (`library.below_autograd`) take a quarter of a microsecond for each argument."""
    return terms if has_tensors(terms) else (terms,)


def unpack(rest: Sequence[Any]) -> Terms:
    """What `pack` was given."""
    return rest[0] if len(rest) == 1 else Terms(*rest)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, T, D], k and v [B, G, T, D], which are views of qkv [B, T, H + 2 G, D]."""
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def join_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reverse of `split_heads`, a copy."""
    return torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2)


SCHEMA = (
    "float scale, Tensor? bias, Tensor? allowed, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor? bounds, "
    "Tensor? query_document, Tensor? key_document, SymInt left, SymInt right, bool top_left, float soft_cap, "
    "float dropout, ScalarType? output_dtype, bool deterministic, str implementation"
)
"""`Terms` as torch.library spells it. A window may grow with a length that is a symbol under torch.compile."""
NO_MASK, NO_SCORE = Mask(), Score()


def flatten(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    score: Score,
    *,
    scale: float,
    dropout: float,
    output_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    implementation: str = "flash",
) -> Terms:
    """The records as `Terms`, their shapes and devices checked against q [B, H, T, D] and k [B, G, S, D].

    With dropout, a seed is drawn by torch's generator of q's device.
    """
    B, H, T, _ = q.shape
    S = k.shape[2]
    left, right = (UNBOUNDED if x is None else x for x in mask.window or (None, None))
    documents = mask.documents
    if isinstance(documents, Tensor):
        check_device("documents", documents, q)
        documents = Documents.from_ids(documents)
    if documents is not None:
        _check_documents(documents, q, S)
    return Terms(
        scale,
        _broadcastable("bias", score.bias, q, S),
        _broadcastable("allowed", mask.allowed, q, S),
        _per_head("alibi_slopes", score.alibi_slopes, q),
        _per_head("sinks", score.sinks, q),
        _draw_seed(q, packed=documents is not None) if dropout > 0 else None,
        *((documents.bounds, documents.query_document, documents.key_document) if documents else (None, None, None)),
        left=left,
        right=0 if mask.causal else right,
        top_left=mask.alignment == "top_left",
        soft_cap=0.0 if score.soft_cap is None else max(float(score.soft_cap), SMALLEST),
        dropout=float(dropout),
        output_dtype=output_dtype,
        deterministic=deterministic,
        implementation=implementation,
    )


def _draw_seed(q: Tensor, *, packed: bool) -> Tensor:
    """[B] int64: rows of a batch get seeds apart; documents are told apart by their numbers instead."""
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=q.device, dtype=torch.int64)
    if packed:
        return seed.expand(q.shape[0])
    return seed + torch.arange(q.shape[0], device=q.device) * wide(SEED_STEP, seed)


def wide(number: int, seed: Tensor) -> Tensor:
    """The number in 64 bits, as if it depended on the seed: torch's compiler multiplies what it knows for an index,
    such as `arange`, by a constant in 32 bits, which is wrong or does not compile on a GPU."""
    return (seed & 0) | number


def _check_documents(documents: Documents, q: Tensor, S: int) -> None:
    B, _, T, _ = q.shape
    shapes = list(documents.query_document.shape), list(documents.key_document.shape)
    if shapes != ([B, T], [B, S]):
        raise ValueError(
            f"documents must give each of B={B} x T={T} queries and B={B} x S={S} keys a document, got {shapes[0]} and "
            f"{shapes[1]}; where queries and keys differ in length use flash_attention_packed"
        )
    for name in ("bounds", "query_document", "key_document"):
        x = getattr(documents, name)
        if x.dtype != torch.int32 or (name == "bounds" and (x.dim() != 2 or x.shape[1] != 4)):
            raise ValueError(
                f"documents.{name} must be int32{', [N, 4]' if name == 'bounds' else ''}, got {list(x.shape)} of "
                f"{x.dtype}; make them by Documents.from_ids or Documents.from_cu_seqlens"
            )
        check_device(f"documents.{name}", x, q)


def _broadcastable(name: str, x: Tensor | None, q: Tensor, S: int) -> Tensor | None:
    """`x` with four dimensions, each 1 or whole."""
    if x is None:
        return None
    whole = (*q.shape[:3], S)
    if x.dim() > 4 or any(a != 1 and a != b for a, b in zip(reversed(x.shape), reversed(whole), strict=False)):
        raise ValueError(
            f"{name} must be broadcastable to [B, H, T, S] = {list(whole)}, got {list(x.shape)}; "
            "put the missing dimensions in with unsqueeze or [:, None]"
        )
    check_device(name, x, q)
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x


def _per_head(name: str, x: Tensor | None, q: Tensor) -> Tensor | None:
    """[H] as [B, H]."""
    if x is None:
        return None
    if x.dim() != 1 or x.shape[0] != q.shape[1]:
        raise ValueError(
            f"{name} must be [H] = [{q.shape[1]}], one number a query head, got {list(x.shape)}; "
            f"one for all heads is x.expand({q.shape[1]})"
        )
    check_device(name, x, q)
    return x.to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[0], -1)


class Rows(NamedTuple):
    """What some queries see: each [T], or [B, T] with documents."""

    aligned: Tensor
    """The key that the query stands beside: p."""
    low: Tensor
    """The first key that it sees."""
    high: Tensor
    """The last one + 1; at or below `low` if it sees none."""

    def cut(self, rows: slice) -> "Rows":
        return Rows(*(x[..., rows] for x in self))


def rows_of(T: int, S: int, terms: Terms, device: torch.device | None = None) -> Rows:
    """The module's one rule, as tensors."""
    t = torch.arange(T, device=device)
    first, end = torch.zeros_like(t), torch.full_like(t, S)
    shift = torch.full_like(t, 0 if terms.top_left else S - T)
    if terms.bounds is not None and terms.query_document is not None:
        q_first, q_end, first, end = terms.bounds.long()[terms.query_document.long()].unbind(-1)
        shift = first - q_first if terms.top_left else end - q_end
    aligned = t + shift
    low, high = torch.maximum(aligned - terms.left, first), torch.minimum(aligned + terms.right + 1, end)
    return Rows(aligned, low.clamp(0, S), high.clamp(0, S))
