"""`-m`: a process per job, one table, whatever becomes of a job, and whichever launcher and sweeper is chosen."""

import csv
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_train.commands.sweep import check_started_once, check_tasks
from tests.commands import fake_job

ROOT = Path(__file__).parents[2]
SUBMITIT = pytest.mark.skipif(not importlib.util.find_spec("submitit"), reason="needs flash_train[slurm]")
OPTUNA = pytest.mark.skipif(not importlib.util.find_spec("optuna"), reason="needs flash_train[optuna]")


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", fake_job.MODULE, "-m", "hydra.sweep.dir=sweep", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup would have it ignored
    )


def sweep(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, **environment)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def jobs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "sweep" / "results.json").read_text())["jobs"]


def result(folder: Path, number: int) -> dict[str, Any]:
    return json.loads((folder / "sweep" / str(number) / "result.json").read_text())


def test_every_job_has_a_process_and_a_row_with_what_it_measured(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "optimizer.lr=1e-3,2e-3", "seed=7")
    assert code == 0, err
    assert result(tmp_path, 0)["pid"] != result(tmp_path, 1)["pid"]
    with (tmp_path / "sweep" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer.lr"], row["seed"]) for row in rows] == [("0.001", "7"), ("0.002", "7")]
    assert {row["peak_allocated_bytes"] for row in rows} == {str(3 << 30)}
    assert [row["validation_loss"] for row in rows] == ["0.001", "0.002"]
    heading = next(line for line in out.splitlines() if "validation loss" in line).split()
    assert heading[:3] == ["job", "optimizer.lr", "status"]  # and no seed, which all have
    assert "12.3k   3.00 GiB" in out and "2 jobs: 2 ok" in out


def test_a_job_that_fails_is_a_row_with_its_error_and_the_rest_goes_on(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "name=killed,fine,${nothing}")
    assert code == 1
    assert [(job["status"], job["error"]) for job in jobs(tmp_path)] == [
        ("failed", "ended by SIGKILL and no result"),
        ("ok", None),
        ("failed", "Interpolation key 'nothing' not found"),
    ]
    assert "3 jobs: 1 ok, 2 failed" in out and "  job 0, exit -9: ended by SIGKILL and no result" in out
    assert err.splitlines() == ["flash-train: Interpolation key 'nothing' not found"]


def test_what_an_earlier_sweep_left_in_the_folder_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    assert sweep(tmp_path, "seed=1,2")[0] == 0
    code, _, _ = sweep(tmp_path, "name=killed")
    assert code == 1 and [job["status"] for job in jobs(tmp_path)] == ["failed"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_sweep_ends_the_job_in_progress_and_leaves_the_table(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "name=fine,slow,fine")
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)  # to the sweep alone, as a scheduler does; a terminal tells all
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143) and "2 jobs: 1 ok, 1 interrupted" in out, (
        out + err
    )
    assert [job["status"] for job in jobs(tmp_path)] == ["ok", "interrupted"]
    assert not (tmp_path / "sweep" / "2").exists()


def test_a_job_that_is_started_again_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from flash_train.commands.sweep import Row, run_job
command = [sys.executable, "-m", "tests.commands.fake_job", "hydra.run.dir=job"]
row = Row(sweep="one", number=0, overrides=(), folder=str(Path("job").absolute()))
for sweep in ("one", "two", "two"):  # a checkpoint of another sweep is not this job's
    row = run_job(command, Row(sweep=sweep, number=0, overrides=(), folder=row.folder), sweep_folder=Path("sweep"))
    print((Path("job") / "result.json").read_text().count("/job"))
    (Path("job") / "checkpoints").mkdir(exist_ok=True)
    (Path("job") / "checkpoints" / "step_1.ckpt").touch()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert answer.stdout.split() == ["0", "0", "1"], answer.stderr


def test_a_sweep_inside_of_torchrun_is_refused(tmp_path: Path) -> None:
    code, _, err = sweep(tmp_path, "seed=1,2", WORLD_SIZE="2", RANK="0")
    assert (code, err) == (
        2,
        "flash-train: a sweep is started once and starts the processes of each job itself, and WORLD_SIZE says that 2 "
        "were started; leave out torchrun or srun\n",
    )
    check_started_once({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"})
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS says that 4 were started"):
        check_started_once({"SLURM_STEP_NUM_TASKS": "4"})


@pytest.mark.parametrize(
    ("kind", "devices", "tasks", "nodes", "said"),
    [
        ("Local", 2, 1, 1, None),
        ("Local", 2, 2, 1, "itself: hydra.launcher.tasks_per_node and nodes must be 1 and 1 with trainer.devices=2"),
        ("Slurm", 1, 1, 1, None),
        ("Slurm", [0, 1], 2, 1, None),
        ("Slurm", 2, 1, 1, "Slurm starts a task for each device: hydra.launcher.tasks_per_node and nodes must be 2"),
        ("Slurm", 1, 1, 2, "must be 1 and 1 with trainer.devices=1, got 1 and 2; set them so"),
    ],
)
def test_submitit_starts_as_many_tasks_as_the_devices_need(
    kind: str, devices: int | list[int], tasks: int, nodes: int, said: str | None
) -> None:
    launcher = {"_target_": f"submitit_launcher.{kind}Launcher", "tasks_per_node": tasks, "nodes": nodes}
    config = {"trainer": {"devices": devices}}
    if said is None:
        return check_tasks(config, launcher)
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        check_tasks(config, launcher)


@pytest.mark.parametrize(
    ("choice", "missing", "package"),
    [("hydra/launcher=slurm", "hydra/launcher/submitit_slurm", "slurm"), ("hydra/sweeper=optuna",) * 2 + ("optuna",)],
)
def test_a_plugin_that_is_not_installed_is_named_with_its_package(
    tmp_path: Path, choice: str, missing: str, package: str
) -> None:
    if importlib.util.find_spec({"slurm": "submitit"}.get(package, package)):
        pytest.skip("it is installed")
    code, _, err = sweep(tmp_path, choice, "seed=1,2")
    assert code == 2 and err.endswith(f"not installed; pip install 'flash_train[{package}]'\n")
    assert err.startswith(f"flash-train: {missing.replace('=', '/')} comes with a package")


@SUBMITIT
def test_submitit_runs_the_jobs_and_the_table_is_the_same(tmp_path: Path) -> None:
    code, out, err = sweep(tmp_path, "hydra/launcher=submitit_local", "name=fine,killed", "optimizer.lr=1e-3")
    assert code == 1, err
    assert [(job["status"], job["validation_loss"]) for job in jobs(tmp_path)] == [("ok", 0.001), ("failed", None)]
    assert "2 jobs: 1 ok, 1 failed" in out


SBATCH = """#!{python}
# sbatch of a cluster of one machine: the script at once, beside its caller, once for each job of the array.
import os, re, subprocess, sys
script = open(sys.argv[-1]).read()
first, last = re.search(r"--array=(\\d+)-(\\d+)", script).groups()
for number in range(int(first), int(last) + 1):
    job = dict(SLURM_JOB_ID=f"12{{number}}", SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID=str(number))
    streams = dict(stdout=subprocess.DEVNULL, stderr=open("slurm.log", "a"))
    subprocess.Popen(["bash", "-c", script], env=dict(os.environ, **job), **streams)
print("Submitted batch job 12")
"""
SRUN = """#!{python}
# srun with two tasks on one node; what stands before the program are its own options.
import os, subprocess, sys
command = sys.argv[next(i for i, word in enumerate(sys.argv) if "python" in os.path.basename(word)):]
tasks = dict(SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_NODEID="0", SLURM_JOB_NUM_NODES="1")
ranks = [dict(tasks, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
started = [subprocess.Popen(command, env=dict(os.environ, **rank)) for rank in ranks]
sys.exit(max(task.wait() for task in started))
"""


@SUBMITIT
def test_slurm_gets_a_task_for_each_device_and_the_first_one_s_record_is_the_job_s(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": "#!/bin/sh\necho 'JobID|State'\n"}.items():
        (programs / name).write_text(text.format(python=sys.executable))
        (programs / name).chmod(stat.S_IRWXU)
    code, out, err = sweep(
        tmp_path,
        "hydra/launcher=slurm",
        "hydra.launcher.partition=gpu",
        "trainer.devices=2",
        "optimizer.lr=1e-3,2e-3",
        PATH=f"{programs}:{os.environ['PATH']}",
    )
    assert code == 0, out + err
    assert [job["validation_loss"] for job in jobs(tmp_path)] == [0.001, 0.002]
    script = next((tmp_path / "sweep" / ".submitit").rglob("*submission.sh")).read_text()
    assert "--partition=gpu" in script and "--ntasks-per-node=2" in script and "--gpus-per-node=2" in script
    for number in range(2):
        others = json.loads((tmp_path / "sweep" / str(number) / "result_1.json").read_text())
        assert (result(tmp_path, number)["rank"], others["rank"]) == ("0", "1")


SEARCH = (
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.sampler.seed=3",
    "optimizer.lr=tag(log,interval(1e-4,1e-2))",
)


@OPTUNA
def test_optuna_seeks_the_lowest_validation_loss_and_keeps_its_study(tmp_path: Path) -> None:
    kept = ("hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=lr", "hydra.sweeper.n_trials=2")
    code, out, err = sweep(tmp_path, *SEARCH, *kept)
    assert code == 0, out + err
    assert (tmp_path / "study.db").exists()
    best = min(job["validation_loss"] for job in jobs(tmp_path))
    assert f"best_value: {best}" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()


@OPTUNA
def test_a_trial_without_a_validation_loss_is_told_what_it_lacks(tmp_path: Path) -> None:
    code, _, err = sweep(tmp_path, *SEARCH, "hydra.sweeper.n_trials=1", "name=untested")
    assert "flash-train: a sweeper that seeks needs a validation loss, and job 0 has none; set validate_every=" in err
    assert code == 2 and "No trials are completed yet" in err
