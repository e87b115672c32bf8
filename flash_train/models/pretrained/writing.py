"""From our GPT to a transformers folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flash_train.models.architecture import architecture
from flash_train.models.gpt import GPT
from flash_train.models.pretrained.config import config_from_arguments
from flash_train.models.pretrained.files import CONFIG, INDEX, WEIGHTS
from flash_train.models.pretrained.table import Piece, pieces

SHARD_BYTES = 4 * 2**30
"""Of a file: what is copied, and so held beside the model, at a time."""


def save_pretrained(
    model: GPT,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``model`` into ``folder`` so that transformers' ``from_pretrained`` makes a model of the same logits of it.

    Learned positions become a GPT-2 (biases that the model lacks are 0 in it), rotary ones a Llama. Dropout is 0.

    Arguments:
        folder: made where there is none; one that holds a model is refused.
        dtype: of the file (default: the parameters').
        end_of_text: the token that ends a document, for transformers' generation.
        shard_bytes: most bytes of one file; a tensor that is larger has its own.

    Raises ``ValueError`` for a model that is neither GPT-2 nor Llama in transformers, and a folder that holds one.
    """
    folder, sizes = Path(folder), architecture(model)
    config = config_from_arguments(sizes)
    kind = config["model_type"]
    if folder.is_dir() and any(file.name == CONFIG or file.suffix == ".safetensors" for file in folder.iterdir()):
        raise ValueError(f"a model must be saved into a folder of its own, and {folder} holds one: give another")
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dtype = dtype or parameters["token_embedding.weight"].dtype
    found = list(pieces(kind, sizes, bias=kind == "gpt2" or sizes["bias"]))
    shards = _shards(found, parameters, limit=shard_bytes // dtype.itemsize)
    for name, shard in shards.items():
        # Without a name, under which it would still be there while the next one is made.
        save_file({piece.name: _copied(piece, parameters, dtype) for piece in shard}, folder / name, {"format": "pt"})
    if len(shards) > 1:
        size = sum(_elements(piece, parameters) for piece in found) * dtype.itemsize
        files = {piece.name: name for name, shard in shards.items() for piece in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": files})
    # Last: without it nobody takes the folder for a model.
    config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / CONFIG, config)


def _shards(found: list[Piece], parameters: Mapping[str, Tensor], *, limit: int) -> dict[str, list[Piece]]:
    """The pieces by file name, in their order, ``limit`` elements to a file."""
    shards: list[list[Piece]] = [[]]
    elements = 0
    for piece in found:
        here = _elements(piece, parameters)
        if shards[-1] and elements + here > limit:
            shards.append([])
            elements = 0
        shards[-1].append(piece)
        elements += here
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    stem, suffix = WEIGHTS.split(".")
    return {f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}": shard for number, shard in enumerate(shards, 1)}


def _elements(piece: Piece, parameters: Mapping[str, Tensor]) -> int:
    """Of the tensor; a bias that the model lacks has as many as its layer has rows."""
    return piece.of(parameters[piece.parameter]).numel() if piece.parameter in parameters else piece.stop - piece.start


def _copied(piece: Piece, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    if piece.parameter not in parameters:
        return torch.zeros(_elements(piece, parameters), dtype=dtype)
    # Also where nothing is cast: rows of one parameter would be refused as memory that tensors share.
    return piece.of(parameters[piece.parameter]).to("cpu", dtype, copy=True).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
