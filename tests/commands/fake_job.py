"""A command that is as quick as a job of a sweep can be: it composes flash-train's configuration and trains nothing.

`name` says what becomes of it; its validation loss is its learning rate.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import ExitCode, launch

MODULE = "tests.commands.fake_job"


def run(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    if config["name"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    result: dict[str, Any] = {
        "status": "ok",
        "pid": os.getpid(),
        "rank": os.environ.get("SLURM_PROCID"),
        "resume_from": config["resume_from"],
        "validation": {"loss": config["optimizer"]["lr"]},
        "loss_curve": [[1, 3.5], [2, 2.5]],
        "speed": {"tokens_per_second": 12_345.0},
        "memory": {"peak_allocated_bytes": 3 << 30},
    }
    code = ExitCode.OK
    try:
        if config["name"] == "slow":
            print("waiting", flush=True)
            time.sleep(60)
    except KeyboardInterrupt:
        result |= {"status": "interrupted", "error": "interrupted"}
        code = ExitCode.INTERRUPTED
    if config["name"] == "untested":
        result["validation"] = {}
    name = "result.json" if result["rank"] in (None, "0") else f"result_{result['rank']}.json"
    (folder / name).write_text(json.dumps(result))
    return code


def main() -> None:
    launch(run, config_name="train", module=MODULE)


if __name__ == "__main__":
    main()
