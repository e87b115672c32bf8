"""`flash-eval`: loss, perplexity and bits per byte of a checkpoint over the whole validation split, by source."""

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_train.commands.hydra_app import ExitCode, complain, launch
from flash_train.commands.train import earlier_overrides

if TYPE_CHECKING:
    from flash_train.training.evaluation import Score

MODULE = "flash_train.commands.evaluate"
ALL = "all"


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
    """Loss in nats per token, perplexity and bits per byte of the checkpoint, of all tokens and of each source, with
    what it was measured on.

    Raises ValueError if the checkpoint does not fit the configuration.
    """
    import torch

    from flash_train.commands.environment import describe_environment
    from flash_train.commands.objects import build_data, build_module, build_trainer
    from flash_train.commands.values import check_values
    from flash_train.training.evaluation import total_score
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
    return {
        "checkpoint": str(path),
        "step": header.step,
        "tokens_seen": header.tokens_seen,
        **describe(total_score(list(module.scores.values()))),
        "sources": {name: describe(score) for name, score in module.scores.items() if name},
        "sequence_length": config["data"]["sequence_length"],
        "data": data.provenance,
        "environment": describe_environment(trainer.strategy.root_device),
    }


def describe(score: "Score") -> dict[str, Any]:
    """A score as plain values; bits per byte are None where nobody knows the bytes of the tokens."""
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens": score.tokens,
    }


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['checkpoint']}, step {result['step']:,}, T = {result['sequence_length']:,}")
    table.add_column("validation")
    for title in ("tokens", "loss (nats per token)", "perplexity", "bits per byte"):
        table.add_column(title, justify="right")
    rows = {**result["sources"], ALL: result}
    for number, (name, row) in enumerate(rows.items(), start=1):
        bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        last = number == len(rows) - 1
        table.add_row(
            name, f"{row['tokens']:,}", f"{row['loss']:.4f}", f"{row['perplexity']:.5g}", bits, end_section=last
        )
    Console().print(table)


def main() -> None:
    launch(evaluate, config_name="eval", module=MODULE, recall=("checkpoint", earlier_overrides))


if __name__ == "__main__":
    main()
