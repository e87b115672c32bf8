"""`flash-export`: a run's model as a folder that transformers loads."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flash_train.commands.hydra_app import ExitCode, complain, launch

if TYPE_CHECKING:
    from flash_train.training.data.tokenizers import Tokenizer

MODULE = "flash_train.commands.export"

_TYPES: dict[str, Any] = {
    "checkpoint": str,
    "output": str,
    "dtype": Literal["fp32", "bf16", "fp16"],
}


def export(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Write what `config` asks for; the exit code."""
    import torch

    from flash_train.commands.checkpoints import open_run
    from flash_train.commands.construct import check_arguments
    from flash_train.models.pretrained import is_pretrained, save_pretrained

    check_arguments({name: config[name] for name in _TYPES}, _TYPES, key="")
    output, checkpoint = (Path(config[name]).expanduser() for name in ("output", "checkpoint"))
    if is_pretrained(checkpoint):
        raise ValueError(f"checkpoint must be of a run, and {checkpoint} is a transformers folder already; copy it")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config["dtype"]]
    trained = open_run(checkpoint, dtype=dtype)
    try:
        with whole_folder(output) as unfinished:
            save_pretrained(trained.model, unfinished, end_of_text=trained.tokenizer.separator)
            write_tokenizer(trained.tokenizer, unfinished)
    except OSError as error:  # a full disk as well
        complain("export", f"cannot write {output}: {error.strerror or error}; give another output=")
        return ExitCode.BAD_INPUT
    print(f"{output}: step {trained.step:,} of {trained.path}")
    return ExitCode.OK


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that becomes `path` at the end of the block, and is gone if the block fails.

    Raises ValueError if something is there already, an empty folder apart.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output must be a new or empty folder, {path} is not; give another output=")
    unfinished = path.with_name(f".{path.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of one that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tokenizer(tokenizer: "Tokenizer", folder: Path) -> None:
    """tokenizer.json: subwords as transformers reads them, bytes and characters as `flash-prepare` writes them.

    Of tokens that came without a tokenizer nothing is written.
    """
    state = tokenizer.state()
    if state["kind"] == "unknown":
        return
    if state["kind"] != "subwords":
        (folder / "tokenizer.json").write_text(json.dumps(state))
        return
    (folder / "tokenizer.json").write_text(state["definition"])
    special = {"eos_token": state["separator"], "bos_token": state["separator"]}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    launch(export, config_name="export", module=MODULE)


if __name__ == "__main__":
    main()
