"""Stands for flash-train and the gradient check: does what FAKE_CHILD says for its arm and length, at once.

FAKE_CHILD is a JSON object: {"naive@37": "oom", "sdpa": "crash", ...}; what it does not name trains well.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.comparison.made_up import MIB, result


def main() -> None:
    given = dict(text.split("=", 1) for text in sys.argv[1:])
    folder = Path(given["hydra.run.dir"].strip("'"))
    plans = json.loads(os.environ.get("FAKE_CHILD", "{}"))
    if "attention" not in given:
        if plans.get("gradients") == "crash":
            raise RuntimeError("no float64 here")
        errors = {
            length: {"naive": 1e-7, "sdpa": 1e-7, "flash": 1.1e-7} for length in given["lengths"].strip("[]").split(",")
        }
        leave(folder, {"status": "ok", "gradient_errors": errors, "seconds": 1.0})
        return
    arm, length = given["attention"], int(given["data.sequence_length"])
    behave(plans.get(f"{arm}@{length}", plans.get(arm, "ok")), arm, length, folder)


def behave(how: str, arm: str, length: int, folder: Path) -> None:
    (folder / "started").write_text(str(os.getpid()))
    if how == "crash":
        print("about to fail")
        raise RuntimeError("the moon was full")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(60)
    if how == "refused":
        leave(folder, {"status": "refused", "error": f"{arm!r} does not take a window; use 'flash'"})
        sys.exit(2)
    if how == "oom":
        leave(folder, {"status": "oom", "error": "out of memory: tried to allocate 3 TiB", "environment": {}})
        sys.exit(3)
    square = length * length if arm.startswith("naive") else length * 20
    answer = result(asked=arm, peak=MIB + 1000 * square, speed=1e6 / square, ran="naive" if how == "fallback" else None)
    if how == "other weights":
        answer["initial_weights_sha256"] = "other"
    leave(folder, answer)


def leave(folder: Path, answer: dict) -> None:
    (folder / "result.json").write_text(json.dumps(answer))


main()
