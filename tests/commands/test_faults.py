"""What a run does when something around it fails: rows of the README's table that no other test has."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from wandb.errors import CommError

from flash_train.commands.run import judge
from flash_train.commands.train import main
from tests.commands.conftest import SHORT, Command
from tests.comparison.wandb_offline import read_offline_run
from tests.training.endings import differing, last_checkpoint

ALWAYS = (
    *(text for text in SHORT if not text.startswith("hydra.run.dir")),
    "trainer.overfit_batches=0",
    "callbacks.checkpoint.every_n_train_steps=1",
)
"""A run of two steps with a checkpoint after each."""
TRAIN = (sys.executable, "-m", "flash_train.commands.train")


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def started(*command: str | Path, until: str, **environment: str) -> subprocess.Popen[str]:
    """A process that has printed a line that begins so."""
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed: list[str] = []
    while not (printed and printed[-1].startswith(until)):
        printed.append(process.stdout.readline())
        assert printed[-1], "".join(printed)
    return process


def test_a_full_disk_ends_the_run_and_loses_nothing_that_was_written(command: Command, tmp_path: Path) -> None:
    assert command(main, *ALWAYS, "hydra.run.dir=whole", "trainer.max_steps=4").code == 0
    assert command(main, *ALWAYS, "hydra.run.dir=run").code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "run" / "checkpoints").iterdir()}
    # What is written to this device, the kernel answers as a full disk does.
    (tmp_path / "run" / "checkpoints" / ".step_00000003.ckpt.partial").symlink_to("/dev/full")
    answer = command(main, "resume_from=run", "trainer.max_steps=4")
    (line,) = [line for line in answer.err.splitlines() if line.startswith("flash-train")]
    assert answer.code == 1 and "step_00000003.ckpt (No space left on device); what was written before" in line
    assert line.endswith("make room, and resume_from=<its folder> goes on at its last checkpoint")
    assert result(tmp_path / "run")["status"] == "failed"
    assert {file: file.read_bytes() for file in (tmp_path / "run" / "checkpoints").iterdir()} == before
    assert command(main, "resume_from=run", "trainer.max_steps=4").code == 0
    assert not list(differing(last_checkpoint(tmp_path / "run"), last_checkpoint(tmp_path / "whole")))


@pytest.mark.parametrize("text", ["No space left on device", "Read-only file system", "Disk quota exceeded"])
def test_a_disk_that_takes_no_more_is_told_from_a_wrong_path(text: str) -> None:
    number = next(number for number in range(1, 200) if os.strerror(number) == text)
    ending = judge(OSError(number, text))
    assert (ending.code, ending.surprising) == (1, False)
    assert (ending.error or "").startswith(f"cannot write in the run folder ({text}); what was written before is whole")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(command: Command) -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    privileged = os.geteuid() == 0  # who would be let in all the same
    try:
        if privileged:
            os.seteuid(65534)
        answer = command(main, *ALWAYS, f"hydra.run.dir={folder}")
    finally:
        if privileged:
            os.seteuid(0)
    assert answer.code == 2 and "Traceback" not in answer.err
    assert re.fullmatch(rf"flash-train: cannot write (in )?{folder}.*: Permission denied", answer.err.strip())
    assert list(folder.iterdir()) == []


def test_a_loss_that_is_not_finite_ends_the_run_and_its_last_checkpoint_is_from_before(
    command: Command, tmp_path: Path
) -> None:
    answer = command(main, *ALWAYS, "hydra.run.dir=run", "optimizer.lr=1e30", "trainer.max_steps=9")
    assert answer.code == 1 and "Traceback" not in answer.err
    assert re.search(r"^flash-train: The (loss|gradient) is not finite in step \d .* Resume from", answer.err, re.M)
    weights = last_checkpoint(tmp_path / "run")["state_dict"].values()
    assert all(weight.isfinite().all() for weight in weights)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("sprung", "w")


def test_no_code_in_a_checkpoint_is_executed(command: Command, tmp_path: Path) -> None:
    torch.save({"optimizer_states": [], "global_step": 1, "state_dict": Trap()}, tmp_path / "evil.ckpt")
    for arguments in (["resume_from=evil.ckpt"], [*ALWAYS, "resume_from=evil.ckpt"]):
        answer = command(main, *arguments)
        assert answer.code == 2 and "evil.ckpt is damaged (Weights only load failed" in answer.err
    assert not (tmp_path / "sprung").exists()


def test_a_token_file_that_is_truncated_under_a_run_leaves_its_checkpoints(
    command: Command, tmp_path: Path, cache: str
) -> None:
    (tmp_path / "tokens").mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(900) % 97).astype("uint16").tofile(tmp_path / "tokens" / name)
    tokens = ("data=tokens", "data.paths=tokens", "data.vocabulary_size=97")
    content = (tmp_path / "tokens" / "train.bin").read_bytes()
    options = (*ALWAYS, *tokens, "hydra.run.dir=run", "trainer.max_steps=100000")
    process = started(*TRAIN, *options, until="step 2/", XDG_CACHE_HOME=cache)
    os.truncate(tmp_path / "tokens" / "train.bin", 0)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGBUS, "the kernel's answer to a read where the file has ended"
    step = last_checkpoint(tmp_path / "run")["global_step"]
    answer = command(main, "resume_from=run", f"trainer.max_steps={step + 2}")
    assert answer.code == 2 and "a token file must hold tokens, tokens/train.bin is empty" in answer.err
    (tmp_path / "tokens" / "train.bin").write_bytes(content)
    assert command(main, "resume_from=run", f"trainer.max_steps={step + 2}").code == 0
    assert result(tmp_path / "run")["steps"] == step + 2


class WandbServer(http.server.BaseHTTPRequestHandler):
    """Says yes to what wandb asks when a run begins, and takes what it sends."""

    asked: list[str] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        data: dict[str, Any] = {}
        if self.path == "/graphql" and b"viewer" in body:
            data = {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        elif self.path == "/graphql" and b"UpsertBucket" in body:
            project = {"id": "p", "name": "flash_train", "entity": {"id": "e", "name": "me"}}
            bucket = {
                "id": "b",
                "name": "r",
                "displayName": "r",
                "config": "{}",
                "historyLineCount": 0,
                "project": project,
            }
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        elif self.path == "/graphql" and b"CreateRunFiles" in body:
            data = {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None: ...


def test_the_death_of_the_process_of_wandb_ends_a_run_in_words_and_leaves_its_result(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(CSVLogger, "log_metrics", gone)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(finish=gone))
    answer = command(main, *ALWAYS, "loggers=csv", "hydra.run.dir=run")
    assert answer.code == 1 and "Traceback" not in answer.err
    assert "flash-train: a connection broke (Connection lost), as when wandb's own process dies; resume" in answer.err
    assert result(tmp_path / "run")["status"] == "failed" and last_checkpoint(tmp_path / "run")["global_step"] == 1


def test_a_wandb_that_cannot_be_reached_when_a_run_begins_is_told_with_the_way_out() -> None:
    ending = judge(CommError("Failed to get resume status for run 1: context deadline exceeded"))
    assert (ending.status, ending.code, ending.surprising) == ("failed", 2, False)
    assert ending.error == (
        "wandb cannot be reached (Failed to get resume status for run 1: context deadline exceeded); "
        "loggers.wandb.offline=true keeps it all for wandb sync, loggers=csv does without"
    )


def test_training_goes_on_and_ends_when_wandb_is_gone_and_keeps_what_was_not_sent(tmp_path: Path, cache: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        wandb = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "WANDB_MODE": "online"}
        options = ("loggers=wandb", "loggers.wandb.offline=false", "trainer.max_steps=60", f"hydra.run.dir={tmp_path}")
        seconds = {"WANDB_FINISH_TIMEOUT": "2", "XDG_CACHE_HOME": cache}
        process = started(*TRAIN, *ALWAYS[:-1], *options, until="step 3/", **wandb, **seconds)
        server.shutdown()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and result(tmp_path)["status"] == "ok", printed
    assert any(path.endswith("file_stream") for path in WandbServer.asked), "it was there"
    (folder,) = (tmp_path / "wandb").glob("run-*")
    losses = [row["train/loss"] for row in read_offline_run(folder).history if "train/loss" in row]
    assert losses == [loss for _, loss in result(tmp_path)["loss_curve"]]


def job_script() -> str:
    """The README's, of a short run."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", readme, re.MULTILINE | re.DOTALL)
    short = [*ALWAYS, "loggers=wandb", "data.workers=1", "trainer.max_steps=$STEPS"]
    assert script.count("recipes=gpt2_124m trainer=cuda") == 1
    script = script.replace("resume_from=$run", "resume_from=$run trainer.max_steps=$STEPS")
    return script.replace("recipes=gpt2_124m trainer=cuda", " ".join(short))


def test_a_job_that_its_scheduler_ends_is_requeued_and_goes_on_exactly(
    command: Command, tmp_path: Path, cache: str
) -> None:
    """With a srun and a scontrol that only do what this script needs of them."""
    programs = {
        "job": job_script(),
        "srun": '#!/bin/sh\necho $$ > task\nexec setsid "$@"\n',
        "scontrol": '#!/bin/sh\necho "$@" >> scontrol.log\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    environment = {"PATH": path, "XDG_CACHE_HOME": cache, "WANDB_MODE": "offline", "SLURM_JOB_NAME": "train", **slurm}
    job = started(tmp_path / "job", until="step 2/", STEPS="100000", **environment)
    # Slurm signals every process of the step: the data worker and wandb's own, too.
    os.killpg(int((tmp_path / "task").read_text()), signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 77\n", printed
    stopped = result(tmp_path / "runs" / "77")
    assert stopped["status"] == "interrupted" and stopped["error"].startswith("ended by SIGTERM; resume_from="), printed
    step = last_checkpoint(tmp_path / "runs" / "77")["global_step"]
    assert step == stopped["steps"] and "Traceback" not in printed
    again = subprocess.run([tmp_path / "job"], env={**os.environ, **environment, "STEPS": str(step + 2)}, timeout=60)
    assert again.returncode == 0 and (tmp_path / "scontrol.log").read_text() == "requeue 77\n"
    options = (*ALWAYS, f"trainer.max_steps={step + 2}", "hydra.run.dir=whole")
    assert command(main, *options).code == 0
    assert not list(differing(last_checkpoint(tmp_path / "runs" / "77"), last_checkpoint(tmp_path / "whole")))
    assert result(tmp_path / "runs" / "77")["loss_curve"] == result(tmp_path / "whole")["loss_curve"]
