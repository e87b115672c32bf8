import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flash_train.comparison.runner import Job, run_job

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def find_the_fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def job(folder: Path, arm: str = "naive") -> Job:
    arguments = (f"attention={arm}", "data.sequence_length=37", f"hydra.run.dir='{folder}'")
    command = (sys.executable, "-m", "tests.comparison.fake_child", *arguments)
    return Job(name=arm, folder=folder, command=command, versions={"torch": "2.13.0"})


def behave(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("FAKE_CHILD", f'{{"naive": "{how}"}}')


def nothing() -> None:
    pass


def test_a_finished_child_is_not_run_again(tmp_path: Path):
    first = run_job(job(tmp_path / "run"), tick=nothing)
    again = run_job(job(tmp_path / "run"), tick=nothing)
    assert (first.reused, again.reused) == (False, True)
    assert again.result == first.result and again.result["status"] == "ok"


def test_running_out_of_memory_is_finished_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    behave(monkeypatch, "oom")
    assert run_job(job(tmp_path / "run"), tick=nothing).result["status"] == "oom"
    assert run_job(job(tmp_path / "run"), tick=nothing).reused


def test_another_command_or_version_runs_it_again(tmp_path: Path):
    ours = job(tmp_path / "run")
    run_job(ours, tick=nothing)
    assert not run_job(replace(ours, versions={"torch": "2.14.0"}), tick=nothing).reused
    assert not run_job(replace(ours, command=(*ours.command, "seed=2")), tick=nothing).reused


def test_a_crash_is_reported_with_the_end_of_its_log_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    behave(monkeypatch, "crash")
    outcome = run_job(job(tmp_path / "run"), tick=nothing)
    assert outcome.result["status"] == "failed"
    assert outcome.result["error"] == "ended with exit code 1 and no result: RuntimeError: the moon was full"
    monkeypatch.delenv("FAKE_CHILD")
    assert run_job(job(tmp_path / "run"), tick=nothing).result["status"] == "ok"


def test_a_child_that_was_killed_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    behave(monkeypatch, "killed")
    outcome = run_job(job(tmp_path / "run"), tick=nothing)
    assert outcome.result["status"] == "failed" and "ended by SIGKILL" in outcome.result["error"]


def test_a_kernel_that_kills_for_memory_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    behave(monkeypatch, "killed")
    kills = iter((3, 4))
    monkeypatch.setattr("flash_train.comparison.runner.out_of_memory_kills", lambda: next(kills))
    assert run_job(job(tmp_path / "run"), tick=nothing).result["status"] == "oom"


def test_a_folder_of_somebody_elses_is_not_deleted(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    run_job(job(tmp_path), tick=nothing)
    assert (tmp_path / "thesis.tex").exists()


def test_an_interrupted_parent_ends_its_child_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    behave(monkeypatch, "hang")
    started = tmp_path / "run" / "started"

    def interrupt() -> None:
        if started.exists() and started.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job(tmp_path / "run"), tick=interrupt)
    assert is_gone(int(started.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_a_killed_parent_takes_its_child_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    behave(monkeypatch, "hang")
    parent = subprocess.Popen(
        (
            sys.executable,
            "-c",
            f"from pathlib import Path; from tests.comparison.test_runner import *;"
            f"run_job(job(Path({str(tmp_path / 'run')!r})), tick=nothing)",
        )
    )
    started = tmp_path / "run" / "started"
    wait_until(lambda: started.exists() and started.read_text() != "")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: is_gone(int(started.read_text())))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def is_gone(process: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet has, too."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
