"""`flash-train`: train a GPT as the configuration says. Everything is an override: `flash-train recipes=demo`."""

from pathlib import Path
from typing import Any

from flash_train.commands.claim import alone_in
from flash_train.commands.hydra_app import launch

MODULE = "flash_train.commands.train"


def train(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    from lightning.pytorch.utilities import rank_zero_only  # torch and lightning only once there is something to train

    from flash_train.commands.run import run

    if getattr(rank_zero_only, "rank", 0):  # another rank is no second run
        return run(config, folder, overrides)
    with alone_in(folder, what="run", key="hydra.run.dir"):
        return run(config, folder, overrides)


def earlier_overrides(resume_from: str) -> list[str]:
    """The command line that a run was started with: what it is continued with, unless something else is said."""
    from flash_train.training.resume import find_checkpoint, read_header

    return list((read_header(find_checkpoint(resume_from)).run_config or {}).get("overrides", []))


def main() -> None:
    launch(train, config_name="train", module=MODULE, recall=("resume_from", earlier_overrides))


if __name__ == "__main__":
    main()
