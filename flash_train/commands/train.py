"""`flash-train`: train a GPT as the configuration says. Everything is an override: `flash-train recipes=demo`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flash_train.commands.hydra_app import launch

MODULE = "flash_train.commands.train"


def train(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    from flash_train.commands.run import run  # torch and lightning only once there is something to train

    with _alone_in(folder):
        return run(config, folder, overrides)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep a second run, whose checkpoints would be taken for ours, out of `folder`; other ranks are no second run.

    Raises ValueError if one is at work there. The claim ends with the process, however it ends.
    """
    from lightning.pytorch.utilities import rank_zero_only

    if getattr(rank_zero_only, "rank", 0):
        yield
        return
    try:
        lock = FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise ValueError(f"another run is at work in {folder}; wait for it, or give another hydra.run.dir=") from error
    except OSError as error:
        raise ValueError(f"cannot write in {folder}: {error.strerror}") from error
    with lock:
        yield


def earlier_overrides(resume_from: str) -> list[str]:
    """The command line that a run was started with: what it is continued with, unless something else is said."""
    from flash_train.training.resume import find_checkpoint, read_header

    return list((read_header(find_checkpoint(resume_from)).run_config or {}).get("overrides", []))


def main() -> None:
    launch(train, config_name="train", module=MODULE, recall=("resume_from", earlier_overrides))


if __name__ == "__main__":
    main()
