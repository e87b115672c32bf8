"""Kills small training runs at random instants, resumes them by the public command until they are done, and compares
every bit with an unbroken run: `python -m tests.training.kills --help`.

A chain is one run: begun, killed by SIGKILL some times, resumed each time, and finished. Half of the kills wait for a
checkpoint that is being written; half of them hit the data worker too. The run accumulates, drops out, averages its
weights and validates. To import torch takes longer than to train it, so that most processes are forks of one that has
imported everything and done nothing else; some, and the unbroken run, are true new processes.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import NamedTuple

from tests.training.endings import differences

STEPS, CHECKPOINT_EVERY = 24, 3
MOST_KILLS = 7  # of one run
LONGEST_SECONDS = 180  # of one process; then it is taken for hung
OVERRIDES = f"""
model.width=32 model.dropout=0.1 model.attention_dropout=0.1 batch_tokens=256 schedule.warmup_steps=2
data=text data.sequence_length=32 data.batch_size=4 data.workers=1 validate_every=4 trainer.limit_val_batches=2
trainer.max_steps={STEPS} trainer.log_every_n_steps=1 loggers=csv +loggers.csv.flush_logs_every_n_steps=1
callbacks=[default,ema] callbacks.memory=null callbacks.speed=null callbacks.progress=null callbacks.ema.decay=0.9
callbacks.checkpoint.every_n_train_steps={CHECKPOINT_EVERY}
""".split()


class Run(NamedTuple):
    """How one is started: the overrides, in which folder, and where it writes what it prints."""

    overrides: tuple[str, ...]
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def printed(self) -> Path:
        return self.folder.with_suffix(".log")

    def command_line(self) -> list[str]:
        """What a person would type: the overrides until there is a checkpoint, and then that it goes on."""
        if any(self.checkpoints.glob("*.ckpt")):
            return [f"resume_from={self.folder}"]
        return [*self.overrides, f"hydra.run.dir={self.folder}"]


def start(run: Run, *, new: bool) -> int:
    """Begin or resume it in a process that leads a group of its own; the process id."""
    with run.printed.open("ab") as printed:
        if new:
            command = [sys.executable, "-m", "flash_train.commands.train", *run.command_line()]
            output = [(os.POSIX_SPAWN_DUP2, printed.fileno(), 1), (os.POSIX_SPAWN_DUP2, printed.fileno(), 2)]
            return os.posix_spawn(sys.executable, command, os.environ, file_actions=output, setpgroup=0)
        if pid := os.fork():
            return pid
        os.setpgid(0, 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    code = 1
    try:
        from flash_train.commands.train import main

        sys.argv = ["flash-train", *run.command_line()]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # above are the frames of the one that was forked


Instant = Callable[[], bool]


def after(seconds: float) -> Instant:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def while_writing(run: Run, *, count: int, delay: float) -> Instant:
    """`delay` seconds after the file of the `count`-th checkpoint from now on was seen half written."""
    begin, seen = time.time_ns(), dict[str, float]()

    def now() -> bool:
        for file in run.checkpoints.glob(".*.partial"):
            with contextlib.suppress(FileNotFoundError):  # it has just become whole
                if file.name not in seen and file.stat().st_mtime_ns > begin:  # an older kill may have left one
                    seen[file.name] = time.monotonic()
        return len(seen) >= count and time.monotonic() >= list(seen.values())[count - 1] + delay

    return now


def never() -> bool:
    return False


def watch(pid: int, instant: Instant) -> int | None:
    """The exit code of the process; None as soon as it lives in the instant to kill it."""
    hung = after(LONGEST_SECONDS)
    while not instant():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if hung():
            kill(pid, group=True)
            raise TimeoutError(f"a process had not ended after {LONGEST_SECONDS} s")
        time.sleep(0.0005)
    return None


def kill(pid: int, *, group: bool) -> None:
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except ProcessLookupError:  # its group is made by itself, a moment after its birth
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Setting(NamedTuple):
    """What all chains have in common."""

    overrides: tuple[str, ...]
    folder: Path
    new: float
    """The share of new processes among those that are started."""

    @property
    def forks(self) -> bool:
        return self.new < 1

    def unbroken(self, *, new: bool) -> Run:
        return Run(self.overrides, self.folder / f"unbroken_{'new' if new else 'forked'}")


class Outcome(NamedTuple):
    """What became of a chain: where its kills fell, how many processes it took, what is wrong with its end."""

    places: list[str]
    processes: int
    new: int
    problems: list[str]


def place(run: Run) -> str:
    """Where a process was when it was killed, by what it left."""
    if any(run.checkpoints.glob(".*.partial")):
        return "while a checkpoint was written"
    return "between two checkpoints" if any(run.checkpoints.glob("*.ckpt")) else "before the first checkpoint"


def instant_of(run: Run, seconds: float, draw: random.Random) -> Instant:
    """An instant of a process that would take so many seconds."""
    if draw.random() < 0.5:
        return after(draw.uniform(0, seconds))
    return while_writing(run, count=draw.randint(1, STEPS // CHECKPOINT_EVERY // 2), delay=draw.uniform(0, 0.006))


def chain(setting: Setting, seed: int, kills: int, seconds: float) -> Outcome:
    """Begin a run, kill it up to so many times, let it end, and compare. Its folder stays if something is wrong."""
    draw, run = random.Random(seed), Run(setting.overrides, setting.folder / f"chain_{seed}")
    places: list[str] = []
    processes = new_ones = 0
    while True:
        new = draw.random() < setting.new
        processes, new_ones = processes + 1, new_ones + new
        pid = start(run, new=new)
        doomed = len(places) < kills
        code = watch(pid, instant_of(run, seconds + 4 * (new and setting.forks), draw) if doomed else never)
        if code is not None:
            break
        kill(pid, group=draw.random() < 0.5)
        places.append(place(run))
    if code == 0:
        problems = differences(
            run.folder, setting.unbroken(new=not setting.forks).folder, checkpoint_every=CHECKPOINT_EVERY
        )
    else:
        last = "\n    ".join(run.printed.read_text().splitlines()[-8:])
        problems = [f"exit code {code}; its last words:\n    {last}"]
    if not problems:
        shutil.rmtree(run.folder)
        run.printed.unlink()
    return Outcome(places, processes, new_ones, problems)


def warm_up() -> None:
    """Import what a run will need, in this process and therefore in its forks."""
    import lightning.pytorch.loggers  # noqa: F401

    import flash_train.commands.run
    import flash_train.commands.train
    import flash_train.training.averaging
    import flash_train.training.data  # noqa: F401

    set_start_method(None, force=True)  # the pool's own is inherited, and the data workers are not to be spawned
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process of {threads} threads cannot be forked"


def run_unbroken(setting: Setting, *, new: bool) -> float:
    """How many seconds it took."""
    run, begin = setting.unbroken(new=new), time.monotonic()
    if code := watch(start(run, new=new), never):
        raise RuntimeError(f"a run that nobody killed ended with exit code {code}:\n{run.printed.read_text()}")
    return time.monotonic() - begin


def run_share(setting: Setting, seed: int, kills: int, seconds: float) -> list[Outcome]:
    """Chains, one after the other, until there were so many kills."""
    draw, outcomes = random.Random(seed), list[Outcome]()
    while (left := kills - sum(len(outcome.places) for outcome in outcomes)) > 0:
        number, wanted = seed * 1000 + len(outcomes), min(draw.randint(1, MOST_KILLS), left)
        outcomes.append(outcome := chain(setting, number, wanted, seconds))
        print(f"run {number}: {len(outcome.places)} kills", *outcome.problems, sep="\n  ", flush=True)
    return outcomes


def kill_and_compare(setting: Setting, seed: int, kills: int, processes: int) -> int:
    """Runs until there were so many kills; prints what happened, and returns the exit status."""
    begin = time.monotonic()
    prepare = warm_up if setting.forks else None
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=prepare) as pool:
        seconds = pool.submit(run_unbroken, setting, new=not setting.forks).result()
        print(f"an unbroken run takes {seconds:.1f} s in a {'fork' if setting.forks else 'new process'}", flush=True)
        if 0 < setting.new < 1:
            pool.submit(run_unbroken, setting, new=True).result()
            both = (setting.unbroken(new=new).folder for new in (True, False))
            if found := differences(*both, checkpoint_every=CHECKPOINT_EVERY):
                print("a new process and a fork differ without a kill:", *found, sep="\n  ")
                return 1
        shares = [kills // processes + (number < kills % processes) for number in range(processes)]
        seeds = [seed * processes + number for number in range(processes)]
        tasks = [pool.submit(run_share, setting, *each, seconds) for each in zip(seeds, shares, strict=True)]
        outcomes = [outcome for task in tasks for outcome in task.result()]
    places = Counter(place for outcome in outcomes for place in outcome.places)
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    started, new = sum(outcome.processes for outcome in outcomes), sum(outcome.new for outcome in outcomes)
    print(f"{places.total()} kills: " + ", ".join(f"{count} {where}" for where, count in places.most_common()))
    print(
        f"{len(outcomes)} runs in {started} processes ({new} of them new, the others forks), "
        f"{time.monotonic() - begin:.0f} s; {wrong} ended otherwise than the unbroken one"
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.training.kills", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, help="drawn, and printed, if not given")
    parser.add_argument("--processes", type=int, default=1, help="so many runs at a time")
    parser.add_argument(
        "--new", type=float, help="the share of new processes, the others are forks; 0.1, and on a GPU 1: libraries "
        "that come with CUDA start threads, with which a process cannot be forked"
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", type=Path, help="where to work; what went wrong stays there")
    parser.add_argument("overrides", nargs="*", help="more of them for the runs, as precision=bf16_mixed")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    folder = Path(given.folder or tempfile.mkdtemp(prefix="kills_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{given.kills} kills, seed {seed}, on {given.device}, in {folder}", flush=True)
    text = folder / "text.txt"
    text.write_text("".join(file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))))
    overrides = [*OVERRIDES, f"data.paths={text}", f"data.cache_dir={folder / 'cache'}"]
    if given.device == "cuda":
        overrides += ["trainer=cuda", "trainer.deterministic=true"]
    # One core each. A GPU sums in a fixed order only with this workspace of cuBLAS.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    new = given.new if given.new is not None else 1.0 if given.device == "cuda" else 0.1
    setting = Setting((*overrides, *given.overrides), folder, new)
    return kill_and_compare(setting, seed, given.kills, given.processes)


if __name__ == "__main__":
    sys.exit(main())
