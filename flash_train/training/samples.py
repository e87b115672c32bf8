"""Text that the model writes after each validation, for people to read and for wandb."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from flash_train.models.generation import check_sampling, generate
from flash_train.models.gpt import GPT
from flash_train.training.data import TokenData

__all__ = ["TextSamples"]

log = logging.getLogger(__name__)


class TextSamples(Callback):
    """Draws `count` texts of at most `max_new_tokens` tokens after each validation.

    They are appended to `folder`/samples.txt and logged to wandb as the table `validation/samples` (step, sample,
    text). All are drawn from the same generator seed, so that only the model differs between two validations, and
    training's own random numbers are left alone. A compiled model runs uncompiled here, since each token makes the
    text longer. A text ends early where its document does.

    Args:
        prompt: what each goes on from; it must be text that the tokenizer takes.
        temperature, top_k, top_p: as in `models.generation.generate`.

    Raises ValueError when training begins: of numbers out of range, a model that is no GPT, data without a tokenizer,
    and a prompt that it does not take.
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str],
        count: int = 4,
        max_new_tokens: int = 128,
        prompt: str = "\n",
        temperature: float = 0.8,
        top_k: int | None = 200,
        top_p: float | None = None,
        seed: int = 0,
    ) -> None:
        check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
        if count < 1:
            raise ValueError(f"count must be a positive number of texts, got {count}; leave callbacks.samples out")
        self.file = Path(folder) / "samples.txt"
        self.count = count
        self.prompt = prompt
        self.seed = seed
        self.options = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module.model, GPT):
            raise ValueError(f"samples are drawn from a GPT, got {type(pl_module.model).__name__}; leave them out")
        if not self._prompt_tokens(trainer):
            raise ValueError("samples need a prompt of one token at least; set callbacks.samples.prompt=TEXT")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not at validation's end, where EMA may have put the training weights back.
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        try:
            texts = self._draw(trainer, pl_module)
        except ValueError as error:  # logits that are not finite: what stops such a run is not this
            log.warning("no samples at step %d: %s", trainer.global_step, error)
            return
        if trainer.is_global_zero:
            self._write(trainer, texts)

    def _draw(self, trainer: Trainer, module: LightningModule) -> list[str]:
        data, model, device = self._data(trainer), module.model, module.device
        assert isinstance(model, GPT)
        tokens = self._prompt_tokens(trainer)
        separator = data.tokenizer.separator
        # Every rank draws, for a sharded model needs them all, and one writes.
        with torch.compiler.set_stance("force_eager"), trainer.precision_plugin.forward_context():
            rows = generate(
                model,
                torch.tensor([tokens], device=device).expand(self.count, -1),
                **self.options,
                end=() if separator is None else (separator,),
                vocabulary_size=min(data.vocabulary_size, model.vocabulary_size),
                generator=torch.Generator(device).manual_seed(self.seed),
            )
        # With the prompt, since what the first new token adds may depend on the one before it.
        return [data.tokenizer.decode(tokens + row.tolist()) for row in rows]

    def _write(self, trainer: Trainer, texts: list[str]) -> None:
        try:
            with self.file.open("a") as file:
                for number, text in enumerate(texts):
                    file.write(f"--- step {trainer.global_step}, sample {number} ---\n{text}\n")
        except OSError as error:
            log.warning("samples are not written to %s: %s", self.file, error.strerror)
        rows: list[list[Any]] = [[trainer.global_step, number, text] for number, text in enumerate(texts)]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table("validation/samples", columns=["step", "sample", "text"], data=rows)

    def _prompt_tokens(self, trainer: Trainer) -> list[int]:
        return self._data(trainer).tokenizer.encode(self.prompt).tolist()

    def _data(self, trainer: Trainer) -> TokenData:
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        if not isinstance(data, TokenData):
            raise ValueError(f"samples need the tokenizer of a TokenData, got {type(data).__name__}; leave them out")
        return data
