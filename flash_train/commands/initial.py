"""The weights that a run begins with, where they are not drawn: `init_from`."""

import inspect
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torch import nn

from flash_train.commands.values import Config
from flash_train.models.gpt import GPT
from flash_train.training.data import TokenData
from flash_train.training.resume import CheckpointHeader, find_checkpoint, load_weights, read_header

# What a model may have another value of than its checkpoint: it acts in training, and what is learned stays as it was.
_FREE = {"dropout", "attention_dropout"}


def begin(model: nn.Module, data: TokenData, config: Config) -> None:
    """Put the weights that `init_from` names into `model`; nothing where it names none.

    They are of a folder with transformers' files, or of a run; training begins anew, at step 0. Raises ValueError for
    another model than theirs, and, of a run, for another tokenizer.
    """
    source = config["init_from"]
    if source is None:
        return
    from flash_train.models.pretrained import is_pretrained, load_pretrained_into  # no other run needs safetensors

    path = Path(source).expanduser()
    if is_pretrained(path):
        if not isinstance(model, GPT):
            raise ValueError(f"init_from={source} has weights of a GPT, and model._target_ is another class")
        try:
            load_pretrained_into(model, path)
        except ValueError as error:
            raise ValueError(
                f"{error} (model.NAME=VALUE; vocabulary_size and data.sequence_length, the context_length, stand alone)"
            ) from error
        return
    checkpoint = find_checkpoint(path)
    header = read_header(checkpoint)
    different = other_model(header, config)
    if different:
        name, old, new = different
        raise ValueError(
            f"the model must be the one of init_from={source}, where model.{name} is {old}, and now it is {new}; "
            f"set model.{name}={'null' if old is None else old}"
        )
    if header.tokenizer is not None and header.tokenizer != data.tokenizer.state():
        raise ValueError(
            f"the tokens must mean what they meant to init_from={source}, and this text has another vocabulary; "
            "use the same tokenizer (of characters, a text with the same ones)"
        )
    load_weights(checkpoint, nn.ModuleDict({"model": model}))


def other_model(header: CheckpointHeader, config: Config) -> tuple[str, Any, Any] | None:
    """The first argument of the model to which `config` gives another value than the checkpoint's run did, with both.

    None where there is none, or where only the weights themselves can tell.
    """
    before, now = (header.run_config or {}).get("config", {}).get("model"), config["model"]
    if before is None or before.get("_target_") != now.get("_target_"):
        return None
    parameters = inspect.signature(resolve_name(now["_target_"])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    for name in sorted({*before, *now} - _FREE):
        old, new = (model.get(name, defaults.get(name)) for model in (before, now))
        if old != new:
            return name, old, new
    return None
