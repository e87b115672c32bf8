"""From a transformers folder to our GPT."""

from pathlib import Path
from typing import Any

import torch

from flash_train.models.architecture import architecture
from flash_train.models.gpt import GPT
from flash_train.models.pretrained.config import arguments_from_config
from flash_train.models.pretrained.files import CONFIG, TensorFiles, read_json
from flash_train.models.pretrained.table import BASES, EMBEDDINGS, HEAD, pieces


def is_pretrained(folder: str | Path) -> bool:
    """Whether ``folder`` is one of transformers' rather than a run's: it has a config.json."""
    return (Path(folder) / CONFIG).is_file()


def load_pretrained(
    folder: str | Path,
    *,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    implementation: str = "flash",
) -> GPT:
    """The GPT whose config.json and weights transformers' ``save_pretrained``, or ours, left in ``folder``.

    Takes ``model_type`` gpt2 and llama, in safetensors alone, and gives transformers' logits. The files are mapped and
    copied tensor by tensor, so that memory holds one model.

    Arguments:
        context_length: of the model, at most the folder's where positions are learned (default: the folder's).
        dtype, device: of the parameters.
        implementation: of attention.

    Raises ``ValueError`` for a folder without these files, a damaged one, tensors that are missing, of another shape
    or left over, and for what our model cannot express (see ``arguments_from_config``).
    """
    arguments = arguments_from_config(read_json(Path(folder) / CONFIG))
    if context_length is not None:
        arguments["context_length"] = context_length
    with torch.device("meta"):
        model = GPT(**arguments, implementation=implementation)
    model = model.to(dtype).to_empty(device=device)
    load_pretrained_into(model, folder)
    return model


@torch.no_grad()
def load_pretrained_into(model: GPT, folder: str | Path) -> None:
    """Put the weights that ``load_pretrained`` reads into ``model``, in place; it must be the folder's architecture.

    Its context may be shorter, or longer where positions are rotary, its vocabulary padded, and biases that are all 0
    in the folder may be absent. Raises ``ValueError`` for another architecture, with all that differs, and as
    ``load_pretrained`` does.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    arguments = arguments_from_config(config)
    _check_architecture(model, arguments, folder)
    parameters, kind = dict(model.named_parameters()), config["model_type"]
    with TensorFiles(folder, base=BASES[kind]) as files:
        for piece in pieces(kind, architecture(model), bias=arguments["bias"]):
            source = files.read(piece.name)
            if piece.parameter == "position_embedding.weight":
                source = source[: model.context_length]
            if piece.parameter not in parameters:
                if source.count_nonzero():
                    raise ValueError(
                        f"a model without biases takes none, and {piece.name} in {folder} is not 0: make it bias=True"
                    )
                continue
            target = piece.of(parameters[piece.parameter])
            if target.shape != source.shape:
                raise ValueError(
                    f"{piece.name} in {folder} must be {list(target.shape)}, as its config.json says, got "
                    f"{list(source.shape)}: write the folder again"
                )
            target.copy_(source)
        if arguments["tied_embeddings"] and HEAD in files:
            if not torch.equal(files.read(HEAD), files.read(EMBEDDINGS[kind])):
                raise ValueError(
                    f"a tied head must be the embedding, and {HEAD} in {folder} is another: "
                    'set "tie_word_embeddings": false in its config.json'
                )
        files.check_all_read()


def _check_architecture(model: GPT, arguments: dict[str, Any], folder: Path) -> None:
    with torch.device("meta"):
        theirs = architecture(GPT(**arguments))
    ours = architecture(model)
    unlike = [name for name in theirs if theirs[name] != ours[name] and name not in ("context_length", "bias")]
    if ours["bias"] and not theirs["bias"]:
        unlike.append("bias")
    if ours["positions"] == "learned" and ours["context_length"] > theirs["context_length"]:
        unlike.append("context_length")
    if unlike:
        wanted, got = (", ".join(f"{name}={of[name]}" for name in unlike) for of in (theirs, ours))
        raise ValueError(f"the model must be the one whose weights are in {folder}, got {got}: give it {wanted}")
