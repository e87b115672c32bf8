"""The masks that transformers' models are given under the name "flash_train": the smallest form that is exact.

transformers describes what is seen by a condition, a function of the indices of row, head, query and key. Those that it
makes itself are told apart by who made them, and of what; any other becomes a matrix.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils.import_utils import is_tracing

from flash_train.ops.features import Documents, Mask

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


def attention_mask_for(
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
    if isinstance(q_offset, Tensor) and q_length > 1 and can_be_read(q_offset):
        q_offset = int(q_offset)
    end = q_offset + q_length - kv_offset
    pattern = _read(mask_function) if config is not None and _passes_padding(type(config)) else {}
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
    if S == kv_length and can_be_read(padding) and bool(padding.all()):
        return None
    return padding


def _packed(pattern: dict[str, tuple[Any, ...]]) -> Mask:
    window = pattern.get("sliding_window_overlay")
    (ids,) = pattern["packed_sequence_mask_function"]
    return Mask(causal=True, window=window and (window[0] - 1, None), documents=Documents.from_ids(ids))


def can_be_read(x: Tensor) -> bool:
    """Whether its numbers are there: nothing is traced, and it is not on the meta device."""
    return not x.is_meta and not is_tracing(x)


@torch.compiler.assume_constant_result
def _passes_padding(kind: type[PreTrainedConfig]) -> bool:
    """Whether all models of a configuration's class hand a padding mask on as it is: flash attention needs it to."""
    models = [model for model in _below(PreTrainedModel) if model.config_class is kind]
    return bool(models) and all(model._supports_flash_attn for model in models)


def _below(kind: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def noted(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of conditions whose results say who made them, and of what."""

    @wraps(make)
    def noted(*held: Any) -> Any:
        condition = make(*held)
        condition._flash_train_made_by = make.__name__, held
        return condition

    return noted


def _read(mask_function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The conditions of a known pattern, by the names that transformers gives them, and what they hold; else none."""
    conditions = _conditions(mask_function)
    by_name = dict(conditions)
    return by_name if len(by_name) == len(conditions) and set(by_name) in PATTERNS else {}


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
