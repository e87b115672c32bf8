"""Which tensor of transformers is which part of which of our parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

BASES = {"gpt2": "transformer.", "llama": "model."}
"""What stands before the names of all but the head; files of the model without a head leave it out."""
HEAD = "lm_head.weight"
EMBEDDINGS = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class Piece:
    """The tensor ``name`` of transformers: rows ``start`` to ``stop`` of our ``parameter``, or these ``transposed``."""

    name: str
    parameter: str
    start: int
    stop: int
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """Our rows as transformers has them: a view."""
        rows = parameter[self.start : self.stop]
        return rows.T if self.transposed else rows


def pieces(kind: str, sizes: Mapping[str, Any], *, bias: bool) -> Iterator[Piece]:
    """Every tensor of transformers' model of this ``kind``, gpt2 or llama, with ``sizes`` as ``architecture`` has them.

    The order is the model's. ``bias`` is whether the file has biases; in a GPT-2 it does.
    """
    vocabulary, width = sizes["vocabulary_size"], sizes["width"]
    yield Piece(EMBEDDINGS[kind], "token_embedding.weight", 0, vocabulary)
    if kind == "gpt2":
        yield Piece("transformer.wpe.weight", "position_embedding.weight", 0, sizes["context_length"])
    for layer in range(sizes["depth"]):
        yield from _gpt2_block(layer, sizes) if kind == "gpt2" else _llama_block(layer, sizes, bias=bias)
    if kind == "gpt2":
        yield from _layer("transformer.ln_f", "final_norm", width)
    else:
        yield from _layer("model.norm", "final_norm", width, bias=False)
    if not sizes["tied_embeddings"]:
        yield Piece(HEAD, "head.weight", 0, vocabulary)


def _gpt2_block(layer: int, sizes: Mapping[str, Any]) -> Iterator[Piece]:
    theirs, ours, width = f"transformer.h.{layer}", f"blocks.{layer}", sizes["width"]
    yield from _layer(f"{theirs}.ln_1", f"{ours}.attention_norm", width)
    yield from _layer(f"{theirs}.ln_2", f"{ours}.feed_forward_norm", width)
    for name, linear, rows in (
        ("attn.c_attn", "attention.qkv", 3 * width),
        ("attn.c_proj", "attention.projection", width),
        ("mlp.c_fc", "feed_forward.expand", sizes["hidden_size"]),
        ("mlp.c_proj", "feed_forward.projection", width),
    ):
        # transformers' Conv1D holds [in, out].
        yield from _layer(f"{theirs}.{name}", f"{ours}.{linear}", rows, transposed=True)


def _llama_block(layer: int, sizes: Mapping[str, Any], *, bias: bool) -> Iterator[Piece]:
    """Heads lie in transformers' Llama as they do here, their rotary halves side by side; Meta's files interleave them,
    and transformers' conversion has undone that."""
    theirs, ours, width, hidden = f"model.layers.{layer}", f"blocks.{layer}", sizes["width"], sizes["hidden_size"]
    grouped = width // sizes["heads"] * sizes["kv_heads"]
    yield from _layer(f"{theirs}.input_layernorm", f"{ours}.attention_norm", width, bias=False)
    yield from _layer(f"{theirs}.post_attention_layernorm", f"{ours}.feed_forward_norm", width, bias=False)
    for name, linear, start, rows in (
        ("self_attn.q_proj", "attention.qkv", 0, width),
        ("self_attn.k_proj", "attention.qkv", width, grouped),
        ("self_attn.v_proj", "attention.qkv", width + grouped, grouped),
        ("self_attn.o_proj", "attention.projection", 0, width),
        ("mlp.gate_proj", "feed_forward.expand", 0, hidden),
        ("mlp.up_proj", "feed_forward.expand", hidden, hidden),
        ("mlp.down_proj", "feed_forward.projection", 0, width),
    ):
        yield from _layer(f"{theirs}.{name}", f"{ours}.{linear}", rows, start=start, bias=bias)


def _layer(
    theirs: str, ours: str, rows: int, *, start: int = 0, bias: bool = True, transposed: bool = False
) -> Iterator[Piece]:
    yield Piece(f"{theirs}.weight", f"{ours}.weight", start, start + rows, transposed)
    if bias:
        yield Piece(f"{theirs}.bias", f"{ours}.bias", start, start + rows)
