"""The objects of a run, built from the configuration and wired to one another: data, model, module, trainer."""

import os
from dataclasses import dataclass

import torch
import torch._functorch.config
from lightning import Callback, Trainer, seed_everything
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger

from flash_train.commands.construct import build
from flash_train.commands.initial import begin
from flash_train.commands.values import Config, check_precision, check_values, count_devices, master_weights
from flash_train.models.gpt import GPT
from flash_train.training.data import TokenData
from flash_train.training.float8 import convert_to_float8
from flash_train.training.module import LanguageModel


@dataclass(frozen=True)
class Objects:
    """What `trainer.fit(module, datamodule=data)` needs, and the callbacks by the names that they have in YAML."""

    data: TokenData
    module: LanguageModel
    trainer: Trainer
    callbacks: dict[str, Callback]


def build_objects(config: Config, *, run_id: str, run_config: Config) -> Objects:
    """Build everything that `config` describes. The data is prepared first: it knows the vocabulary.

    Args:
        config: resolved plain values.
        run_id: names the run in wandb, before and after it is resumed.
        run_config: plain values that the checkpoints keep.

    Raises ValueError for anything in the configuration that does not fit.
    """
    check_values(config)
    torch.set_float32_matmul_precision(config["precision"]["float32_matmul"])
    data = build_data(config)
    module = build_module(config, data, run_config=run_config)
    if config["resume_from"] is None:
        begin(module.model, data, config)
    callbacks = {
        name: build(node, key=f"callbacks.{name}") for name, node in config["callbacks"].items() if node is not None
    }
    loggers = build_loggers(config, run_id=run_id)
    return Objects(data, module, build_trainer(config, callbacks=list(callbacks.values()), loggers=loggers), callbacks)


def build_data(config: Config) -> TokenData:
    """The data module, prepared and set up."""
    data = build(config["data"], key="data")
    data.prepare_data()
    data.setup("fit")
    return data


def build_module(
    config: Config, data: TokenData, *, run_config: Config, context_length: int | None = None
) -> LanguageModel:
    """The model inside its LightningModule. Its weights are a function of `seed` and the model's own shape.

    `context_length` is the longest sequence that it takes, by default that of the data.
    """
    seed_everything(config["seed"], workers=True, verbose=False)
    model: GPT = build(
        config["model"],
        key="model",
        wired={
            "vocabulary_size": vocabulary_size(config, data),
            "context_length": context_length or config["data"]["sequence_length"],
            "implementation": config["attention"]["implementation"],
            "vocabulary_multiple": config["vocabulary_multiple"],
            "checkpointing": config["checkpointing"]["granularity"],
            "checkpoint_every": config["checkpointing"]["every"],
            "half_residual": config["precision"]["residual"] == "bf16",
        },
    )
    if config["precision"]["fp8"] is not None:
        convert_to_float8(model, config["precision"]["fp8"])
    set_memory_budget(config["compile"])
    return LanguageModel(
        model,
        optimizer=build(config["optimizer"], key="optimizer", wired=master_weights(config)),
        schedule=build(config["schedule"], key="schedule"),
        gradient_clip=config["gradient_clip"],
        loss_chunk_rows=config["loss"]["chunk_rows"],
        z_loss=config["loss"].get("z_loss", 0.0),  # a run that was begun before there was one has none
        compile=config["compile"]["enabled"],
        compile_mode=config["compile"]["mode"],
        bytes_per_token=data.source_bytes_per_token or data.bytes_per_token,
        flops_per_token=model.flops_per_token(config["data"]["sequence_length"]),
        run_config=run_config,
    )


def set_memory_budget(settings: Config) -> None:
    """Tell torch.compile which share of the activations it may keep. It asks when it compiles, in the first step."""
    torch._functorch.config.activation_memory_budget = settings["memory_budget"] if settings["enabled"] else 1.0


def vocabulary_size(config: Config, data: TokenData) -> int:
    """The model's vocabulary: that of the data, or a larger one whose other rows stay unused.

    Raises ValueError if the configuration's is too small for the data.
    """
    size = config["vocabulary_size"]
    if size is None:
        return data.vocabulary_size
    if not isinstance(size, int) or isinstance(size, bool) or size < data.vocabulary_size:
        raise ValueError(
            f"vocabulary_size must be null or a whole number from {data.vocabulary_size} (the data's) on, got {size!r}"
        )
    return size


def build_loggers(config: Config, *, run_id: str) -> list[Logger]:
    """The loggers; each gets the whole configuration, so that wandb can group by any of its values."""
    loggers: list[Logger] = []
    for name, node in config["loggers"].items():
        if node is None:
            continue
        if node.get("id", "") is None:
            node = {**node, "id": run_id}
        # wandb would wait for a server that is gone until it is back, which may be never.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")
        if node.get("offline") is True:
            _start_wandb_offline()
        logger = build(node, key=f"loggers.{name}")
        logger.log_hyperparams(config)
        loggers.append(logger)
    return loggers


def _start_wandb_offline() -> None:
    """An offline run has nothing to announce. wandb reads both variables when it is set up, and before any warning."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ["WANDB_MODE"] = "offline"
    try:
        import wandb  # no run without this logger needs it
    except ImportError as error:
        raise ValueError(
            f"loggers.wandb needs wandb, which cannot be imported ({error}); choose loggers=csv"
        ) from error
    wandb.setup()


def build_trainer(config: Config, *, callbacks: list[Callback], loggers: list[Logger]) -> Trainer:
    """Lightning's trainer. What the callbacks decide (checkpoints, progress, summary) is not decided twice."""
    check_precision(config)
    accumulation = accumulate(config)
    # Lightning's own requeueing would write a checkpoint in the middle of a step, and beside the run.
    plugins = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return build(
        config["trainer"],
        key="trainer",
        wired={
            "precision": config["precision"]["lightning"],
            "accumulate_grad_batches": accumulation,
            "max_epochs": -1,  # steps alone end a run
            "val_check_interval": config["validate_every"] * accumulation,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "callbacks": callbacks,
            "plugins": plugins,
            "logger": loggers or False,
            "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
            "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
            "enable_model_summary": any(isinstance(callback, ModelSummary) for callback in callbacks),
        },
    )


def accumulate(config: Config) -> int:
    """Micro-batches per optimizer step, so that all devices together see `batch_tokens` in one step.

    Raises ValueError if `batch_tokens` is no multiple of what the devices see at once.
    """
    total = config["batch_tokens"]
    if total is None:
        return 1
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        raise ValueError(f"batch_tokens must be a positive number of tokens or null, got {total!r}")
    rows, length = config["data"]["batch_size"], config["data"]["sequence_length"]
    devices = count_devices(config["trainer"])
    at_once = rows * length * devices
    if total % at_once:
        below, above = total // at_once * at_once, (total // at_once + 1) * at_once
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"batch_tokens={total} is no multiple of data.batch_size x data.sequence_length x devices = "
            f"{rows} x {length} x {devices} = {at_once}; the nearest that are: {nearest}"
        )
    return total // at_once
