"""`flash-bench`: attention timed against every peer that is installed, each checked against float64 first.

With tune=true, launches of the Triton kernels against each other.
"""

import shlex
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_train.commands.hydra_app import ExitCode, launch

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from flash_train.bench.settings import Tuning

MODULE = "flash_train.commands.bench"


def bench(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Measure what `config` describes and leave the files in `folder`; the exit code.

    It is 1 when an implementation of this package gave a wrong answer or crashed, whatever became of the others.
    """
    from rich.console import Console

    from flash_train.bench.clock import matmul_flops_per_second
    from flash_train.bench.contestants import OURS
    from flash_train.bench.measure import Entry, measure
    from flash_train.bench.output import STATISTIC, print_case, write_files
    from flash_train.bench.settings import read_settings, read_tuning

    console = Console(highlight=False, soft_wrap=True)
    tuning = read_tuning(config)
    if tuning is not None:
        return tune_launches(tuning, folder, _facts(config, overrides, tuning.device), console)
    settings = read_settings(config)
    facts = _facts(config, overrides, settings.device)
    matmul = matmul_flops_per_second(settings.dtype, settings.device, rounds=settings.rounds, seconds=settings.seconds)
    entries: list[Entry] = []
    files: list[Path] = []
    said: set[str] = set()
    for case in settings.cases:
        found = measure(case, settings)
        print_case(found, settings, matmul, console, said=said)
        entries += found
        files = write_files(folder, entries, settings, matmul=matmul, facts=facts)
    console.print(STATISTIC, markup=False)
    console.print(f"{folder}: {', '.join(file.name for file in files)}", markup=False)
    faulty = [entry for entry in entries if entry.contestant in OURS and entry.status in ("wrong", "failed")]
    return ExitCode.FAILURE if faulty else ExitCode.OK


def tune_launches(tuning: "Tuning", folder: Path, facts: dict[str, Any], console: "Console") -> int:
    """Search for launches and leave the launch table in `folder`; the exit code.

    It is 1 when a launch that the table has today gave a wrong answer, or does not run.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from flash_train.bench.search import STATISTIC, Search
    from flash_train.bench.tune import tune
    from flash_train.bench.tune_output import how_to_adopt, print_search, write_tuning

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    searches: list[Search] = []
    files: list[Path] = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for group in tune(tuning, progress=progress):
            for search in group:
                print_search(search, console)
            searches += group
            files = write_tuning(folder, searches, tuning, facts=facts)
    console.print(STATISTIC, markup=False)
    console.print(f"{folder}: {', '.join(file.name for file in files)}", markup=False)
    console.print(how_to_adopt(files[-1]), markup=False)
    present = [search.trial(search.present) for search in searches]
    return ExitCode.FAILURE if any(x is not None and x.status in ("wrong", "failed") for x in present) else ExitCode.OK


def _facts(config: dict[str, Any], overrides: list[str], device: "torch.device") -> dict[str, Any]:
    from flash_train.commands.environment import describe_environment

    return {
        "command": shlex.join(["flash-bench", *overrides]),
        "date": date.today().isoformat(),
        "environment": describe_environment(device),
        "config": config,
    }


def main() -> None:
    launch(bench, config_name="bench", module=MODULE)


if __name__ == "__main__":
    main()
