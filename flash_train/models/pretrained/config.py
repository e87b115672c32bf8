"""transformers' config.json of GPT-2 and Llama, as arguments of our GPT and back."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

# Our argument, transformers' key, and what transformers takes where the file leaves the key out.
_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "gpt2": {
        "vocabulary_size": ("vocab_size", 50257),
        "context_length": ("n_positions", 1024),
        "width": ("n_embd", 768),
        "depth": ("n_layer", 12),
        "heads": ("n_head", 12),
        "hidden_size": ("n_inner", None),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "tied_embeddings": ("tie_word_embeddings", True),
    },
    "llama": {
        "vocabulary_size": ("vocab_size", 32000),
        "context_length": ("max_position_embeddings", 2048),
        "width": ("hidden_size", 4096),
        "depth": ("num_hidden_layers", 32),
        "heads": ("num_attention_heads", 32),
        "kv_heads": ("num_key_value_heads", None),
        "hidden_size": ("intermediate_size", 11008),
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "tied_embeddings": ("tie_word_embeddings", False),
    },
}
# What makes a GPT one of the two.
_KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layer"},
    "llama": {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu"},
}
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# The only values, if a file has the key at all, of what our model has no other way to do.
_ONLY: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {"hidden_act": "silu", "partial_rotary_factor": 1.0, "sliding_window": None},
}
# What transformers' two models have no place for, with the value that stands for its absence.
_LACKING = {"window": None, "soft_cap": None, "logit_soft_cap": None, "sinks": False, "qk_norm": False}


def arguments_from_config(config: Config) -> dict[str, Any]:
    """The arguments of ``GPT`` that make the model which a config.json of transformers describes.

    Dropout, which acts in training alone, is left out. Raises ``ValueError`` for another ``model_type`` than gpt2 and
    llama, and for what our model does not do: scaled rotary positions, windows, a head size of its own, biases in
    attention alone, quantized weights, other activations.
    """
    kind = config.get("model_type")
    if kind not in _KEYS:
        raise ValueError(f"model_type must be {' or '.join(_KEYS)}, got {kind!r}: load other models with transformers")
    if config.get("quantization_config") is not None:
        raise ValueError(
            "the weights must not be quantized, and config.json has a quantization_config: dequantize them in "
            "transformers, and save them again"
        )
    for key, value in _ONLY[kind].items():
        if key in config and config[key] != value:
            raise _unknown(kind, key, config[key], value)
    arguments = _KINDS[kind] | {ours: config.get(key, default) for ours, (key, default) in _KEYS[kind].items()}
    return arguments | (_gpt2(config) if kind == "gpt2" else _llama(config, arguments))


def _gpt2(config: Config) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GELUS:
        raise _unknown("gpt2", "activation_function", activation, " or ".join(_GELUS))
    return {"feed_forward": _GELUS[activation], "bias": True}


def _llama(config: Config, arguments: Config) -> dict[str, Any]:
    biases = [config.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if biases[0] != biases[1]:
        raise _unknown("llama", "attention_bias", biases[0], f"{biases[1]}, as mlp_bias is")
    head_size, others = config.get("head_dim"), set(config.get("layer_types") or ()) - {"full_attention"}
    if head_size is not None and head_size * arguments["heads"] != arguments["width"]:
        raise _unknown("llama", "head_dim", head_size, "hidden_size / num_attention_heads")
    if others:
        raise _unknown("llama", "layer_types", sorted(others), "full_attention in all layers")
    return {"bias": biases[0], "rotary_base": _rotary_base(config)}


def _rotary_base(config: Config) -> float:
    """Newer files hold ``rope_parameters``, older ones ``rope_theta`` and ``rope_scaling``, which was None at first."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _unknown("llama", "rope_type", kind, "default: scaled rotary positions are others")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unknown("llama", "partial_rotary_factor", rope["partial_rotary_factor"], 1.0)
    return rope.get("rope_theta", config.get("rope_theta", 10_000.0))


def _unknown(kind: str, key: str, value: Any, known: Any) -> ValueError:
    return ValueError(
        f"{key} of a {kind} must be {known} to be a GPT of ours, got {value!r}: load this model with transformers"
    )


def config_from_arguments(arguments: Config) -> dict[str, Any]:
    """The config.json with which transformers makes the model of these ``arguments``, as ``architecture`` gives them.

    Dropout is 0 in it. Raises ``ValueError`` for a model that is neither GPT-2 nor Llama in transformers.
    """
    kind = next((kind for kind in _KEYS if _is(kind, arguments)), None)
    if kind is None:
        raise ValueError(
            "transformers' GPT-2 has learned positions, LayerNorm and a GELU, its Llama rotary positions, RMSNorm and "
            "SwiGLU; got "
            + ", ".join(f"{name}={arguments[name]}" for name in ("positions", "norm", "feed_forward"))
            + ": only models of these two kinds can be exported"
        )
    _check_features(kind, arguments)
    config = {"model_type": kind, **{key: arguments[ours] for ours, (key, _) in _KEYS[kind].items()}}
    if kind == "gpt2":
        activation = next(key for key, ours in _GELUS.items() if ours == arguments["feed_forward"])
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return config | {"architectures": ["GPT2LMHeadModel"], "activation_function": activation} | dropout
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": arguments["bias"],
        "mlp_bias": arguments["bias"],
        "attention_dropout": 0.0,
        "rope_theta": arguments["rotary_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": arguments["rotary_base"]},
    }


def _is(kind: str, arguments: Config) -> bool:
    gelu = kind != "gpt2" or arguments["feed_forward"] in _GELUS.values()
    return gelu and all(arguments[name] == value for name, value in _KINDS[kind].items())


def _check_features(kind: str, arguments: Config) -> None:
    for name, absent in _LACKING.items():
        if arguments[name] != absent:
            raise ValueError(
                f"transformers' {kind} has no {name}, got {name}={arguments[name]}: a model without it can be exported"
            )
    if kind == "gpt2" and arguments["kv_heads"] != arguments["heads"]:
        raise ValueError(
            f"transformers' gpt2 has a key/value head for each head, got kv_heads={arguments['kv_heads']} and "
            f"heads={arguments['heads']}: grouped heads can be exported from a Llama-like model"
        )
