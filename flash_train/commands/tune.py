"""`flash-tune`: a learning rate or a batch size to begin with, by Lightning's Tuner."""

import math
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flash_train.commands.hydra_app import ExitCode, complain, launch

if TYPE_CHECKING:
    from flash_train.commands.values import Config
    from flash_train.training.data import TokenData
    from flash_train.training.module import LanguageModel

MODULE = "flash_train.commands.tune"

_HINTS: dict[str, dict[str, Any]] = {
    "learning_rate": {"min": float, "max": float, "steps": int, "stop_at": float | None},
    "batch_size": {"mode": Literal["binsearch", "power"], "limit": int, "steps": int},
}
_FEWEST_STEPS = 20


def tune(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Find what `config` asks for, say it and leave it in `folder`; the exit code."""
    from flash_train.commands.result import write_json
    from flash_train.commands.run import judge, quieten

    quieten()
    try:
        check_settings(config)
        found = (find_learning_rate if config["find"] == "learning_rate" else find_batch_size)(config, folder)
        write_json(folder / "result.json", {"find": config["find"], **found, "config": config})
        print(found["answer"])
    except BaseException as error:
        ending = judge(error)
        if ending.surprising:
            traceback.print_exc()
        else:
            complain("tune", str(ending.error))
        return ending.code
    return ExitCode.OK


def check_settings(config: "Config") -> None:
    """Raise ValueError for what cannot be sought."""
    from flash_train.commands.values import check_values, count_devices

    check_values(config)
    if config["find"] not in _HINTS:
        raise ValueError(f"find must be one of {', '.join(_HINTS)}, got {config['find']!r}")
    from flash_train.commands.construct import check_arguments

    for key, hints in _HINTS.items():
        check_arguments(config[key], hints, key=key)
    rates, rows = config["learning_rate"], config["batch_size"]
    if not 0 < rates["min"] < rates["max"]:
        raise ValueError(f"learning_rate.min must be positive and below max, got {rates['min']} and {rates['max']}")
    if rates["steps"] < _FEWEST_STEPS:
        raise ValueError(f"learning_rate.steps must be at least {_FEWEST_STEPS}, got {rates['steps']}; 100 is usual")
    for key in ("limit", "steps"):
        if rows[key] < 1:
            raise ValueError(f"batch_size.{key} must be a positive whole number, got {rows[key]}")
    if config["find"] == "batch_size" and count_devices(config["trainer"]) > 1:
        raise ValueError("a batch size is sought on one device; give trainer.devices=1, the others take as many rows")


def find_learning_rate(config: "Config", folder: Path) -> dict[str, Any]:
    """Where the loss falls fastest while the rate grows, by factors, and where it is lowest; drawn in `folder`.

    Raises ValueError where the loss never falls.
    """
    from lightning.pytorch.tuner.tuning import Tuner

    settings = config["learning_rate"]
    data, module = _build(config)
    trainer = _trainer(config, folder)
    finder = Tuner(trainer).lr_find(
        module, datamodule=data, min_lr=settings["min"], max_lr=settings["max"], num_training=settings["steps"],
        early_stop_threshold=settings["stop_at"], update_attr=False,
    )  # fmt: skip
    assert finder is not None
    losses = [loss * trainer.accumulate_grad_batches for loss in _smoothed(_undone(finder.results["loss"]))]
    curve = list(zip(finder.results["lr"], losses, strict=False))
    steepest = _steepest(curve)
    lowest = min(curve, key=lambda point: point[1])[0]
    _draw(folder / "learning_rate.png", curve, steepest)
    return {
        "answer": f"the loss falls fastest at optimizer.lr={steepest:.2e}, and is lowest at {lowest:.2e}; "
        f"{folder / 'learning_rate.png'}",
        "learning_rate": steepest,
        "lowest_loss_at": lowest,
        "curve": curve,  # [[rate, smoothed loss in nats per token], ...]
    }


def _undone(means: list[float]) -> list[float]:
    """The losses of which Lightning made these running means, up to the first that is not finite.

    A mean of the last fifty steps has its least where the loss has long risen again. (And its correction for the
    beginning at 0 counts one step too many, so that the first loss of all reads half of what it is.)
    """
    kept = 0.98  # of the mean, in each step; Lightning's
    losses, before = [], 0.0
    for step, mean in enumerate(means, 1):
        now = mean * (1 - kept ** (step + 1))
        if not math.isfinite(now):
            break
        losses.append((now - kept * before) / (1 - kept))
        before = now
    return losses


def _smoothed(losses: list[float]) -> list[float]:
    """Means over the steps on both sides, with the weights of a normal curve: noise goes, and nothing is shifted."""
    import numpy as np

    steps = np.arange(len(losses))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / max(1.0, len(losses) / 30)) ** 2)
    return (weights @ np.asarray(losses) / weights.sum(1)).tolist()


def _steepest(curve: list[tuple[float, float]]) -> float:
    """The rate where the loss falls fastest for each factor of the rate. (Lightning's own suggestion takes the slope
    over the rate itself, which is steepest where rates are small.)"""
    import torch

    rates = torch.tensor([rate for rate, _ in curve], dtype=torch.float64)
    losses = torch.tensor([loss for _, loss in curve], dtype=torch.float64)
    rates, losses = rates[losses.isfinite()], losses[losses.isfinite()]
    slopes = torch.gradient(losses, spacing=(rates.log(),))[0] if len(losses) > 1 else torch.zeros(1)
    if not slopes.min() < 0:
        raise ValueError(
            "the loss never falls, so no rate can be suggested: lower learning_rate.min, or take more steps"
        )
    return float(rates[slopes.argmin()])


def _draw(path: Path, curve: list[tuple[float, float]], chosen: float) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    from flash_train.chart_style import STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.semilogx(*zip(*curve, strict=True), color="#009E73")
        axes.axvline(chosen, color="#D55E00", linestyle="--", label=f"falls fastest at {chosen:.2e}")
        axes.set(xlabel="learning rate", ylabel="loss, smoothed (nats per token)", title="Learning-rate range test")
        axes.legend()
        figure.savefig(path)


def find_batch_size(config: "Config", folder: Path) -> dict[str, Any]:
    """The most rows of a micro-batch that memory was seen to hold; where steps accumulate, they do so while trying."""
    from lightning.pytorch.tuner.tuning import Tuner

    settings, tokens = config["batch_size"], config["batch_tokens"]
    length = config["data"]["sequence_length"]
    data, module = _build(config | {"data": config["data"] | {"batch_size": 1}})
    # Two micro-batches keep what more of them keep: the gradients of the first ones.
    trial = config | {"data": config["data"] | {"batch_size": 1}, "batch_tokens": 2 * length if tokens else None}
    found = Tuner(_trainer(trial, folder)).scale_batch_size(
        module, datamodule=data, mode=settings["mode"], steps_per_trial=settings["steps"], init_val=1, margin=0.0,
        # The size that reaches it is reported untried.
        max_val=2 * settings["limit"],
    )  # fmt: skip
    rows = min(found or 1, settings["limit"])
    data.batch_size = rows
    _trainer(trial, folder, max_steps=settings["steps"]).fit(module, datamodule=data)  # Lightning takes 1 on trust
    more = f"; {settings['limit']} is batch_size.limit, more were not tried" if rows == settings["limit"] else ""
    fitting = rows
    if tokens:
        fitting = max(each for each in range(1, rows + 1) if tokens % (each * length) == 0 or each == 1)
        more += f"; batch_tokens={tokens} divides into micro-batches of {fitting}" if fitting != rows else ""
    return {
        "answer": f"data.batch_size={fitting} fits, of {length} tokens each, {rows} at most{more}",
        "batch_size": fitting,
        "most_rows": rows,
    }


def _build(config: "Config") -> "tuple[TokenData, LanguageModel]":
    import torch

    from flash_train.commands.initial import begin
    from flash_train.commands.objects import build_data, build_module

    torch.set_float32_matmul_precision(config["precision"]["float32_matmul"])
    data = build_data(config)
    module = build_module(config, data, run_config={})
    begin(module.model, data, config)
    return data, module


def _trainer(config: "Config", folder: Path, **changes: Any) -> Any:
    from flash_train.commands.budget import check_budget, limit_memory
    from flash_train.commands.objects import build_trainer

    options = {"default_root_dir": str(folder), "limit_val_batches": 0, "overfit_batches": 0.0, "fast_dev_run": False}
    options |= changes
    trainer = build_trainer(config | {"trainer": config["trainer"] | options}, callbacks=[], loggers=[])
    limit_memory(check_budget(config), trainer.strategy.root_device)
    return trainer


def main() -> None:
    launch(tune, config_name="tune", module=MODULE)


if __name__ == "__main__":
    main()
