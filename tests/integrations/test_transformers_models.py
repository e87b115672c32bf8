"""Which of transformers' models take "flash_train", and which form of mask they get."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from flash_train.integrations.transformers import register
from flash_train.integrations.transformers_masks import attention_mask_for
from tests.integrations.tiny_models import MODELS, PADDED, POSITIONS, B, T, made

register()


@pytest.mark.parametrize(
    "name",
    (
        "BloomForCausalLM XGLMForCausalLM GPTNeoXJapaneseForCausalLM TrOCRForCausalLM OpenAIGPTLMHeadModel "
        "ProphetNetForCausalLM MptForCausalLM FalconForCausalLM GPTNeoForCausalLM BarkSemanticModel PegasusXModel "
        "Data2VecVisionModel"
    ).split(),
)
def test_a_model_with_an_attention_of_its_own_is_refused_when_it_is_built(name: str) -> None:
    kind = getattr(transformers, name)
    with pytest.raises(ValueError, match=f"'flash_train' needs layers .* and {name} has others, or none; .*'eager' or"):
        kind(kind.config_class(attn_implementation="flash_train"))


@pytest.mark.parametrize("name", ["SwitchTransformersModel", "FalconModel"])
def test_a_model_with_an_attention_of_its_own_cannot_be_switched_over(name: str) -> None:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(num_layers=2, num_hidden_layers=2))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="needs layers that look their attention up"):
        model.get_correct_attn_implementation("flash_train")
    assert model.config._attn_implementation == before


def test_a_pattern_of_ones_own_becomes_a_matrix() -> None:
    prefix, ours = [
        create_causal_mask(
            config=made("Llama", implementation).config,
            inputs_embeds=torch.zeros(B, T, 1),
            attention_mask=PADDED,
            cache=None,
            or_mask_function=lambda b, h, q, k: k < 5,
        )
        for implementation in ("sdpa", "flash_train")
    ]
    assert isinstance(prefix, Tensor) and isinstance(ours, Tensor) and torch.equal(prefix, ours)


def test_the_form_of_a_mask_is_a_matter_of_classes_not_of_models_that_were_built() -> None:
    padding = PADDED.bool()
    for name, shape in (("Llama", (B, T)), ("T5", (B, 1, T, T))):
        getattr(transformers, name + MODELS[name][0])  # loads the classes
        mask = attention_mask_for(B, T, T, attention_mask=padding, config=getattr(transformers, f"{name}Config")())
        assert isinstance(mask, Tensor) and mask.shape == shape


def test_two_windows_over_packed_sequences_are_both_kept() -> None:
    for narrow, wide in ((3, 7), (7, 3)):
        of_sdpa, ours = [
            create_sliding_window_causal_mask(
                config=made("Mistral", implementation, sliding_window=wide).config,
                inputs_embeds=torch.zeros(B, T, 1),
                attention_mask=None,
                cache=None,
                position_ids=POSITIONS,
                and_mask_function=masking_utils.sliding_window_overlay(narrow),
            )
            for implementation in ("sdpa", "flash_train")
        ]
        assert isinstance(of_sdpa, Tensor) and isinstance(ours, Tensor) and torch.equal(of_sdpa, ours)
