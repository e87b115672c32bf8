"""Children as processes: started, watched, killed with their parent, and not run again once they have finished."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINISHED = ("ok", "oom", "refused")
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command that writes its answer to `folder`/result.json; the `versions` it was asked for under."""

    name: str
    folder: Path
    command: tuple[str, ...]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job left: its result.json, or one made up from how it ended, and whether it was there already."""

    result: dict[str, Any]
    reused: bool
    seconds: float


def run_job(job: Job, *, tick: Callable[[], None]) -> Outcome:
    """Run the job unless its folder holds a finished result of the same command and versions.

    Whatever the child does, an outcome comes back: a crash becomes `status: failed` with the end of its log.
    `tick` is called while it runs. When the caller is interrupted, the child is ended first.
    """
    finished = _finished_result(job)
    if finished is not None:
        return Outcome(result=finished, reused=True, seconds=float(finished.get("seconds") or 0))
    if (job.folder / "command.json").exists():
        shutil.rmtree(job.folder)
    job.folder.mkdir(parents=True, exist_ok=True)
    _write_json(job.folder / "command.json", _identity(job))
    kills, start = out_of_memory_kills(), time.monotonic()
    exit_code = _run_child(job, tick)
    result = _read_json(job.folder / "result.json")
    if result is None or "status" not in result:
        result = _unreported(job, exit_code, killed_for_memory=out_of_memory_kills() > kills)
        _write_json(job.folder / "result.json", result)
    return Outcome(result=result, reused=False, seconds=time.monotonic() - start)


def _run_child(job: Job, tick: Callable[[], None]) -> int:
    with (job.folder / "output.log").open("w") as log:
        child = subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        try:
            while child.poll() is None:
                tick()
                time.sleep(_POLL_SECONDS)
        finally:
            _end(child)
    return child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def die_with_parent(number: int) -> Callable[[], None] | None:
    """For subprocess's `preexec_fn`: the child gets signal `number` when its parent dies.

    A parent that is killed cannot clean up, so Linux is asked to (prctl(2)).

    The library is loaded before the fork, because the child may only make the call itself.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _identity(job: Job) -> dict[str, Any]:
    return {"command": list(job.command), "versions": job.versions}


def _finished_result(job: Job) -> dict[str, Any] | None:
    result = _read_json(job.folder / "result.json")
    if result is None or result.get("status") not in FINISHED:
        return None
    return result if _read_json(job.folder / "command.json") == _identity(job) else None


def _unreported(job: Job, exit_code: int, *, killed_for_memory: bool) -> dict[str, Any]:
    """The result of a child that died before it could write one."""
    result = how_it_ended(exit_code, killed_for_memory=killed_for_memory)
    if result["status"] == "failed":
        result["error"] += f": {_last_line(job.folder / 'output.log')}"
    return result


def how_it_ended(exit_code: int, *, killed_for_memory: bool) -> dict[str, Any]:
    """Status and error, as in a result.json, of a process that left none and ended with this code (or signal, < 0)."""
    if exit_code == -signal.SIGKILL and killed_for_memory:
        return {"status": "oom", "error": "killed by the kernel for want of memory"}
    how = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return {"status": "failed", "error": f"{how} and no result"}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"nothing in {log}"


def out_of_memory_kills() -> int:
    """How often this machine's kernel has killed a process for memory so far (0 where it does not say)."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
