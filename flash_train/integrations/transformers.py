"""`attn_implementation="flash_train"` in Hugging Face's transformers.

    from flash_train.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_train")

A layer is handed the smallest of these that says what is seen: no mask, or [B, S] padding, beside which its own
is_causal and sliding_window hold; `Mask`, of packed documents; [B, 1, T, S], boolean or added, which says all. The last
has the size that this package exists to avoid: it is made for patterns that are more than causal, windowed, padded or
packed, and for models that declare no support for flash attention, since these may compute with their mask.

Made for transformers 5.24.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils.import_utils import is_tracing
from transformers.utils.versions import require_version

from flash_train.ops.attention import flash_attention
from flash_train.ops.features import NO_MASK, Documents, Mask, Score

NAME = "flash_train"
MAKERS = (
    "and_masks",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
)
"""transformers' functions that make conditions, of which a mask is made; what they return cannot be looked into."""
PATTERNS = (
    {"causal_mask_function"},
    {"causal_mask_function", "sliding_window_overlay"},
    {"causal_mask_function", "packed_sequence_mask_function"},
    {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"},
    {"bidirectional_mask_function"},
    {"bidirectional_mask_function", "sliding_window_bidirectional_overlay"},
)
"""The sets of conditions that need no [T, S] matrix."""
HARMLESS = frozenset(
    "use_cache cache_position position_embeddings num_items_in_batch output_hidden_states output_router_logits "
    "return_dict max_length_q max_length_k seq_idx".split()
)
"""What models hand on to their attention though it concerns others, or repeats what is known."""
_passes_padding: dict[type[PreTrainedConfig], bool] = {}
"""Whether all models of a configuration's class hand a padding mask on as it is: flash attention needs it to."""


@cache
def register() -> None:
    """Make "flash_train" a name that transformers knows; calling it again does nothing.

    Models take it as `attn_implementation=`, by `set_attn_implementation` or in their configuration. Grouped heads,
    padding, packed sequences (`position_ids` that begin anew, or cu_seq_lens), sliding windows, key-value caches, soft
    caps, sinks, position biases and dropout are honoured. An argument that is not known raises ValueError by its name
    when the model runs; so does output_attentions=True.

    Raises:
        ImportError: an older transformers.
    """
    require_version("transformers>=5.24", "pip install -U transformers")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _attention_mask)
    adjust = PreTrainedModel._check_and_adjust_attn_implementation

    @wraps(adjust)
    def adjust_other_names(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **options: Any) -> str:
        # For any name with "flash" in it transformers looks for a package, or takes another one (gpt-oss).
        if attn_implementation != NAME:
            return adjust(self, attn_implementation, *args, **options)
        kind = type(self.config)
        _passes_padding[kind] = _passes_padding.get(kind, True) and bool(self._supports_flash_attn)
        return self.get_correct_attn_implementation(NAME)

    PreTrainedModel._check_and_adjust_attn_implementation = adjust_other_names
    for name in MAKERS:
        setattr(masking_utils, name, _noted(getattr(masking_utils, name)))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: query [B, H, T, D], key [B, G, S, D], value [B, G, S, E] -> ([B, T, H, E], no weights)."""
    _refuse(module, others)
    reach = None if sliding_window is None else sliding_window - 1  # the window counts the query's own position
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = Mask(causal=causal, window=(reach, reach)), position_bias
    if attention_mask is None:
        mask = replace(mask, documents=_documents(query, key, position_ids, cu_seq_lens_q, cu_seq_lens_k))
    elif isinstance(attention_mask, Mask):
        mask = attention_mask
    elif attention_mask.dim() == 2 and cu_seq_lens_q is None and cu_seq_lens_k is None:
        S = attention_mask.shape[1]  # a static cache ends in keys that are not written yet
        key, value, bias = key[:, :, :S], value[:, :, :S], None if bias is None else bias[..., :S]
        mask = replace(mask, allowed=attention_mask[:, None, None].bool())
    else:
        mask, bias = _complete(attention_mask, bias)
    output = flash_attention(
        query,
        key,
        value,
        mask=mask,
        score=Score(soft_cap=softcap or None, bias=bias, sinks=s_aux),
        scale=scaling,
        dropout=dropout,
        deterministic=deterministic or None,
    )
    return output.transpose(1, 2), None


def _complete(attention_mask: Tensor, bias: Tensor | None) -> tuple[Mask, Tensor | None]:
    """(mask, bias) of [B, 1, T, S], which needs nothing beside it."""
    if attention_mask.dim() == 4 and attention_mask.dtype == torch.bool:
        return Mask(allowed=attention_mask), bias
    if attention_mask.dim() == 4 and attention_mask.is_floating_point():
        return NO_MASK, attention_mask if bias is None else attention_mask + bias
    raise ValueError(
        "attention_mask must be [B, S] without cu_seq_lens, or boolean or floating [B, 1, T, S], got "
        f"{list(attention_mask.shape)} of {attention_mask.dtype}; attn_implementation='sdpa' may take it"
    )


def _refuse(module: nn.Module, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name == "output_attentions" and value:
            raise ValueError("output_attentions must be False: no weights exist; use attn_implementation='eager'")
        if name not in HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"attn_implementation={NAME!r} does not know {name}, which {type(module).__name__} got or passes; "
                "leave it out, or use attn_implementation='sdpa' or 'eager'"
            )


def _documents(
    query: Tensor, key: Tensor, position_ids: Tensor | None, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None
) -> Documents | None:
    """The documents of a batch without a mask: by their bounds in a single row, or where positions do not go on."""
    B, T, S = len(query), query.shape[2], key.shape[2]
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if B != 1 or cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise ValueError(
                f"cu_seq_lens_q and cu_seq_lens_k come together, as bounds in one row, got a batch of {B}; flatten it"
            )
        return Documents.from_cu_seqlens(cu_seq_lens_q, cu_seq_lens_k, T, S)
    if T == 1 or T != S or position_ids is None or position_ids.shape not in ((1, T), (B, T)):
        return None
    return _remembered(position_ids, B)


def _documents_by_position(position_ids: Tensor, B: int) -> Documents | None:
    ids = masking_utils.find_packed_sequence_indices(position_ids)
    return None if ids is None else Documents.from_ids(ids.expand(B, -1))


def _remembered(position_ids: Tensor, B: int) -> Documents | None:
    """`_documents_by_position`, asked once for all layers, which share the tensor: it waits for the device."""
    if is_tracing(position_ids) or position_ids.is_inference():
        return _documents_by_position(position_ids, B)
    asked = position_ids._version, B
    known, documents = getattr(position_ids, "_flash_train_documents", (None, None))
    if known != asked:
        documents = _documents_by_position(position_ids, B)
        position_ids._flash_train_documents = asked, documents  # pyright: ignore[reportAttributeAccessIssue]
    return documents


def _attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: PreTrainedConfig | None = None,
    **others: Any,
) -> Tensor | Mask | None:
    """What transformers calls once in a forward pass and kind of layer: the smallest form of mask that is exact.

    `mask_function` tells what is seen by the indices of row, head, query and key; query t has the index t + `q_offset`,
    key s the index s + `kv_offset`. `attention_mask` is boolean padding by the index of the key.
    """
    if isinstance(q_offset, Tensor) and q_length > 1 and not is_tracing(q_offset):
        q_offset = int(q_offset)
    end = q_offset + q_length - kv_offset
    pattern = _read(mask_function) if config is not None and _passes_padding.get(type(config), False) else {}
    if "packed_sequence_mask_function" in pattern and attention_mask is None:
        return _packed(pattern)
    S = _keys_in_reach(pattern, kv_length, end)
    if S is not None and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return _padding(attention_mask, batch_size, kv_offset, S, kv_length, others.get("device"))
    return masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # pyright: ignore[reportArgumentType]  (its own static caches give a tensor)
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and isinstance(end, int) and end == kv_length,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **others,
    )


def _keys_in_reach(pattern: dict[str, tuple[Any, ...]], S: int, end: int | Tensor) -> int | None:
    """How many keys there are, from the first, for a layer that stands its last query beside the last of them.

    `end` is that last one's place + 1 by the indices; what a static cache has behind it is not written yet. None where
    a layer's own is_causal and sliding_window do not say what the pattern does.
    """
    if list(pattern) == ["bidirectional_mask_function"]:
        return S
    if not pattern or not isinstance(end, int) or end > S:
        return None
    return None if "bidirectional_mask_function" in pattern and end < S else end


def _padding(
    attention_mask: Tensor | None, B: int, kv_offset: int, S: int, kv_length: int, device: Any
) -> Tensor | None:
    """[B, S], True where a key counts; None if all of a layer's keys do."""
    if attention_mask is None:
        return None if S == kv_length else torch.ones(B, S, dtype=torch.bool, device=device)
    padding = attention_mask[:, kv_offset : kv_offset + S]
    padding = torch.nn.functional.pad(padding, (0, S - padding.shape[1]))
    if S == kv_length and not is_tracing(padding) and bool(padding.all()):
        return None
    return padding


def _packed(pattern: dict[str, tuple[Any, ...]]) -> Mask:
    window = pattern.get("sliding_window_overlay")
    (ids,) = pattern["packed_sequence_mask_function"]
    return Mask(causal=True, window=window and (window[0] - 1, None), documents=Documents.from_ids(ids))


def _noted(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of conditions whose results say who made them, and of what."""

    @wraps(make)
    def noted(*held: Any) -> Any:
        condition = make(*held)
        condition._flash_train_made_by = make.__name__, held
        return condition

    return noted


def _read(mask_function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The conditions of a known pattern, by the names that transformers gives them, and what they hold; else none."""
    conditions = dict(_conditions(mask_function))
    return conditions if set(conditions) in PATTERNS else {}


def _conditions(mask_function: Callable[..., Any]) -> list[tuple[str, tuple[Any, ...]]]:
    if mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        return [(mask_function.__name__, ())]
    name: str
    held: tuple[Any, ...]
    name, held = getattr(mask_function, "_flash_train_made_by", ("unknown", ()))
    if name == "remap_positions_for_packed_sequence":  # a position counts inside its document
        return _conditions(held[0])
    if name == "and_masks":
        return [condition for part in held for condition in _conditions(part)]
    return [(name, held)]
