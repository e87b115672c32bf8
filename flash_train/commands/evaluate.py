"""`flash-eval`: loss and bits per byte of a checkpoint over the whole validation split."""

import traceback
from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import ExitCode, complain, launch
from flash_train.commands.train import earlier_overrides

MODULE = "flash_train.commands.evaluate"


def evaluate(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    from flash_train.commands.result import write_json
    from flash_train.commands.run import judge, quieten

    quieten()
    try:
        file = Path(config["json"]) if config["json"] else None
        if file and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"json must be a file in a folder that exists, got {config['json']!r}")
        result = measure(config)
        print_table(result)
        if file:
            write_json(file, result)
    except BaseException as error:
        ending = judge(error)
        if ending.surprising:
            traceback.print_exc()
        else:
            complain("eval", str(ending.error))
        return ending.code
    return ExitCode.OK


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Loss in nats per token and bits per byte of the checkpoint, with what it was measured on.

    Raises ValueError if the checkpoint does not fit the configuration.
    """
    import torch

    from flash_train.commands.environment import describe_environment
    from flash_train.commands.objects import build_data, build_module, build_trainer
    from flash_train.commands.values import check_values
    from flash_train.training.resume import find_checkpoint, load_weights, read_header

    check_values(config)
    torch.set_float32_matmul_precision(config["precision"]["float32_matmul"])
    path = find_checkpoint(config["checkpoint"])
    header = read_header(path)
    trained = (header.run_config or {}).get("config", config)["data"]["sequence_length"]
    data = build_data(config)
    length = max(trained, config["data"]["sequence_length"])
    module = build_module(config, data, run_config={}, context_length=length)
    load_weights(path, module)
    # Whatever the run itself looked at, a checkpoint is judged by the whole split.
    whole = config["trainer"] | {"limit_val_batches": 1.0, "overfit_batches": 0.0, "fast_dev_run": False}
    trainer = build_trainer(config | {"trainer": whole}, callbacks=[], loggers=[])
    trainer.validate(module, datamodule=data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "checkpoint": str(path),
        "step": header.step,
        "tokens_seen": header.tokens_seen,
        "loss": metrics["validation/loss"],
        "bits_per_byte": metrics.get("validation/bits_per_byte"),  # None: nobody knows the bytes of the tokens
        "sequence_length": config["data"]["sequence_length"],
        "data": data.provenance,
        "environment": describe_environment(trainer.strategy.root_device),
    }


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['checkpoint']}, step {result['step']:,}")
    for title in ("validation loss (nats per token)", "bits per byte", "T"):
        table.add_column(title, justify="right")
    bits = result["bits_per_byte"]
    table.add_row(f"{result['loss']:.4f}", "-" if bits is None else f"{bits:.4f}", str(result["sequence_length"]))
    Console().print(table)


def main() -> None:
    launch(evaluate, config_name="eval", module=MODULE, recall=("checkpoint", earlier_overrides))


if __name__ == "__main__":
    main()
