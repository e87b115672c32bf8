"""A child of `flash-compare`: one step's gradients of each arm at each length against float64, into result.json."""

import sys
import time
from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import ExitCode, launch

MODULE = "flash_train.commands.compare_gradients"


def check_gradients(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    from flash_train.commands.result import write_json
    from flash_train.commands.run import judge

    begin = time.monotonic()
    result: dict[str, Any] = {"status": "ok", "error": None, "gradient_errors": {}}
    code = ExitCode.OK
    try:
        for length in config["lengths"]:
            result["gradient_errors"][length] = _errors(config, length)
    except Exception as error:
        ending = judge(error)
        result |= {"status": ending.status, "error": ending.error}
        code = ending.code
        print(ending.error, file=sys.stderr)
    write_json(folder / "result.json", {**result, "seconds": time.monotonic() - begin})
    return code


def _errors(config: dict[str, Any], length: int) -> dict[str, float]:
    """The relative gradient error of each arm at one length, on the first batch of the training data."""
    import torch

    from flash_train.commands.initial import begin
    from flash_train.commands.objects import build_data, build_module
    from flash_train.commands.values import check_device
    from flash_train.comparison.gradients import gradient_errors

    check_device(config["trainer"])
    torch.set_float32_matmul_precision(config["precision"]["float32_matmul"])
    device = torch.device("cpu" if config["trainer"]["accelerator"] == "cpu" else "cuda")
    config = config | {
        "data": config["data"] | {"sequence_length": length},
        "compile": config["compile"] | {"enabled": False},
        # Whose error would hide attention's, and which float64 does not take.
        "precision": config["precision"] | {"fp8": None},
    }
    data = build_data(config)
    batch = {name: tensor.to(device) for name, tensor in next(iter(data.train_dataloader())).items()}

    def make_model(implementation: str) -> torch.nn.Module:
        arm = config | {"attention": {"implementation": implementation}}
        model = build_module(arm, data, run_config={}).model
        begin(model, data, config)
        return model

    return gradient_errors(
        make_model,
        batch["inputs"],
        batch["targets"],
        implementations=config["arms"],
        precision=config["precision"]["lightning"],
        documents=batch.get("documents"),
    )


def main() -> None:
    launch(check_gradients, config_name="compare", module=MODULE)


if __name__ == "__main__":
    main()
