"""`flash-compare`: naive against SDPA against flash attention, each run in a process of its own."""

import re
import shlex
import signal
from pathlib import Path
from typing import Any

from flash_train.commands.budget import check_budget
from flash_train.commands.claim import alone_in
from flash_train.commands.hydra_app import ExitCode, launch
from flash_train.config import group_options

MODULE = "flash_train.commands.compare"


def compare(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Run the comparison that `config` describes in `folder`; the exit code.

    It is 0 when every run was measured, ran out of memory or was refused by an implementation that does not take it,
    whatever the verdict; 1 when one crashed, or was no measurement of what it was asked to be, or all were refused.
    Nothing here needs torch.
    """
    from rich.console import Console

    from flash_train.comparison.children import Children
    from flash_train.comparison.conduct import conduct
    from flash_train.comparison.output import print_summary, write_files
    from flash_train.comparison.settings import passed_on, read_settings
    from flash_train.comparison.wandb_report import try_to_log, why_unusable

    console = Console(highlight=False, soft_wrap=True)
    settings = read_settings(config, implementations=group_options()["attention"])
    check_budget(config)  # once, and not by each of the runs
    unusable = why_unusable() if config["loggers"].get("wandb") is not None else None
    if unusable:
        console.print(f"wandb cannot be used ({unusable}); the results are written without it", markup=False)
    children = Children(
        settings=settings,
        config=config,
        overrides=passed_on(overrides),
        folder=folder.resolve(),
        wandb=config["loggers"].get("wandb") is not None and unusable is None,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with alone_in(folder, what="comparison", key="output"):
            comparison = conduct(children, console)
            files = write_files(comparison, children, command=["flash-compare", *overrides])
            if children.wandb:
                try_to_log(comparison, children, files, console)
    except KeyboardInterrupt:
        again = _again(overrides, folder)
        console.print(f"interrupted; what has finished is kept, and this goes on: {again}", markup=False)
        return ExitCode.INTERRUPTED
    except OSError as error:
        why = f"cannot write {error.filename}: {error.strerror}" if error.filename else str(error)
        raise ValueError(f"{why}; what has finished is kept, and this goes on: {_again(overrides, folder)}") from error
    print_summary(comparison, files, console)
    return ExitCode.FAILURE if comparison.verdict.problems else ExitCode.OK


def _again(overrides: list[str], folder: Path) -> str:
    """The command that continues the comparison in `folder`."""
    from flash_train.comparison.text import quoted

    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder))  # all else needs quotes in Hydra's grammar, too
    given = [override for override in overrides if not override.startswith("output=")]
    return shlex.join(["flash-compare", *given, f"output={folder if plain else quoted(folder)}"])


def main() -> None:
    launch(compare, config_name="compare", module=MODULE)


if __name__ == "__main__":
    main()
