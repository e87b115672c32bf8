"""The files of a transformers folder: JSON, and tensors in one safetensors file or several."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# What older releases kept in the file though no weight: causal masks, and the frequencies of rotary positions.
_NO_WEIGHTS = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``ValueError`` where there is none."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path.parent} must be a folder that transformers' save_pretrained wrote, and its {path.name} cannot be "
            f"read ({error.strerror}): check the path"
        ) from error
    except ValueError as error:  # also of bytes that are no text
        raise ValueError(f"{path} must hold JSON, and does not ({error}): write the folder again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}: write the folder again")
    return content


class TensorFiles:
    """The tensors of ``folder`` by name, mapped and not read; ``base`` may be left out of the names in the files.

    A context, which closes the files. Raises ``ValueError`` where there are no safetensors, and for damaged ones.
    """

    def __init__(self, folder: Path, *, base: str) -> None:
        self._folder = folder
        self._base = base
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._read: set[str] = set()
        self._file_of = self._find()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return self._spelled(name) in self._file_of

    def read(self, name: str) -> Tensor:
        """The tensor, in the mapped file; ``ValueError`` for one that is missing or holds no floating numbers."""
        spelled = self._spelled(name)
        if spelled not in self._file_of:
            raise ValueError(f"the weights in {self._folder} must have {name}, and do not: they are of another model")
        self._read.add(spelled)
        try:
            tensor = self._handle(self._file_of[spelled]).get_tensor(spelled)
        except (SafetensorError, OSError) as error:
            raise self._damaged(self._file_of[spelled], error) from error
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} must be {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}, "
                f"got {str(tensor.dtype).removeprefix('torch.')}: save the model in one of these"
            )
        return tensor

    def check_all_read(self) -> None:
        """Raise ``ValueError`` if a weight was not read: the model would be another without it."""
        left = sorted(name for name in self._file_of.keys() - self._read if not _NO_WEIGHTS.search(name))
        if left:
            raise ValueError(
                f"the weights in {self._folder} must all have a place in the model, and {left[0]} has none "
                f"({len(left)} such): they are of another model"
            )

    def _spelled(self, name: str) -> str:
        short = name.removeprefix(self._base)
        return short if name not in self._file_of and short in self._file_of else name

    def _find(self) -> dict[str, str]:
        if (self._folder / INDEX).is_file():
            files = read_json(self._folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError(f"{self._folder / INDEX} must have a weight_map of file names: write the folder again")
            outside = next((file for file in files.values() if Path(file).name != file), None)
            if outside is not None:
                raise ValueError(
                    f"the files of {INDEX} must lie beside it, got {outside}: this folder is not what it seems"
                )
            return files
        if (self._folder / WEIGHTS).is_file():
            return dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)
        pickled = any(self._folder.glob("pytorch_model*.bin"))
        raise ValueError(
            f"{self._folder} must hold {WEIGHTS} or {INDEX}, and has "
            + ("pickled weights alone, which can run code: " if pickled else "neither: ")
            + "write it with transformers' save_pretrained"
        )

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> ValueError:
        return ValueError(f"{self._folder / file} must be a whole safetensors file, and is not ({error}): get it again")
