"""`flash-traffic`: the bytes that attention moves to and from a GPU's memory, counted by Nsight Compute."""

import shlex
from datetime import date
from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import ExitCode, complain, launch

MODULE = "flash_train.commands.traffic"


def traffic(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Count what `config` describes and leave the files in `folder`; the exit code.

    It is 1 when an implementation of this package gave a wrong answer or crashed, or the process that was observed did.
    """
    from rich.console import Console

    from flash_train.bench.contestants import OURS
    from flash_train.bench.nsight import CommandFailed
    from flash_train.bench.settings import read_traffic
    from flash_train.bench.traffic import STATISTIC, measure_traffic
    from flash_train.bench.traffic_output import print_traffic, write_traffic
    from flash_train.commands.environment import describe_environment

    console = Console(highlight=False, soft_wrap=True)
    contest = read_traffic(config)
    try:
        rows, passes = measure_traffic(contest, config, ncu=str(config["ncu"]), log=folder / "ncu.csv")
    except CommandFailed as failure:
        complain("traffic", str(failure))
        return ExitCode.FAILURE
    facts = {
        "command": shlex.join(["flash-traffic", *overrides]),
        "date": date.today().isoformat(),
        "environment": describe_environment(contest.device),
        "config": config,
    }
    files = write_traffic(folder, rows, contest, passes=passes, facts=facts)
    print_traffic(rows, contest, console)
    if passes > 1:
        console.print(f"ncu ran each kernel {passes} times: all but the first found a warm cache", markup=False)
    console.print(STATISTIC, markup=False)
    console.print(f"{folder}: {', '.join(file.name for file in files)}, ncu.csv", markup=False)
    faulty = [row for row in rows if row.contestant in OURS and row.status in ("wrong", "failed")]
    return ExitCode.FAILURE if faulty else ExitCode.OK


def main() -> None:
    launch(traffic, config_name="traffic", module=MODULE)


if __name__ == "__main__":
    main()
