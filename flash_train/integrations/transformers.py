"""`attn_implementation="flash_train"` in Hugging Face's transformers.

    from flash_train.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_train")

A layer is handed the smallest of these that says what is seen: no mask, or [B, S] padding, beside which its own
is_causal and sliding_window hold; `Mask`, of packed documents; [B, 1, T, S], boolean or added, which says all. The last
has the size that this package exists to avoid: it is made for patterns that are more than causal, windowed, padded or
packed, and for models that declare no support for flash attention, since these may compute with their mask.

Packed sequences (`position_ids` that begin anew) are kept apart for every model, also for those whose own attention
mixes them (OPT, BioGpt, GptOss), and also beside an attention_mask of ones, where "sdpa" mixes them and
"flash_attention_2" (of one row) does not. Where a key of the batch is padding, they are positions and no more.

transformers takes every name with "flash" in it for a kernel without masks, and so goes its own way in some models:
HrmText with prefix_lm and ESM-C with sequence_id raise its ValueError; Sam2, Sam3 and EdgeTam use "sdpa" where their
attention has an additive bias, and say so in a warning.

Made for transformers 5.24.
"""

from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedConfig,
        PreTrainedModel,
        masking_utils,
    )
    from transformers.utils.import_utils import is_tracing
    from transformers.utils.versions import require_version
except ImportError as error:
    raise ImportError(
        f"flash_train.integrations.transformers needs transformers>=5.24, got: {error}; "
        "pip install 'flash_train[transformers]'"
    ) from error

from flash_train.integrations.transformers_masks import MAKERS, attention_mask_for, noted
from flash_train.ops.attention import flash_attention
from flash_train.ops.features import NO_MASK, Documents, Mask, Score

NAME = "flash_train"
HARMLESS = frozenset(
    "use_cache cache_position position_embeddings num_items_in_batch output_hidden_states output_router_logits "
    "return_dict max_length_q max_length_k seq_idx".split()
)
"""What models hand on to their attention though it concerns others, or repeats what is known."""


@cache
def register() -> None:
    """Make "flash_train" a name that transformers knows; calling it again does nothing.

    Models take it as `attn_implementation=`, by `set_attn_implementation` or in their configuration. Grouped heads,
    padding, packed sequences (`position_ids` that begin anew, or cu_seq_lens), sliding windows, key-value caches, soft
    caps, sinks, position biases and dropout are honoured. An argument that is not known raises ValueError by its name
    when the model runs; so does output_attentions=True (GPT-2 keeps it to itself, and returns none, as with "sdpa").

    A model whose layers do not look their attention up by its name (Bloom, Falcon, GPT-Neo, MPT and others) raises
    ValueError when it is built.

    Raises:
        ImportError: an older transformers. One that is missing or much older is refused when this module is imported.
    """
    require_version("transformers>=5.24", "pip install 'flash_train[transformers]'")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, attention_mask_for)
    for name in MAKERS:
        setattr(masking_utils, name, noted(getattr(masking_utils, name)))
    _tell_from_flash_attention()


def _tell_from_flash_attention() -> None:
    """For a name with "flash" in it transformers looks for a package, takes another one (gpt-oss), or makes no mask."""
    adjust = PreTrainedModel._check_and_adjust_attn_implementation
    correct = PreTrainedModel.get_correct_attn_implementation
    is_flash_attention = masking_utils.is_flash_attention_requested  # pyright: ignore[reportPrivateImportUsage]

    @wraps(adjust)
    def adjust_other_names(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **options: Any) -> str:
        if attn_implementation == NAME:
            return self.get_correct_attn_implementation(NAME)
        return adjust(self, attn_implementation, *args, **options)

    @wraps(correct)
    def refuse_or_correct(self: PreTrainedModel, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == NAME:
            _check_model(self)
        return correct(self, requested_attention, *args, **options)

    @wraps(is_flash_attention)
    def is_other_flash_attention(config: PreTrainedConfig) -> bool:
        return config._attn_implementation != NAME and is_flash_attention(config)

    PreTrainedModel._check_and_adjust_attn_implementation = adjust_other_names
    PreTrainedModel.get_correct_attn_implementation = refuse_or_correct
    masking_utils.is_flash_attention_requested = is_other_flash_attention  # pyright: ignore[reportPrivateImportUsage]


def _check_model(model: PreTrainedModel) -> None:
    """Its layers would compute as they always do, without the mask that they then need, or look for flash-attention.

    `_can_set_attn_implementation` looks into the source for the registry; a model that does not declare SDPA may use
    it in a part of its layers alone.
    """
    if model._supports_attention_backend or (model._supports_sdpa and model._can_set_attn_implementation()):
        return
    raise ValueError(
        f"attn_implementation={NAME!r} needs layers that look their attention up by name, and {type(model).__name__} "
        "has others, or none; use attn_implementation='eager' or 'sdpa', or name the parts of a model that have them: "
        f"attn_implementation={{'text_config': {NAME!r}}}"
    )


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
    mask, bias = _own_mask(module, is_causal, sliding_window), position_bias
    if attention_mask is None:
        mask = replace(mask, documents=_documents(query, key, position_ids, cu_seq_lens_q, cu_seq_lens_k))
    elif isinstance(attention_mask, Mask):
        mask = attention_mask
    elif attention_mask.dim() == 2 and cu_seq_lens_q is None and cu_seq_lens_k is None:
        S = attention_mask.shape[1]  # a static cache ends in keys that are not written yet
        key, value, bias = key[:, :, :S], value[:, :, :S], None if bias is None else bias[..., :S]
        allowed = attention_mask.bool()
        mask = replace(mask, documents=_documents_beside(allowed, query, position_ids), allowed=allowed[:, None, None])
    else:
        mask, bias = _complete(attention_mask, bias)
    score, deterministic = Score(soft_cap=softcap or None, bias=bias, sinks=s_aux), deterministic or None
    output = flash_attention(
        query, key, value, mask=mask, score=score, scale=scaling, dropout=dropout, deterministic=deterministic
    )
    return output.transpose(1, 2), None


def _own_mask(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> Mask:
    reach = None if sliding_window is None else sliding_window - 1  # the window counts the query's own position
    return Mask(causal=getattr(module, "is_causal", True) if is_causal is None else is_causal, window=(reach, reach))


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
    return _remembered(position_ids, B) if _are_positions(position_ids, B, T, S) else None


def _documents_beside(padding: Tensor, query: Tensor, position_ids: Tensor | None) -> Documents | None:
    """Of traced code, which cannot ask whether all keys count, so that there is no mask: one a row unless they do."""
    B, T = len(query), query.shape[2]
    if not is_tracing(padding) or not _are_positions(position_ids, B, T, padding.shape[1]):
        return None
    ids = masking_utils.find_packed_sequence_indices(position_ids)
    return None if ids is None else Documents.from_ids((ids * padding.all()).expand(B, -1))


def _are_positions(position_ids: Tensor | None, B: int, T: int, S: int) -> TypeGuard[Tensor]:
    """Whether they are those of all queries and keys of a batch."""
    return T == S != 1 and position_ids is not None and position_ids.shape in ((1, T), (B, T))


def _documents_by_position(position_ids: Tensor, B: int) -> Documents | None:
    if position_ids.is_meta:
        return None
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
