"""`flash-generate`: text from a run's checkpoint, or from a transformers folder."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flash_train.commands.hydra_app import ExitCode, complain, launch

if TYPE_CHECKING:
    from flash_train.commands.checkpoints import Text
    from flash_train.models.gpt import GPT

MODULE = "flash_train.commands.generate"
SEPARATOR = "-" * 15  # between samples

_TYPES: dict[str, Any] = {
    "checkpoint": str,
    "prompt_file": str | None,
    "tokenizer": str | None,
    "num_samples": int,
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int | None,
    "top_p": float | None,
    "stop": bool,
    "seed": int,
    "device": Literal["cpu", "cuda"],
    "dtype": Literal["fp32", "bf16", "fp16"],
}


def generate_text(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Print what `config` asks for; the exit code."""
    import torch

    try:
        samples = draw(config)
    except torch.OutOfMemoryError as error:
        complain("generate", f"out of memory ({error}); fewer num_samples, or dtype=bf16, need less")
        return ExitCode.OUT_OF_MEMORY
    sys.stdout.write(f"\n{SEPARATOR}\n".join(samples) + "\n")
    return ExitCode.OK


def draw(config: dict[str, Any]) -> list[str]:
    """The samples, each with its prompt. Raises ValueError for values, prompts and checkpoints that do not fit."""
    import torch

    from flash_train.commands.construct import check_arguments
    from flash_train.models.generation import check_sampling, generate

    check_arguments({name: config[name] for name in _TYPES}, _TYPES, key="")
    settings = {name: config[name] for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    check_sampling(**settings)
    if config["num_samples"] < 1:
        raise ValueError(f"num_samples must be a positive number, got {config['num_samples']}; set num_samples=1")
    if not 0 <= config["seed"] < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to {2**63 - 1}, got {config['seed']}")
    if config["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a CUDA device and torch sees none; choose device=cpu")
    prompt = read_prompt(config["prompt"], config["prompt_file"])
    model, text = _open(config)
    tokens = text.encode(prompt)
    if not tokens:
        raise ValueError("the prompt must hold at least one token, got none; give prompt='\\n', or whatever texts "
                         "begin with")  # fmt: skip
    device = torch.device(config["device"])
    rows = generate(
        model,
        torch.tensor([tokens], device=device).expand(config["num_samples"], -1),
        **settings,
        end=text.ends if config["stop"] else (),
        vocabulary_size=min(text.vocabulary_size, model.vocabulary_size),
        generator=torch.Generator(device).manual_seed(config["seed"]),
    )
    # The whole, since what the first new token adds may depend on the one before it.
    return [text.decode(tokens + row.tolist()) for row in rows]


def read_prompt(prompt: Any, file: str | None) -> str:
    """The text to go on from. Raises ValueError unless exactly one of the two gives it."""
    if (prompt is None) == (file is None):
        raise ValueError("a text to go on from must be given, and once; give prompt=TEXT or prompt_file=FILE")
    if file is not None:
        try:
            return Path(file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise ValueError(f"prompt_file cannot be read, {file}: {reason}; check the path") from error
    if not isinstance(prompt, str):
        raise ValueError(f"prompt must be a text, got {prompt!r}; put it in quotes twice: 'prompt=\"{prompt}\"'")
    return prompt


def _open(config: dict[str, Any]) -> "tuple[GPT, Text]":
    import torch

    from flash_train.commands.checkpoints import open_pretrained, open_run, read_text, text_of
    from flash_train.models.pretrained import is_pretrained

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config["dtype"]]
    device, implementation = torch.device(config["device"]), config["attention"]["implementation"]
    path = Path(config["checkpoint"]).expanduser()
    tokenizer = None if config["tokenizer"] is None else Path(config["tokenizer"]).expanduser()
    if is_pretrained(path):
        return open_pretrained(path, dtype=dtype, device=device, implementation=implementation, tokenizer=tokenizer)
    trained = open_run(path, dtype=dtype, device=device, implementation=implementation)
    return trained.model, text_of(trained.tokenizer) if tokenizer is None else read_text(tokenizer)


def main() -> None:
    launch(generate_text, config_name="generate", module=MODULE)


if __name__ == "__main__":
    main()
