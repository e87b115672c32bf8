"""A training step of the 124M GPT-2, ours and others', in one session: `python -m tests.training.benchmark --help`.

Each run is a process of its own, arms take turns, and every second round goes backwards. `ours` is what a user gets,
`flash-train recipes=gpt2_124m loss=chunked` with Lightning, torch.compile, its monitors and every tenth step logged;
`ours_bf16` has precision=bf16_masters, and `ours_memory` that and the compiler's memory budget of 0.8. The others are
in tests/training/peers.py. All take the same batches from the same first weights with the same learning rates.

The time is StepClock's for all of them: from the end of one optimizer step to that of the next, by events on the
device, the median of the last steps. (SpeedMonitor's tokens/s, which is beside it in results.json, has the same ends,
but averages over the steps between two log steps; its step_ms begins at the forward pass and leaves out the wait for
data.) The peak is the allocator's over the same steps, read through the same ledger. Few steps of a GPU that was idle
are a burst: its clock falls when it has been busy for longer.

The exit code is 1 where a required ratio that was measured does not hold, or a run failed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flash_train.models.gpt import GPT
from tests.training.benchmark_report import Outcome, Row, print_report, summarise, verdict, write_files
from tests.training.peers import LEARNING_RATE, LOG_EVERY, PEERS, SEED, WARM_UP_STEPS, Run, missing

REPOSITORY = Path(__file__).parents[2]
OURS = {
    "ours": ("precision=bf16_mixed",),
    "ours_bf16": ("precision=bf16_masters",),
    "ours_memory": ("precision=bf16_masters", "compile.memory_budget=0.8"),
}
ARMS = (*OURS, *PEERS)
DEFAULT_ARMS = ("ours", "ours_bf16", "nanogpt")
TIMED = 20
"""Steps at the end of a run, at most two thirds of it."""
GPT2 = {"width": 768, "depth": 12, "heads": 12, "vocabulary": 50304, "tokens": 32768, "compile": True}
TINY = {"width": 32, "depth": 2, "heads": 2, "vocabulary": 320, "tokens": 256, "compile": False}


def order(lengths: Sequence[int], arms: Sequence[str], rounds: int) -> list[tuple[int, int, str]]:
    """(length, round, arm), one length after the other."""
    return [
        (length, number, arm)
        for length in lengths
        for number in range(rounds)
        for arm in (arms if number % 2 == 0 else tuple(reversed(arms)))
    ]


def command(run: Run) -> list[str]:
    """What a person would type for our arms; a peer's process."""
    if run.arm not in OURS:
        return [sys.executable, "-m", "tests.training.peers", json.dumps(asdict(run))]
    own = [each for each in OURS[run.arm] if run.compile or not each.startswith("compile.")]
    overrides = [
        "recipes=gpt2_124m", f'data.paths=["{run.text}"]', f"data.sequence_length={run.length}",
        f"data.batch_size={run.rows}", f"data.cache_dir={run.cache}", f"batch_tokens={run.tokens}", f"seed={SEED}",
        f"trainer={run.device}", f"trainer.max_steps={run.steps}", f"trainer.log_every_n_steps={LOG_EVERY}",
        "trainer.limit_val_batches=2", "validate_every=1000", f"optimizer.lr={LEARNING_RATE}",
        f"schedule.warmup_steps={WARM_UP_STEPS}", "loss=chunked", "attention=flash", "loggers=csv",
        "callbacks.checkpoint=null", f"vocabulary_size={run.vocabulary}", f"compile={'on' if run.compile else 'off'}",
        *(f"model.{name}={getattr(run, name)}" for name in ("width", "depth", "heads")), *own,
        f"+callbacks.clock={{_target_:tests.training.peers.StepClock,steps:{run.steps},timed:{run.timed}}}",
        f"hydra.run.dir={run.folder}",
    ]  # fmt: skip
    return [sys.executable, "-m", "flash_train.commands.train", *overrides]


def wait_for(arguments: Sequence[str], printed: Path, timeout: float, compiled: Path) -> int | None:
    """The exit code of a process that leads a group of its own, all of which ends here; None where time was up.

    `compiled`: the compiler's cache. Which back ends SDPA may take is not in its keys: two arms that differ in that
    alone must not share one."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    with printed.open("wb") as output:
        child = subprocess.Popen(
            arguments, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def measure(run: Run, number: int, timeout: float) -> tuple[Outcome, dict[str, Any]]:
    """What became of the run, and the machine that it found."""
    known = {"arm": run.arm, "length": run.length, "round": number}
    if (reason := missing(run.arm)) is not None:
        return Outcome(**known, status="not run", message=reason), {}
    folder, begin = Path(run.folder), time.monotonic()
    compiled = Path(run.cache) / "compiled" / run.arm
    code = wait_for(command(run), printed := folder.with_suffix(".log"), timeout, compiled)
    seconds, file = time.monotonic() - begin, folder / "result.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if code is None or code or found.get("status") != "ok":
        last = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()][-1:]
        why = found.get("error") or "".join(last) or "it said nothing"
        message = f"stopped after {timeout:g} s: {why}" if code is None else f"exit code {code}: {why}"
        return Outcome(**known, status="failed", message=message, seconds=seconds), {}
    clock = found["clock"]
    outcome = Outcome(
        **known, status="measured", seconds=seconds, step_ms=clock["step_ms"],
        peak_bytes=clock["peak_allocated_bytes"], first_step_seconds=clock["first_step_seconds"],
        loss_curve=found["loss_curve"], speed=found.get("speed"),
    )  # fmt: skip
    return outcome, found["environment"]


def describe(outcome: Outcome) -> str:
    """One line of progress."""
    what = f"T={outcome.length:,} round {outcome.round + 1} {outcome.arm}"
    if outcome.status != "measured":
        return f"{what}: {outcome.status}: {outcome.message}"
    return f"{what}: {median(outcome.step_ms):.2f} ms, loss {outcome.loss_curve[-1][1]:.4f} ({outcome.seconds:.0f} s)"


def flops_per_token(sizes: dict[str, Any], length: int) -> int:
    """Of the model without biases, by the package's formula."""
    with torch.device("meta"):
        model = GPT(vocabulary_size=sizes["vocabulary"], context_length=length,
                    **{name: sizes[name] for name in ("width", "depth", "heads")})  # fmt: skip
    return model.flops_per_token(length)


def benchmark(given: argparse.Namespace) -> Iterator[list[Row]]:
    """After each run, all figures so far, which are then in the files too."""
    sizes, out = TINY if given.tiny else GPT2, given.out.resolve()
    flops = {length: flops_per_token(sizes, length) for length in given.lengths}
    facts: dict[str, Any] = {
        "command": " ".join(["python", *sys.orig_argv[1:]]), "date": date.today().isoformat(), "sizes": sizes,
        "steps": given.steps, "flops_per_token": flops, "environment": {},
    }  # fmt: skip
    outcomes: list[Outcome] = []
    for length, number, arm in order(given.lengths, given.arms, given.rounds):
        run = Run(
            arm, length, given.steps, min(TIMED, 2 * given.steps // 3), text=str(given.text.resolve()),
            folder=str(out / f"{arm}_{length}_{number + 1}"), cache=str(out / "cache"), device=given.device, **sizes,
        )  # fmt: skip
        outcome, environment = measure(run, number, given.timeout)
        outcomes.append(outcome)
        facts["environment"] = facts["environment"] or environment
        print(describe(outcome), flush=True)
        name = facts["environment"].get("device_name")
        rows = summarise(outcomes, tokens=sizes["tokens"], flops=flops, device_name=name)
        write_files(out, rows, outcomes, facts)
        yield rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.benchmark", description=(__doc__ or "").split(":")[0]
    )  # fmt: skip
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192], help="T, divisors of a step's tokens")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each arm at each length")
    parser.add_argument("--steps", type=int, default=30, help="of a run; the last 20 are timed")
    parser.add_argument("--text", type=Path, required=True, help="a file, whose bytes are the tokens")
    parser.add_argument("--out", type=Path, required=True, help="a new folder, for results and what the runs print")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a run may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model, not compiled, as for a CPU")
    given = parser.parse_args(arguments)
    tokens = (TINY if given.tiny else GPT2)["tokens"]
    if any(length < 1 or tokens % length for length in given.lengths):
        parser.error(f"--lengths: {tokens} tokens a step are no whole number of rows of each of {given.lengths}")
    if given.steps <= WARM_UP_STEPS or given.rounds < 1:
        parser.error(f"--steps begin after {WARM_UP_STEPS}, the learning rate's warm-up, and --rounds at 1")
    if not given.text.is_file():
        parser.error(f"--text: {given.text} is no file; give one of as many bytes as the run has tokens")
    if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
        parser.error(f"--out: {given.out} is not empty; give a new folder, for a run would mix with an older one")
    return given


def main() -> int:
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run that is going on ends too
    rows: list[Row] = []
    try:
        for found in benchmark(given):
            rows = found
    finally:
        print_report(rows)
    return 0 if verdict(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
