"""The jobs of a comparison: the command line of each child, and what its result depends on."""

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from flash_train.comparison.plan import REFERENCE, Run, check_batch_tokens, rows_per_micro_batch
from flash_train.comparison.runner import Job
from flash_train.comparison.settings import Settings
from flash_train.comparison.text import quoted

TRAIN = "flash_train.commands.train"
GRADIENTS = "flash_train.commands.compare_gradients"
GRADIENT_ROWS = 2
LOG_STEPS = 4  # at least, in each run
_PACKAGES = ("flash_train", "torch", "triton", "lightning")


@dataclass(frozen=True, kw_only=True)
class Children:
    """Makes the jobs of one comparison in `folder`.

    `overrides` are the user's, for flash-train, and `config` is what they compose to; `wandb`: whether the children
    may use it.
    """

    settings: Settings
    config: Mapping[str, Any]
    overrides: Sequence[str]
    folder: Path
    wandb: bool

    def training_job(self, run: Run) -> Job:
        """flash-train for one run. What the comparison fixes comes last and so has the last word.

        Raises ValueError where the length does not divide a number of tokens.
        """
        fixed = [
            f"attention={run.arm}",
            f"data.sequence_length={run.length}",
            f"data.batch_size={self._rows(run.length)}",
            f"trainer.max_steps={self.settings.steps}",
            f"trainer.limit_val_batches={self.settings.validation_batches}",
            f"validate_every={self.settings.steps}",
            f"trainer.log_every_n_steps={self._log_every()}",
            "resume_from=null",
        ]
        # A schedule that is still warming up when the run ends is refused by flash-train.
        warmup = self.config["schedule"].get("warmup_steps")
        if warmup is not None:
            fixed.append(f"schedule.warmup_steps={min(warmup, self.settings.steps // 2)}")
        if self.config["callbacks"].get("checkpoint") is not None:
            fixed.append("callbacks.checkpoint=null")
        if run.repeat > 1 or not run.measured:
            memory = self.config["callbacks"].get("memory")
            if memory is not None and "predict" in memory:
                fixed.append("callbacks.memory.predict=false")  # the first repeat's prediction is theirs
        return self._job(str(run), TRAIN, self.folder / "runs" / run.name, [*fixed, *self._wandb_overrides(run)])

    def gradient_job(self) -> Job:
        """The check of one step's gradients against float64, for all arms at the judged lengths."""
        arms = dict.fromkeys((REFERENCE, *self.settings.arms))
        fixed = [
            f"arms=[{','.join(arms)}]",
            f"lengths=[{','.join(str(length) for length in self.settings.judged_lengths)}]",
            f"data.batch_size={GRADIENT_ROWS}",
        ]
        return self._job("gradients against float64", GRADIENTS, self.folder / "runs" / "gradients", fixed)

    def group(self) -> str:
        """The name that ties the runs together in wandb: the same whenever this folder is continued."""
        return f"{self.folder.name}-{hashlib.sha256(bytes(self.folder)).hexdigest()[:6]}"

    def _job(self, name: str, module: str, folder: Path, fixed: Sequence[str]) -> Job:
        command = (sys.executable, "-m", module, *self.overrides, *fixed, f"hydra.run.dir={quoted(folder)}")
        return Job(name=name, folder=folder, command=command, versions=versions())

    def _log_every(self) -> int:
        """As configured, but often enough for a short run to leave curves in its loggers."""
        return min(self.config["trainer"].get("log_every_n_steps", 50), max(1, self.settings.steps // LOG_STEPS))

    def _rows(self, length: int) -> int:
        rows = rows_per_micro_batch(
            length,
            batch_size=self.config["data"]["batch_size"],
            micro_batch_tokens=self.settings.micro_batch_tokens,
        )
        devices = self.config["trainer"].get("devices", 1)
        devices = len(devices) if isinstance(devices, list) else devices
        check_batch_tokens(self.config["batch_tokens"], rows=rows, length=length, devices=devices)
        return rows

    def _wandb_overrides(self, run: Run) -> list[str]:
        if self.config["loggers"].get("wandb") is None:
            return []
        if not self.wandb or not run.measured:
            return ["loggers.wandb=null"]
        return [
            f"loggers.wandb.group={quoted(self.group())}",
            f"loggers.wandb.job_type={run.arm}",
            f"loggers.wandb.name={quoted(run)}",
        ]


def versions() -> dict[str, str]:
    """What a result depends on besides its command: the installed versions of what computes it."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
