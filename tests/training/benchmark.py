"""A training step of the 124M GPT-2, ours and others', in one session: `python -m tests.training.benchmark --help`.

Each arm is a process of its own. At each length all are started together, take their first steps side by side, and
then take turns: in each round every arm takes so many timed steps while the others hold still, and every second round
goes backwards. `sustained` turns follow one another without a pause, so that the card is as hot as in training; before
a `burst`, of fewer steps, it rests. A ratio is the median of those of the rounds, and the sustained ones decide.

`ours` is what a user gets, `flash-train recipes=gpt2_124m` with Lightning, torch.compile, its monitors
and every tenth step logged; OURS says what the other arms of ours have besides, and `--also` adds one. The others are
in tests/training/peers.py. All take the same batches from the same first weights with the same learning rates.

The time is StepClock's for all of them: from the end of one optimizer step to that of the next, by events on the
device, the median of a turn. (SpeedMonitor's tokens/s, which is beside it in results.json, has the same ends, but
averages over the steps between two log steps; its step_ms begins at the forward pass and leaves out the wait for
data.) The peak is the allocator's over the same steps, read through the same ledger. All arms are on the card at once
and must fit there together; when the compiler times its candidates in the first steps, others are at work beside it.

The exit code is 1 where a required ratio that was measured does not hold, or a run failed.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from flash_train.models.gpt import GPT
from tests.training.benchmark_report import (
    BURST,
    SUSTAINED,
    Outcome,
    Row,
    Turn,
    print_report,
    summarise,
    verdict,
    write_files,
)
from tests.training.new_folder import new_folder
from tests.training.peers import LEARNING_RATE, LOG_EVERY, PEERS, SEED, WARM_UP_STEPS, Run, missing
from tests.training.turns import FIRST_STEPS, UNTIMED_STEPS, Arm

OURS = {
    "ours": (),
    "ours_bf16": ("precision=bf16_masters",),
    "ours_memory": ("precision=bf16_masters", "compile.memory_budget=0.8"),
    "ours_sdpa": ("attention=sdpa",),
    "ours_cudnn": ("attention=sdpa_cudnn",),
}
ARMS = (*OURS, *PEERS)
DEFAULT_ARMS = ("ours", "ours_bf16", "nanogpt")
GPT2 = {"width": 768, "depth": 12, "heads": 12, "vocabulary": 50304, "tokens": 32768, "compile": True}
TINY = {"width": 32, "depth": 2, "heads": 2, "vocabulary": 320, "tokens": 256, "compile": False}
Item = TypeVar("Item")


@dataclass(frozen=True)
class Round:
    """One turn of every arm."""

    regime: str
    number: int
    """Within its regime, from 0."""
    steps: int
    """Timed ones of each turn."""
    pause: float
    """Seconds before each turn."""

    def order(self, arms: Sequence[Item]) -> Sequence[Item]:
        return arms if self.number % 2 == 0 else arms[::-1]


def plan(given: argparse.Namespace) -> list[Round]:
    sustained = [Round(SUSTAINED, number, given.steps, 0.0) for number in range(given.rounds)]
    return sustained + [Round(BURST, number, given.burst_steps, given.pause) for number in range(given.burst_rounds)]


def command(run: Run, channel: int) -> list[str]:
    """What a person would type for our arms; a peer's process."""
    if run.arm in PEERS:
        return [sys.executable, "-m", "tests.training.peers", json.dumps(asdict(run)), str(channel)]
    turns = ",".join(map(str, run.turns))
    overrides = [
        "recipes=gpt2_124m", f'data.paths=["{run.text}"]', f"data.sequence_length={run.length}",
        f"data.batch_size={run.rows}", f"data.cache_dir={run.cache}", f"batch_tokens={run.tokens}", f"seed={SEED}",
        f"trainer={run.device}", f"trainer.max_steps={run.steps}", f"trainer.log_every_n_steps={LOG_EVERY}",
        "trainer.limit_val_batches=2", "validate_every=1000", f"optimizer.lr={LEARNING_RATE}",
        f"schedule.warmup_steps={WARM_UP_STEPS}", "attention=flash", "precision=bf16_mixed",
        "loggers=csv", "callbacks.checkpoint=null", f"vocabulary_size={run.vocabulary}",
        f"compile={'on' if run.compile else 'off'}",
        *(f"model.{name}={getattr(run, name)}" for name in ("width", "depth", "heads")),
        f"+callbacks.clock={{_target_:tests.training.turns.StepClock,turns:[{turns}],channel:{channel}}}",
        f"hydra.run.dir={run.folder}",
    ]  # fmt: skip
    own = [each for each in run.overrides if run.compile or not each.startswith("compile.")]
    chosen = {each.partition("=")[0]: each for each in (*overrides, *own)}  # Hydra wants each key once
    return [sys.executable, "-m", "flash_train.commands.train", *chosen.values()]


def variables(run: Run, arms: int) -> dict[str, str]:
    """Of the environment: each arm compiles with its share of the cores, into a cache of its own, kept between lengths.

    Which back ends SDPA may take is not in the cache's keys: two arms that differ in that alone must not share one."""
    compiled, threads = Path(run.cache) / "compiled" / run.arm, max(1, len(os.sched_getaffinity(0)) // arms)
    return {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}


def take_turns(
    runs: Sequence[Run], rounds: Sequence[Round], timeout: float, outcomes: list[Outcome]
) -> Generator[None, None, None]:
    """One length: what becomes of the runs goes into `outcomes`. Yields after each round, and when all have ended."""
    with ExitStack() as stack:
        pairs: list[tuple[Arm, Outcome]] = []
        for run in runs:
            outcomes.append(outcome := Outcome(run.arm, run.length))
            if (reason := missing(run.arm)) is not None:
                outcome.status, outcome.message = "not run", reason
                continue
            arm = Arm(partial(command, run), Path(run.folder), variables(run, len(runs)), timeout)
            pairs.append((stack.enter_context(arm), outcome))
        for arm, outcome in pairs:
            if (said := arm.ready()) is not None:
                outcome.first_step_seconds, outcome.environment = said["first_step_seconds"], said["environment"]
            tell(arm, outcome, "ready")
        for each in rounds:
            for arm, outcome in each.order([pair for pair in pairs if not pair[0].problem]):
                time.sleep(each.pause)
                if (record := arm.turn()) is not None:
                    outcome.turns.append(turn := Turn(each.regime, each.number, **record))
                    tell(arm, outcome, f"{turn.regime} {turn.round + 1}: {median(turn.step_ms):.2f} ms")
                else:
                    tell(arm, outcome)
            yield
        left = [pair for pair in pairs if not pair[0].problem]
        for arm, _ in left:
            arm.go_on()
        for arm, outcome in left:
            if found := arm.end():
                outcome.status, outcome.seconds = "measured", arm.seconds
                outcome.loss_curve, outcome.speed = found["loss_curve"], found.get("speed")
            tell(arm, outcome, f"ended after {arm.seconds:.0f} s")
    yield


def tell(arm: Arm, outcome: Outcome, news: str = "") -> None:
    """A line of progress; where the run has failed, `outcome` says so too."""
    if arm.problem:
        outcome.status, outcome.message, outcome.seconds = "failed", arm.problem, arm.seconds
        news = f"failed: {arm.problem}"
    print(f"T={outcome.length:,} {outcome.arm}: {news}", flush=True)


def flops_per_token(sizes: dict[str, Any], length: int) -> int:
    """Of the model without biases, by the package's formula."""
    with torch.device("meta"):
        model = GPT(vocabulary_size=sizes["vocabulary"], context_length=length,
                    **{name: sizes[name] for name in ("width", "depth", "heads")})  # fmt: skip
    return model.flops_per_token(length)


def benchmark(given: argparse.Namespace) -> Generator[list[Row], None, None]:
    """After each round, and at the end of each length, all figures so far, which are then in the files too."""
    sizes, out, rounds = TINY if given.tiny else GPT2, given.out, plan(given)
    flops = {length: flops_per_token(sizes, length) for length in given.lengths}
    arms = {arm: OURS.get(arm, ()) for arm in given.arms} | dict(given.also)
    facts: dict[str, Any] = {
        "command": " ".join(["python", *sys.orig_argv[1:]]), "date": date.today().isoformat(), "sizes": sizes,
        "arms": arms, "first_steps": FIRST_STEPS, "untimed_steps": UNTIMED_STEPS,
        "rounds": [asdict(each) for each in rounds], "flops_per_token": flops,
    }  # fmt: skip
    outcomes: list[Outcome] = []
    for length in given.lengths:
        runs = [
            Run(
                arm, length, [each.steps for each in rounds], text=str(given.text.resolve()),
                folder=str(out / f"{arm}_{length}"), cache=str(out / "cache"), device=given.device, **sizes,
                overrides=overrides,
            )
            for arm, overrides in arms.items()
        ]  # fmt: skip
        with closing(take_turns(runs, rounds, given.timeout, outcomes)) as turns:
            for _ in turns:
                environment = next((each.environment for each in outcomes if each.environment), {})
                name = environment.get("device_name")
                rows = summarise(outcomes, tokens=sizes["tokens"], flops=flops, device_name=name)
                write_files(out, rows, outcomes, {**facts, "environment": environment})
                yield rows


def another_arm(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and overrides of NAME=override,override; a comma within brackets is the override's own."""
    name, _, overrides = text.partition("=")
    if not re.fullmatch(r"[\w.-]+", name) or name in ARMS or "=" not in overrides:
        raise argparse.ArgumentTypeError(
            f"NAME=override,override needs a new name and an override, got {text!r}: as lean=compile.memory_budget=0.8"
        )
    return name, tuple(re.split(r",(?![^\[{(]*[\])}])", overrides))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.benchmark", description=(__doc__ or "").split(":")[0]
    )  # fmt: skip
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[1024, 8192], help="T, divisors of a step's tokens")
    add("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS, metavar="ARM", help=", ".join(ARMS))
    add("--also", type=another_arm, action="append", default=[], metavar="NAME=override,override",
        help="one more arm: `ours` with these overrides; may be given several times")  # fmt: skip
    add("--rounds", type=int, default=3, help="sustained turns of each arm at each length")
    add("--steps", type=int, default=40, help="timed steps of a sustained turn")
    add("--burst-rounds", type=int, default=1, help="burst turns of each arm at each length")
    add("--burst-steps", type=int, default=10, help="timed steps of a burst")
    add("--pause", type=float, default=3, help="seconds in which the device rests before a burst")
    add("--text", type=Path, required=True, help="a file, whose bytes are the tokens")
    add("--out", type=new_folder, required=True, help="a new folder, for results and what the runs print")
    add("--timeout", type=float, default=240, help="seconds in which a run must be ready, take a turn, or end")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--tiny", action="store_true", help="a small model, not compiled, as for a CPU")
    given = parser.parse_args(arguments)
    tokens = (TINY if given.tiny else GPT2)["tokens"]
    if any(length < 1 or tokens % length for length in given.lengths):
        parser.error(f"--lengths: {tokens} tokens a step are no whole number of rows of each of {given.lengths}")
    if min(given.rounds, given.steps, given.burst_steps) < 1 or min(given.burst_rounds, given.pause) < 0:
        parser.error("--rounds, --steps and --burst-steps begin at 1, --burst-rounds and --pause at 0")
    if len(dict(given.also)) < len(given.also):
        parser.error(f"--also: each arm needs a name of its own, got {[name for name, _ in given.also]}")
    if not given.text.is_file():
        parser.error(f"--text: {given.text} is no file; give one of as many bytes as the run has tokens")
    return given


def main() -> int:
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the runs that are going on end too
    rows: list[Row] = []
    try:
        with closing(benchmark(given)) as figures:
            for found in figures:
                rows = found
    finally:
        print_report(rows)
    return 0 if verdict(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
