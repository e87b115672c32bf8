"""A trained model with what it reads and writes, for commands that use it: of a run, or of a transformers folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flash_train.commands.construct import build
from flash_train.models.gpt import GPT
from flash_train.models.pretrained import load_pretrained
from flash_train.training.data.subwords import tokenizers_package
from flash_train.training.data.tokenizers import Tokenizer, tokenizer_from_state
from flash_train.training.resume import find_checkpoint, load_weights, read_header


@dataclass(frozen=True)
class Text:
    """Text to tokens below `vocabulary_size` and back; `ends` are the tokens after which nothing belongs to it."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocabulary_size: int
    ends: frozenset[int]


@dataclass(frozen=True)
class Trained:
    """The model of a run's checkpoint, in which `step` it was, and its tokenizer."""

    path: Path
    step: int
    model: GPT
    tokenizer: Tokenizer


def open_run(
    checkpoint: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    implementation: str = "flash",
) -> Trained:
    """The model of a run's folder or checkpoint, in evaluation mode; memory holds it once.

    Raises ValueError for a checkpoint that flash-train did not write, or of a model that is no GPT.
    """
    path = find_checkpoint(checkpoint)
    header = read_header(path)
    config = (header.run_config or {}).get("config")
    if config is None or header.tokenizer is None:
        raise ValueError(f"a checkpoint must say which model and text it is of, and {path} does not; take one that "
                         "flash-train wrote")  # fmt: skip
    tokenizer = tokenizer_from_state(header.tokenizer)
    with torch.device("meta"):
        model = build(
            config["model"],
            key="model",
            wired={
                "vocabulary_size": config["vocabulary_size"] or tokenizer.vocabulary_size,
                "context_length": config["data"]["sequence_length"],
                "implementation": implementation,
                "vocabulary_multiple": config["vocabulary_multiple"],
            },
        )
    if not isinstance(model, GPT):
        raise ValueError(f"model._target_ must be {GPT.__module__}.{GPT.__qualname__} for this, and in {path} it is "
                         f"{config['model']['_target_']}; load it with torch.load")  # fmt: skip
    model = model.to(dtype).to_empty(device=device)
    load_weights(path, nn.ModuleDict({"model": model}))
    return Trained(path, header.step, model.eval(), tokenizer)


def open_pretrained(
    folder: Path, *, dtype: torch.dtype, device: torch.device, implementation: str, tokenizer: Path | None
) -> tuple[GPT, Text]:
    """The model of a transformers folder, and the text of its tokenizer.json or of another one.

    Raises ValueError as `load_pretrained` and `read_text` do.
    """
    text = read_text(tokenizer or folder / "tokenizer.json", ends=_ends(folder))
    model = load_pretrained(folder, dtype=dtype, device=device, implementation=implementation)
    return model.eval(), text


def read_text(path: Path, *, ends: frozenset[int] = frozenset()) -> Text:
    """The tokenizer of a file, of the package `tokenizers` or one of ours; `ends` are beside those that it has itself.

    Special tokens that a prompt spells out are special, and those that the tokenizer puts around a text stay. Raises
    ValueError if the file holds none, or the package is not there.
    """
    try:
        definition = path.read_text()
        content = json.loads(definition)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"text needs a tokenizer, and {path} cannot be read ({reason}); give "
                         "tokenizer=<tokenizer.json>") from error  # fmt: skip
    if isinstance(content, dict) and "kind" in content:
        return text_of(tokenizer_from_state(content))
    package = tokenizers_package()
    try:
        tokenizer = package.Tokenizer.from_str(definition)
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} must be what the package tokenizers reads, and it says: {error}; give another "
                         "tokenizer=") from error  # fmt: skip
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Text(
        encode=lambda text: tokenizer.encode(text).ids,
        decode=tokenizer.decode,
        vocabulary_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        ends=ends,
    )


def text_of(tokenizer: Tokenizer) -> Text:
    """What a run's own tokenizer makes of text; its separator ends it."""
    return Text(
        encode=lambda text: tokenizer.encode(text).tolist(),
        decode=tokenizer.decode,
        vocabulary_size=tokenizer.vocabulary_size,
        ends=frozenset() if tokenizer.separator is None else frozenset([tokenizer.separator]),
    )


def _ends(folder: Path) -> frozenset[int]:
    """transformers' eos_token_id, a number or several; generation_config.json goes before config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
