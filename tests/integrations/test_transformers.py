"""`attn_implementation="flash_train"` beside transformers' own, on models made from tiny configurations."""

import copy
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from flash_train.integrations import transformers as drop_in
from flash_train.integrations.transformers import register
from flash_train.ops.attention import Mask

VOCABULARY, B, T = 97, 2, 13
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
TOKENS: dict[str, Any] = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": (
        "LMHeadModel",
        {
            "n_layer": 2,
            "n_head": 4,
            "n_embd": 32,
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "initializer_range": 0.3,
        },
    ),
    "Llama": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "Mistral": ("ForCausalLM", GROUPED),
    "Gemma2": ("ForCausalLM", {**GROUPED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "GptOss": ("ForCausalLM", {**GROUPED, **EXPERTS}),
    "Bert": ("ForMaskedLM", SIZES),
    "ModernBert": ("ForMaskedLM", {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2, **TOKENS}),
    "T5": (
        "ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY},
    ),
}
SDPA_CANNOT = ("Gemma2", "GptOss")
IDS = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(B, T, dtype=torch.long)
PADDED[0, :4] = PADDED[1, -2:] = 0
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


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


def made(name: str, implementation: str, **changed: Any) -> PreTrainedModel:
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**{**settings, **changed}, attn_implementation=implementation)
    torch.manual_seed(1)
    model = getattr(transformers, name + kind)(config).eval()
    assert model.config._attn_implementation == implementation
    # Some parts are float32 whatever is asked; the eager attention is NaN in float64 where a query sees nothing.
    model = model if name in SDPA_CANNOT else model.double()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.uniform_(parameter, -1, 1)
    return model


def pair(name: str, **changed: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(transformers' own attention, ours), with the same weights."""
    own, ours = made(name, "eager" if name in SDPA_CANNOT else "sdpa", **changed), made(name, "flash_train", **changed)
    ours.load_state_dict(own.state_dict())
    return own, ours


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


def test_a_learned_position_bias_gets_its_gradient() -> None:
    own, ours = pair("T5", dropout_rate=0.0)
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
