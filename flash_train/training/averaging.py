"""An exponential moving average of the weights.

Lightning has a callback for it (`WeightAveraging`, from 2.6), which this one does not use: for validation it swaps the
average with the weights in place, so that each validation rounds an average of bf16 weights to bf16, and a checkpoint
that is written when validation is interrupted takes the one for the other; and it updates tensor by tensor.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flash_train.training.master_weights import full_precision

__all__ = ["EMA", "TRAINING_WEIGHTS"]

TRAINING_WEIGHTS = "training_weights"
"""Where a checkpoint keeps the weights that training goes on with, when its "state_dict" is an average."""


class EMA(Callback):
    """average = decay * average + (1 - decay) * weights, after every so many optimizer steps.

    Validation sees the average, and a checkpoint's "state_dict" is the average: it is what flash-eval reads and what
    others load. The weights that training goes on with stand beside it, so that a resumed run continues exactly; when
    training ends, the module is left with the average. The average is kept in fp32 at least, since what `1 - decay`
    adds is below a bf16 number's rounding, beside the weights: 4 bytes a parameter, and as much as the weights again
    during validation. Where the optimizer has masters of the weights, those are averaged. Buffers are not. For
    strategies that keep parameters whole (one device, DDP).

    Args:
        decay: 0.999 looks back over some thousand updates.
        start_step: until so many optimizer steps are done the average is the weights themselves.
        every_n_steps: optimizer steps between two updates.

    Raises:
        ValueError: `decay` is not from 0 to 1, 1 excluded, or one of the other two is out of range.
    """

    def __init__(self, *, decay: float = 0.999, start_step: int = 0, every_n_steps: int = 1) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay is the average's share in each update, from 0 on and below 1, not {decay}.")
        if start_step < 0 or every_n_steps < 1:
            raise ValueError(
                f"start_step and every_n_steps count optimizer steps, from 0 and from 1 on, not {start_step} and "
                f"{every_n_steps}."
            )
        self.decay = decay
        self.start_step = start_step
        self.every_n_steps = every_n_steps
        self._average: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] = {}  # the weights, while the module has the average
        self._step = 0

    @property
    def average(self) -> dict[str, Tensor]:
        """The average of each trainable parameter, by its name in the LightningModule; empty before training."""
        return self._average

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        known = self._average if self._step else {}
        self._average = {
            name: known.get(name, weights).to(weights.device, _wide(weights), copy=True)
            for name, weights in full_precision(_averaged(pl_module), trainer.optimizers).items()
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._step <= self.start_step:
            self._move(trainer, pl_module, keep=0.0)
        elif (self._step - self.start_step) % self.every_n_steps == 0:
            self._move(trainer, pl_module, keep=self.decay)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._put_in(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._put_back(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._put_back(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # who saves at the end has done so
        self._put_in(pl_module)
        self._aside = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self._average)}  # where it is in "state_dict" as it is, the file holds it once

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = dict(state_dict["average"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return
        names = {id(p): name for name, p in _averaged(pl_module).items()}
        weights = checkpoint["state_dict"]
        checkpoint[TRAINING_WEIGHTS] = {name: self._aside.get(name, weights[name]) for name in self._average}
        averages = {
            other: self._average[names[id(p)]].to(p.dtype)
            for other, p in pl_module.named_parameters(remove_duplicate=False)
            if id(p) in names
        }
        checkpoint["state_dict"] = type(weights)(weights) | averages

    @torch.no_grad()
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        parameters = dict(pl_module.named_parameters())
        for name, weights in checkpoint.get(TRAINING_WEIGHTS, {}).items():
            parameters[name].copy_(weights)

    @torch.no_grad()
    def _move(self, trainer: Trainer, module: LightningModule, *, keep: float) -> None:
        averages = list(self._average.values())
        weights = list(full_precision(_averaged(module), trainer.optimizers).values())
        # Not lerp, which takes one dtype: copies of bf16 weights in fp32 would be the peak of the step.
        torch._foreach_mul_(averages, keep)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(averages, weights, alpha=1.0 - keep)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def _put_in(self, module: LightningModule) -> None:
        if self._average and not self._aside:
            for name, parameter in _averaged(module).items():
                self._aside[name] = parameter.clone()
                parameter.copy_(self._average[name])

    @torch.no_grad()
    def _put_back(self, module: LightningModule) -> None:
        if self._aside:
            for name, parameter in _averaged(module).items():
                parameter.copy_(self._aside[name])
            self._aside = {}


def _averaged(module: LightningModule) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
