"""`attn_implementation="flash_train"` beside transformers' own, on models made from tiny configurations."""

import copy
import importlib.metadata
import runpy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from flash_train.integrations import transformers as drop_in
from flash_train.integrations.transformers import register
from flash_train.ops.attention import Mask
from tests.integrations.tiny_models import IDS, PADDED, POSITIONS, VOCABULARY, B, T, made, pair


@pytest.fixture(autouse=True)
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the layers were handed as a mask: None, its shape, or `Mask`."""
    register()
    seen: list[Any] = []
    attention = drop_in._attention

    def watched(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *args: Any, **options: Any) -> Any:
        seen.append(tuple(mask.shape) if isinstance(mask, Tensor) else mask and type(mask))
        return attention(module, q, k, v, mask, *args, **options)

    AttentionInterface.register(drop_in.NAME, watched)
    yield seen
    AttentionInterface.register(drop_in.NAME, attention)


def results(model: PreTrainedModel, counted: Tensor | None = None, **inputs: Any) -> list[Tensor]:
    """The logits, where they count, and the gradient of every parameter."""
    logits = model(**inputs).logits
    logits = logits if counted is None else logits[counted.bool()]
    logits.square().mean().backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    return [logits.detach(), *gradients]


def agree(own: list[Tensor], ours: list[Tensor]) -> None:
    assert len(own) == len(ours)
    for mine, its in zip(ours, own, strict=True):
        tolerance = 1e-6 if its.dtype == torch.float64 else 1e-4  # of the largest; norms compute in float32
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance * max(its.abs().max().item(), 1e-2))


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Gemma2", "GptOss", "Bert", "ModernBert"])
def test_logits_and_gradients_agree_with_and_without_padding(name: str, masks: list[Any]) -> None:
    own, ours = pair(name)
    agree(results(own, input_ids=IDS), results(ours, input_ids=IDS))
    assert set(masks) == {None}, "no mask is made where none is needed"
    masks.clear()
    padded = {"input_ids": IDS, "attention_mask": PADDED}
    agree(results(own, PADDED, **padded), results(ours, PADDED, **padded))
    assert set(masks) == {(B, T)}, "padding is one number a key"


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_stay_apart_without_a_matrix(name: str, use_cache: bool, masks: list[Any]) -> None:
    own, ours = pair(name)
    expected = results(own, input_ids=IDS, position_ids=POSITIONS, use_cache=False)  # with a cache it mixes them
    agree(expected, results(ours, input_ids=IDS, position_ids=POSITIONS, use_cache=use_cache))
    assert set(masks) == {None if use_cache else Mask}
    row = {"input_ids": IDS[:1], "position_ids": POSITIONS[:1], "use_cache": False}
    bounds = torch.tensor([0, 5, 8, 13], dtype=torch.int32)
    flat = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    agree(results(own, **row), results(ours, **row, **flat))


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_masks_of_ones_own_are_taken_as_they_are(name: str) -> None:
    own, ours = pair(name)
    allowed = (torch.rand(B, 1, T, T) < 0.6) | torch.eye(T, dtype=torch.bool)
    for mask in (allowed, torch.randn(B, 1, T, T, dtype=torch.float64)):
        inputs = {"input_ids": IDS, "attention_mask": mask}
        agree(results(own, **inputs), results(ours, **inputs))


def test_a_chunked_pattern_becomes_a_matrix(masks: list[Any]) -> None:
    own, ours = pair("Llama4", no_rope_layers=[1, 0])
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": PADDED}):
        with torch.no_grad():
            counted = inputs.get("attention_mask", torch.ones_like(PADDED)).bool()
            torch.testing.assert_close(ours(**inputs).logits[counted], own(**inputs).logits[counted])
    assert (B, 1, T, T) in masks


@pytest.mark.parametrize("padded", [False, True])
def test_shapes_are_known_on_the_meta_device(padded: bool) -> None:
    model: Any = made("Llama", "flash_train")
    model.to("meta")
    ids, positions = IDS.to("meta"), POSITIONS.to("meta")
    inputs = {"attention_mask": PADDED.to("meta")} if padded else {}
    assert model(input_ids=ids, position_ids=positions, use_cache=True, **inputs).logits.shape == (B, T, VOCABULARY)


@pytest.mark.parametrize("name", ["T5", "Bart"])  # T5's position bias is learned
def test_encoder_and_decoder_agree(name: str) -> None:
    own, ours = pair(name)
    inputs = {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": IDS[:, :7]}
    agree(results(own, **inputs), results(ours, **inputs))


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Gemma2", "GptOss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation_is_the_same(name: str, cache: str) -> None:
    own, ours = pair(name)
    left_padded = torch.ones(B, T, dtype=torch.long)
    left_padded[0, :4] = 0
    for mask in (torch.ones_like(left_padded), left_padded):
        options: dict[str, Any] = {
            "attention_mask": mask,
            "max_new_tokens": 9,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "cache_implementation": None if cache == "dynamic" else cache,
            "disable_compile": True,
        }
        generated = [model.generate(IDS, **options) for model in (own, ours)]  # type: ignore
        assert torch.equal(*generated) and generated[0].shape == (B, T + 9)


def test_dropout_is_applied_in_training_alone() -> None:
    model = made("GPT2", "flash_train", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, model(IDS).logits)
        model.train()
        assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_compiled_training_needs_no_matrix_and_keeps_packed_sequences_apart(masks: list[Any]) -> None:
    own, ours = pair("Mistral")
    expected = own(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits, expected)
    assert set(masks) == {Mask}


@pytest.mark.parametrize("padding", [torch.ones_like(PADDED), PADDED], ids=["ones", "padded"])
def test_a_compiled_model_keeps_apart_what_the_model_does(padding: Tensor) -> None:
    model = made("Mistral", "flash_train")
    inputs = {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": padding, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    counted = padding.bool()
    torch.testing.assert_close(compiled(**inputs).logits[counted], model(**inputs).logits[counted])


def test_a_model_can_be_switched_over() -> None:
    own, ours = pair("Llama")
    switched = copy.deepcopy(own)
    switched.set_attn_implementation("flash_train")
    agree(results(ours, input_ids=IDS), results(switched, input_ids=IDS))


def test_an_older_transformers_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.23.1")
    with pytest.raises(
        ImportError, match=r"transformers>=5.24 is required .* found transformers==5.23.1.*\n.*pip install"
    ):
        register.__wrapped__()


@pytest.mark.parametrize("found", [None, ModuleType("transformers")], ids=["missing", "without a registry"])
def test_a_transformers_that_cannot_be_imported_is_refused_with_a_way_out(
    found: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", found)
    with pytest.raises(
        ImportError, match=r"needs transformers>=5.24, got: .*transformers.*; pip install 'flash_train\[transformers\]'"
    ):
        runpy.run_path(str(drop_in.__file__))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"block_indices": IDS},
        "'flash_train' does not know block_indices, which LlamaAttention got .* use attn_impl.*'sdpa'",
    ),
    ({"output_attentions": True}, "output_attentions must be False: no weights exist; use attn_implementation='eager'"),
    (
        {"attention_mask": PADDED[:, None]},
        r"attention_mask must be \[B, S\] .* got \[2, 1, 13\] of torch.int64; .*'sdpa'",
    ),
    ({"cu_seq_lens_q": IDS[0]}, "cu_seq_lens_q and cu_seq_lens_k come together, .* got a batch of 2; flatten it"),
]


@pytest.mark.parametrize("changed, message", REFUSED)
def test_what_would_change_the_result_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    layer = made("Llama", "flash_train").model.layers[0].self_attn
    x = torch.zeros(B, 4, T, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        drop_in._attention(layer, x, x, x, **{"attention_mask": None, **changed})
