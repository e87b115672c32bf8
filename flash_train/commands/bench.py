"""`flash-bench`: attention timed against every peer that is installed, each checked against float64 first."""

import shlex
from datetime import date
from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import ExitCode, launch

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
    from flash_train.bench.settings import read_settings
    from flash_train.commands.environment import describe_environment

    console = Console(highlight=False, soft_wrap=True)
    settings = read_settings(config)
    facts = {
        "command": shlex.join(["flash-bench", *overrides]),
        "date": date.today().isoformat(),
        "environment": describe_environment(settings.device),
        "config": config,
    }
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


def main() -> None:
    launch(bench, config_name="bench", module=MODULE)


if __name__ == "__main__":
    main()
