"""transformers' own models are the oracle: the same weights give the same logits, read and written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from flash_train.diagnostics.peak import measured_peak
from flash_train.models.gpt import GPT
from flash_train.models.pretrained import is_pretrained, load_pretrained, load_pretrained_into, save_pretrained

VOCABULARY, LENGTH = 97, 37
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
# Weights so large that each part shows in the logits.
GPT2: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "n_positions": 41, "n_embd": 48, "n_layer": 3, "n_head": 6, "initializer_range": 0.2},
    **{"bos_token_id": None, "eos_token_id": None},
}
LLAMA: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 41, "hidden_size": 48, "intermediate_size": 70},
    **{"num_hidden_layers": 3, "num_attention_heads": 6, "initializer_range": 0.2},
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 with another inner size, GELU and epsilon": (
        "GPT2",
        GPT2 | {"n_inner": 70, "activation_function": "gelu", "layer_norm_epsilon": 0.1},
    ),
    "gpt2 with a head of its own": ("GPT2", GPT2 | {"tie_word_embeddings": False}),
    "llama": ("Llama", LLAMA),
    "llama with grouped heads": ("Llama", LLAMA | {"num_key_value_heads": 2}),
    "llama with one key head, tied": ("Llama", LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama with another base and epsilon": (
        "Llama",
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rms_norm_eps": 0.1},
    ),
    "llama with biases": ("Llama", LLAMA | {"num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}),
}
KINDS = pytest.mark.parametrize("name", CHECKPOINTS)
OURS: dict[str, Any] = {
    **{"vocabulary_size": VOCABULARY, "context_length": 41, "width": 48, "depth": 3, "heads": 6},
}
LLAMA_OURS: dict[str, Any] = OURS | {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu"}


def their_model(name: str) -> PreTrainedModel:
    kind, settings = CHECKPOINTS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[kind])(config)
    randomize(model)
    return model.eval()


def randomize(model: torch.nn.Module) -> None:
    """Also what begins as 0 or 1, so that a bias or gain in a wrong place shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def build(arguments: dict[str, Any]) -> GPT:
    return GPT(**arguments)


def our_model(arguments: dict[str, Any]) -> GPT:
    torch.manual_seed(1)
    model = build(arguments)
    randomize(model)
    return model


@torch.no_grad()
def their_logits(model: PreTrainedModel | Path) -> Tensor:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return model(TOKENS).logits


@torch.no_grad()
def our_logits(model: GPT) -> Tensor:
    return model.eval()(TOKENS)


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    """To fp32's rounding, which sums of other orders lose."""
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What transformers saved of a checkpoint, by its name, once for all tests: to be copied before it is changed."""
    root = tmp_path_factory.mktemp("checkpoints")

    def saved(name: str) -> Path:
        path = root / name.replace(" ", "_")
        if not path.exists():
            their_model(name).save_pretrained(path)
        return path

    return saved


@KINDS
def test_weights_of_transformers_give_its_logits(name: str, folder: Callable[[str], Path]) -> None:
    assert is_pretrained(folder(name))
    assert_equal(our_logits(load_pretrained(folder(name))), their_logits(their_model(name)))


@KINDS
def test_what_was_read_is_written_back_as_it_was(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    save_pretrained(load_pretrained(folder(name)), tmp_path / "back")
    before, after = load_file(folder(name) / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert_equal(their_logits(tmp_path / "back"), their_logits(folder(name)))


@pytest.mark.parametrize(
    "arguments",
    [
        OURS,  # without biases, which transformers' GPT-2 has
        OURS | {"bias": True, "vocabulary_multiple": 64, "feed_forward": "gelu_tanh", "norm_epsilon": 0.1},
        LLAMA_OURS | {"kv_heads": 2, "vocabulary_multiple": 64, "tied_embeddings": False, "rotary_base": 100.0},
    ],
    ids=["nanogpt", "gpt2", "llama"],
)
def test_a_model_of_ours_gives_its_logits_in_transformers_and_comes_back(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = our_model(arguments)
    save_pretrained(model, tmp_path / "model", end_of_text=7)
    assert_equal(their_logits(tmp_path / "model"), our_logits(model))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.eos_token_id == 7
    again = build(arguments)
    load_pretrained_into(again, tmp_path / "model")
    assert torch.equal(our_logits(again), our_logits(model))


def test_the_comparison_of_logits_can_fail(folder: Callable[[str], Path]) -> None:
    model = load_pretrained(folder("llama with grouped heads"))
    with torch.no_grad():
        qkv = model.get_parameter("blocks.0.attention.qkv.weight")
        qkv[:48] = qkv[:48].view(6, 2, 4, 48).transpose(1, 2).reshape(48, 48)  # as if rotary pairs were neighbours
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(our_logits(model), their_logits(folder("llama with grouped heads")))


@pytest.mark.parametrize("name", ["gpt2", "llama with grouped heads"])
def test_shards_are_read_and_written(name: str, tmp_path: Path) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    model = load_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", shard_bytes=50_000)
    for path in (tmp_path / "theirs", tmp_path / "ours"):
        assert len(list(path.glob("model-0*.safetensors"))) > 2 and not (path / "model.safetensors").exists()
    assert max(file.stat().st_size for file in (tmp_path / "ours").glob("*.safetensors")) < 55_000
    assert_equal(our_logits(model), their_logits(theirs))
    assert_equal(their_logits(tmp_path / "ours"), their_logits(theirs))


def test_memory_holds_one_model_and_a_tensor_when_it_is_read_and_one_shard_when_it_is_written(tmp_path: Path) -> None:
    model = our_model(OURS | {"bias": True})
    whole, largest = sum(x.nbytes for x in model.parameters()), max(x.nbytes for x in model.parameters())
    with measured_peak() as writing:
        save_pretrained(model, tmp_path, shard_bytes=50_000)
    with measured_peak() as reading:
        load_pretrained(tmp_path)
    assert writing.size <= 50_000 + largest
    assert whole <= reading.size <= whole + largest + 5_000


def test_a_dtype_is_kept_in_the_file_and_chosen_in_memory(tmp_path: Path) -> None:
    model = our_model(LLAMA_OURS)
    save_pretrained(model, tmp_path / "half", dtype=torch.bfloat16)
    assert {x.dtype for x in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert torch.equal(our_logits(load_pretrained(tmp_path / "half")), our_logits(model.bfloat16().float()))
    assert load_pretrained(tmp_path / "half", dtype=torch.bfloat16).token_embedding.weight.dtype == torch.bfloat16


def test_the_files_of_the_first_releases_are_read_too(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Without prefixes and with causal masks, as GPT-2 was published; rope_theta beside a null rope_scaling."""
    gpt2, llama = (Path(shutil.copytree(folder(name), tmp_path / name)) for name in ("gpt2", "llama"))
    weights = load_file(gpt2 / "model.safetensors")
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 41, 41) for layer in range(3)}
    save_file(masks | {name.removeprefix("transformer."): x for name, x in weights.items()}, gpt2 / "model.safetensors")
    assert_equal(our_logits(load_pretrained(gpt2)), their_logits(their_model("gpt2")))
    changed(llama, rope_parameters=None, rope_scaling=None, rope_theta=100.0)
    assert load_pretrained(llama).blocks[0].get_submodule("attention.rotary").extra_repr().endswith("base=100")


def changed(folder: Path, **entries: Any) -> Path:
    """`folder` with other entries in its config.json."""
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "mistral"}, "model_type must be gpt2 or llama, got 'mistral': load other models"),
    "scaled rotary positions": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
        "rope_type of a llama must be default: scaled rotary positions are others to be a GPT of ours, got 'llama3'",
    ),
    "older scaled rotary positions": (
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type of a llama must be default.* got 'linear'",
    ),
    "rotation of a part": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of a llama must be 1.0.* got 0.5"),
    "a window": ({"sliding_window": 8}, "sliding_window of a llama must be None.* got 8: load this model with"),
    "windows in some layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types of a llama must be full_attention in all layers.* got \['sliding_attention'\]",
    ),
    "biases in attention alone": ({"attention_bias": True}, "attention_bias of a llama must be False, as mlp_bias is"),
    "another head size": ({"head_dim": 16}, "head_dim of a llama must be hidden_size / num_attention_heads.* got 16"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act of a llama must be silu.* got 'gelu'"),
    "quantized weights": ({"quantization_config": {"bits": 4}}, "the weights must not be quantized"),
    "sizes that do not fit": ({"num_key_value_heads": 4}, "kv_heads must divide heads, got kv_heads=4 and heads=6"),
    "another size": ({"vocab_size": 98}, r"embed_tokens.weight in .* must be \[98, 48\], .* got \[97, 48\]: write"),
    "fewer layers": ({"num_hidden_layers": 2}, r"model.layers.2.* has none \(9 such\): they are of another model"),
    "more layers": ({"num_hidden_layers": 4}, "must have model.layers.3.input_layernorm.weight, and do not"),
    "a tied head that is another": ({"tie_word_embeddings": True}, "a tied head must be the embedding"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_our_model_does_not_do_is_refused(what: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    entries, message = REFUSED[what]
    llama = changed(Path(shutil.copytree(folder("llama"), tmp_path / "llama")), **entries)
    with pytest.raises(ValueError, match=message):
        load_pretrained(llama)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"activation_function": "relu"}, "activation_function of a gpt2 must be gelu_new or .* got 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx of a gpt2 must be False"),
        ({"add_cross_attention": True}, "add_cross_attention of a gpt2 must be False"),
    ],
)
def test_what_our_gpt_2_does_not_do_is_refused(
    entries: dict[str, Any], message: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    gpt2 = changed(Path(shutil.copytree(folder("gpt2"), tmp_path / "gpt2")), **entries)
    with pytest.raises(ValueError, match=message):
        load_pretrained(gpt2)


def test_files_that_are_no_whole_safetensors_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_pretrained(path)

    path = tmp_path / "model"
    refused("must be a folder that transformers' save_pretrained wrote, .* config.json cannot be read")
    shutil.copytree(folder("gpt2"), path)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    refused(r"model.safetensors must be a whole safetensors file, and is not \(.*\): get it again")
    weights.unlink()
    refused("must hold model.safetensors or model.safetensors.index.json, and has neither: write it")
    (path / "pytorch_model.bin").write_bytes(b"not looked into")
    refused("has pickled weights alone, which can run code: write it with transformers' save_pretrained")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "../elsewhere.safetensors"}}))
    refused("must lie beside it, got ../elsewhere.safetensors")
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "missing.safetensors"}}))
    refused("missing.safetensors must be a whole safetensors file, and is not")
    index.write_text("[]")
    refused("must hold an object, got list")
    (path / "config.json").write_text("{")
    refused("config.json must hold JSON, and does not")


def test_weights_of_whole_numbers_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("gpt2"), tmp_path / "gpt2"))
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"transformer.ln_f.weight": torch.ones(48, dtype=torch.int8)}, path / "model.safetensors")
    with pytest.raises(ValueError, match="transformer.ln_f.weight must be float32, bfloat16, .* got int8: save"):
        load_pretrained(path)


def test_a_model_takes_the_weights_of_its_own_architecture_alone(folder: Callable[[str], Path], tmp_path: Path) -> None:
    gpt2 = OURS | {"bias": True, "feed_forward": "gelu_tanh"}
    llama = LLAMA_OURS | {"hidden_size": 70, "tied_embeddings": False, "norm_epsilon": 1e-6}
    with pytest.raises(ValueError, match="got depth=2, feed_forward=gelu: give it depth=3, feed_forward=gelu_tanh$"):
        load_pretrained_into(build(OURS | {"depth": 2, "bias": True}), folder("gpt2"))
    with pytest.raises(ValueError, match="without biases takes none, and transformer.h.0.ln_1.bias in .* is not 0"):
        load_pretrained_into(build(gpt2 | {"bias": False}), folder("gpt2"))
    with pytest.raises(ValueError, match="got context_length=42: give it context_length=41"):
        load_pretrained_into(build(gpt2 | {"context_length": 42}), folder("gpt2"))
    with pytest.raises(ValueError, match="whose weights are in .*llama, got bias=True: give it bias=False"):
        load_pretrained_into(build(llama | {"bias": True}), folder("llama"))
    shorter = build(gpt2 | {"context_length": 37, "vocabulary_multiple": 64})
    load_pretrained_into(shorter, folder("gpt2"))
    assert_equal(our_logits(shorter), their_logits(folder("gpt2")))
    assert load_pretrained(folder("llama"), context_length=99).context_length == 99
    with pytest.raises(TypeError, match="the model must be a GPT with the parts that it was made with, got Linear"):
        load_pretrained_into(torch.nn.Linear(1, 1), folder("gpt2"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (OURS | {"positions": "alibi"}, "only models of these two kinds can be exported"),
        (OURS | {"norm": "rms"}, "got positions=learned, norm=rms, feed_forward=gelu: only models of these two"),
        (OURS | {"window": [4, None]}, r"gpt2 has no window, got window=\[4, None, 4\]: a model without it can be"),
        (LLAMA_OURS | {"sinks": True}, "llama has no sinks, got sinks=True"),
        (LLAMA_OURS | {"qk_norm": True}, "llama has no qk_norm, got qk_norm=True"),
        (LLAMA_OURS | {"soft_cap": 5.0}, "llama has no soft_cap, got soft_cap=5.0"),
        (OURS | {"logit_soft_cap": 5.0}, "gpt2 has no logit_soft_cap, got logit_soft_cap=5.0"),
        (OURS | {"kv_heads": 2}, "gpt2 has a key/value head for each head, got kv_heads=2 and heads=6"),
    ],
)
def test_what_transformers_does_not_do_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save_pretrained(build(arguments), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_saved_model_is_not_written_over(tmp_path: Path) -> None:
    save_pretrained(build(OURS), tmp_path)
    with pytest.raises(ValueError, match="into a folder of its own, and .* holds one: give another"):
        save_pretrained(build(OURS), tmp_path)


def test_the_file_says_that_it_is_of_torch(tmp_path: Path) -> None:
    """Without it older releases of transformers refuse the file."""
    save_pretrained(build(OURS), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
