"""`flash-train`: train a GPT as the configuration says. Everything is an override: `flash-train recipes=demo`."""

from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import launch

MODULE = "flash_train.commands.train"


def train(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    from flash_train.commands.run import run  # torch and lightning only once there is something to train

    return run(config, folder, overrides)


def main() -> None:
    launch(train, config_name="train", module=MODULE)


if __name__ == "__main__":
    main()
