"""`flash-plan`: which sequence lengths and batches fit a GPU, predicted without one."""

import shlex
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flash_train.commands.hydra_app import ExitCode, launch
from flash_train.config import group_options

if TYPE_CHECKING:
    from flash_train.planning.plan import Predict
    from flash_train.planning.settings import Settings

MODULE = "flash_train.commands.plan"


def plan(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Predict what `config` describes and leave the files in `folder`; the exit code.

    It is 1 when every arm refuses the model.
    """
    import torch
    from rich.console import Console

    from flash_train.commands.environment import describe_environment
    from flash_train.commands.run import quieten
    from flash_train.planning.measured import beside, read_results
    from flash_train.planning.output import print_plan, verdict, write_files
    from flash_train.planning.plan import ArmPlan
    from flash_train.planning.settings import read_settings
    from flash_train.planning.wandb_plan import try_to_log

    quieten()
    console = Console(highlight=False, soft_wrap=True)
    settings = read_settings(config, implementations=group_options()["attention"])
    config = as_planned(config)
    vocabulary = find_vocabulary(config)
    setting = describe_setting(config, settings)
    peaks = {} if config["measured"] is None else read_results(config["measured"], config)
    plans = []
    for arm in settings.arms:
        with console.status(f"{arm}: predicting"):
            plans.append(ArmPlan(arm, predictor_of(arm, config, settings, vocabulary), settings))
    measured = beside(plans, peaks)
    print_plan(plans, settings, console, setting=setting, measured=measured)
    facts = {
        "command": shlex.join(["flash-plan", *overrides]),
        "date": date.today().isoformat(),
        "setting": setting,
        "environment": describe_environment(torch.device("cpu")),
        "config": config,
    }
    files = write_files(folder, plans, settings, setting=setting, facts=facts, measured=measured)
    if config["loggers"].get("wandb") is not None:
        try_to_log(folder, plans, settings, files, console, config=config, measured=measured)
    console.print(verdict(plans, settings), markup=False)
    console.print(f"{folder}: {', '.join(file.name for file in files)}", markup=False)
    return ExitCode.FAILURE if all(each.refusal for each in plans) else ExitCode.OK


def as_planned(config: dict[str, Any]) -> dict[str, Any]:
    """`config` as it would train on one GPU, checked. Raises ValueError for what a prediction does not know."""
    from flash_train.commands.values import check_values, count_devices

    if count_devices(config["trainer"]) > 1:
        raise ValueError(
            f"a plan is for one device, got trainer.devices={config['trainer']['devices']}; each rank of data-parallel "
            "training needs that, and buckets as large as its gradients"
        )
    if config["data"].get("separate_documents"):
        raise ValueError("a plan does not know where documents end; give data.separate_documents=false")
    tokens = config["batch_tokens"]
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ValueError(f"batch_tokens must be a positive number of tokens or null, got {tokens!r}")
    # The GPU need not be there, and the step is predicted as an eager one.
    config = {**config, "trainer": {**config["trainer"], "accelerator": "cpu", "devices": 1}}
    check_values(config)
    config["compile"] = {**config["compile"], "enabled": False, "memory_budget": 1.0}
    optimizer = config["optimizer"]
    if optimizer.get("fused", False) is None and not optimizer.get("foreach"):
        config["optimizer"] = {**optimizer, "fused": True}  # as it is where the parameters are on a GPU
    return config


def find_vocabulary(config: dict[str, Any]) -> int:
    """The model's vocabulary; the data is prepared only if it must say."""
    from flash_train.commands.objects import build_data, vocabulary_size

    size = config["vocabulary_size"]
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    return vocabulary_size(config, build_data(config))


def predictor_of(arm: str, config: dict[str, Any], settings: "Settings", vocabulary: int) -> "Predict":
    """The predictions. The module is built anew only where T, which it may have a table of, changes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flash_train.commands.objects import build_module
    from flash_train.memory.predict import Prediction, Predictor

    config = {**config, "attention": {"implementation": arm}}
    # All that a model asks of its data.
    text: Any = SimpleNamespace(vocabulary_size=vocabulary, bytes_per_token=None, source_bytes_per_token={})
    kept: dict[tuple[int, bool], Predictor] = {}

    def predict(rows: int, length: int) -> Prediction:
        accumulated = (config["batch_tokens"] or 0) > rows * length
        if (length, accumulated) not in kept:
            with FakeTensorMode():
                module = build_module(config, text, run_config={}, context_length=length)
            kept.clear()
            kept[length, accumulated] = Predictor(
                module,
                precision=config["precision"]["lightning"],
                accumulate=2 if accumulated else 1,  # more do not raise the peak
                card=settings.card,
            )
        shape = torch.empty(rows, length, dtype=torch.int64, device="meta")
        return kept[length, accumulated]({"inputs": shape, "targets": shape.clone()})

    return predict


def describe_setting(config: dict[str, Any], settings: "Settings") -> str:
    """One line that says what is predicted."""
    from flash_train.comparison.text import levers

    parts = [config["name"], *levers(config), "eager"]
    if config["batch_tokens"]:
        parts.append(f"{config['batch_tokens']:,} tokens a step")
    capability = ".".join(map(str, settings.card.capability))
    return f"{', '.join(parts)}; {settings.card.name or 'a GPU'} of compute capability {capability}"


def main() -> None:
    launch(plan, config_name="plan", module=MODULE)


if __name__ == "__main__":
    main()
