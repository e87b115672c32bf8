"""Models of transformers, small enough for a test, and what goes into them."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from flash_train.integrations.transformers import register

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
    "Bart": (
        "ForConditionalGeneration",
        {
            **{"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "init_std": 0.3},
            **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
        },
    ),
    "Llama4": (
        "ForCausalLM",
        {**GROUPED, **EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 5},
    ),
}
CONFIGS = {"Llama4": "Llama4TextConfig"}
SDPA_CANNOT = ("Gemma2", "GptOss")
IDS = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(B, T, dtype=torch.long)
PADDED[0, :4] = PADDED[1, -2:] = 0
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


def made(name: str, implementation: str, **changed: Any) -> PreTrainedModel:
    register()
    kind, settings = MODELS[name]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(
        **{**settings, **changed}, attn_implementation=implementation
    )
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
