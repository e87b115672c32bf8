"""A long run that a scheduler cuts into parts: `python -m tests.training.endurance --help`.

Python's own sources on this machine become tokens, with a BPE trained on them, and GPT-2 124M trains on them, each
document apart. SIGTERM ends a part, upon which the run writes a checkpoint and exits with 143, and `resume_from` begins
the next one. What is asked of it: that steps, losses, learning rates and tokens go on as if nobody had cut it, and that
speed and memory stay what they were. Two of these with one `--tokens` and different overrides, a GPU each, are two loss
curves over the same data.

The corpus says little of generalisation, for it is read several times. The exit code is 1 where a part ended otherwise
than by its time or its last step, or a check does not hold.
"""

import argparse
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from flash_train.training.schedule import warmup_cosine_factor
from tests.training.new_folder import new_folder

REPOSITORY = Path(__file__).parents[2]
LARGEST_FILE = 1_000_000  # bytes; what is larger is tables, not code
ENDED, CUT = 0, 143
"""Exit codes: of a run that took its last step, and of one that SIGTERM ended."""
SECONDS_TO_END = 120  # for the step under way and the checkpoint
GPT2 = (
    "recipes=gpt2_124m", "batch_tokens=131072", "schedule.warmup_steps=300", "validate_every=250",
    "trainer.limit_val_batches=1.0",
)  # fmt: skip
TINY = (
    "model.width=32", "model.depth=1", "model.heads=2", "data.sequence_length=64", "data.batch_size=2",
    "data.workers=0", "schedule.warmup_steps=5", "validate_every=1000", "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=2",
)  # fmt: skip


def read(path: Path) -> tuple[str, str] | None:
    """(hash, JSON line) of a source file; None for one that is no text, empty or too large."""
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    if not text.strip() or len(data) > LARGEST_FILE:
        return None
    return hashlib.blake2b(data).hexdigest(), json.dumps({"text": text})


def write_corpus(roots: Sequence[Path], file: Path) -> int:
    """Every distinct .py file below `roots` as a line, in the order of their hashes; the number of lines."""
    paths = sorted({path.resolve() for root in roots for path in root.rglob("*.py") if path.is_file()})
    with ProcessPoolExecutor() as pool:
        lines = dict(found for found in pool.map(read, paths, chunksize=64) if found)
    file.write_text("".join(f"{line}\n" for _, line in sorted(lines.items())))
    return len(lines)


def prepare(folder: Path, *, tiny: bool) -> None:
    """Token shards in `folder`."""
    names = ("stdlib", "purelib")
    roots = [REPOSITORY / "tests"] if tiny else [Path(sysconfig.get_path(name)) for name in names]
    folder.parent.mkdir(parents=True, exist_ok=True)
    corpus = folder.with_suffix(".jsonl")
    print(f"{write_corpus(roots, corpus):,} documents in {corpus}", flush=True)
    command = [
        sys.executable, "-m", "flash_train.commands.prepare", f"paths={corpus}", f"output={folder}", "tokenizer=bpe",
        f"vocabulary_size={300 if tiny else 50304}", "shard_bytes=8388608", f"validation={0.2 if tiny else 0.005}",
    ]  # fmt: skip
    subprocess.run(command, cwd=REPOSITORY, check=True)


@dataclass
class Part:
    """What became of one."""

    number: int
    code: int
    steps: int
    """Of the run, at its end."""
    medians: dict[str, list[float]] = field(default_factory=dict)
    """Of tokens/s, and GiB of the peak, allocated, reserved and predicted, in each fifth of the part."""
    retries: float | None = None
    """Of the allocator."""
    validation: list[list[float]] = field(default_factory=list)
    """[[step, nats], ...]"""
    problems: list[str] = field(default_factory=list)


COLUMNS = {
    "tokens/s": "speed/tokens_per_second",
    "peak": "memory/peak_allocated_gib",
    "reserved": "memory/peak_reserved_gib",
    "predicted": "memory/predicted_gib",
}


def take_part(arguments: Sequence[str], printed: Path, seconds: float) -> int:
    """The exit code of flash-train, to which SIGTERM goes after so many seconds."""
    with printed.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "flash_train.commands.train", *arguments], cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.terminate()
            return child.wait(SECONDS_TO_END)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def logged(run: Path, number: int) -> list[dict[str, float]]:
    """What the part wrote as it went on: rows by step."""
    file = run / "csv" / f"version_{number - 1}" / "metrics.csv"
    if not file.is_file():
        return []
    with file.open() as opened:
        return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(opened)]


def pick(rows: Sequence[dict[str, float]], name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[name]) for row in rows if name in row]


def by_fifths(values: Sequence[float]) -> list[float]:
    """The median of each fifth; of few values, of all."""
    size = len(values) // 5
    return [median(values[i * size : (i + 1) * size]) for i in range(5)] if size else [median(values)]


def problems(
    code: int, result: dict[str, Any], before: dict[str, Any] | None, rows: Sequence[dict[str, float]],
    config: dict[str, Any],
) -> Iterator[str]:  # fmt: skip
    """What is not as it would be if nobody had cut the run. `before`: the result of the part before."""
    if code not in (ENDED, CUT):
        yield f"exit code {code}: {result.get('error')}"
        return
    curve = result.get("loss_curve") or []
    if not curve:
        yield "it ended before its first step: give it more time"
        return
    if [step for step, _ in curve] != list(range(result["steps"])):
        yield "its losses are not those of each step, once"
    if before is not None:
        earlier = before["loss_curve"]
        if curve[: len(earlier)] != earlier:
            yield "the losses of the parts before are not those that they had"
        if len(curve) <= len(earlier):
            yield "it took no step"
    plan = partial(
        warmup_cosine_factor, warmup_steps=config["schedule"]["warmup_steps"],
        total_steps=config["trainer"]["max_steps"], floor=config["schedule"]["floor"],
    )  # fmt: skip
    peak = config["optimizer"]["lr"]
    for step, rate in pick(rows, "train/learning_rate"):
        if abs(rate - peak * plan(step)) > 1e-6 * peak:
            yield f"step {step} has the learning rate {rate:.3e}, and {peak * plan(step):.3e} was planned"
            break
    for step, tokens in pick(rows, "train/tokens"):
        if config["batch_tokens"] and tokens != (step + 1) * config["batch_tokens"]:
            yield f"step {step} counts {tokens:,.0f} tokens for {(step + 1) * config['batch_tokens']:,}"
            break


def take_all(given: argparse.Namespace, tokens: Path) -> list[Part]:
    """Part after part, until one takes the last step or fails. results.json has what there is after each of them."""
    import yaml

    run, parts = given.out / "run", list[Part]()
    first = [
        *(TINY if given.tiny else GPT2), "data=tokens", f"data.paths={tokens}", "data.separate_documents=true",
        f"trainer={given.device}", f"trainer.max_steps={given.steps}", "loggers=csv",
        f"data.cache_dir={given.out}/cache", f"hydra.run.dir={run}", *given.overrides,
    ]  # fmt: skip
    before: dict[str, Any] | None = None
    for number in range(1, given.parts + 1):
        arguments = first if number == 1 else [f"resume_from={run}"]
        code = take_part(arguments, given.out / f"part_{number}.log", 60 * given.minutes)
        file = run / "result.json"
        result: dict[str, Any] = {"error": "it wrote no result.json"}
        if file.is_file():
            result = json.loads(file.read_text())
        rows = logged(run, number)
        found = {name: [value for _, value in pick(rows, column)] for name, column in COLUMNS.items()}
        part = Part(
            number, code, result.get("steps") or 0,
            medians={name: by_fifths(values) for name, values in found.items() if values},
            retries=max((x for _, x in pick(rows, "memory/alloc_retries")), default=None),
            validation=[[step + 1, loss] for step, loss in pick(rows, "validation/loss")],
        )  # fmt: skip
        config = yaml.safe_load((run / "config.yaml").read_text()) if (run / "config.yaml").is_file() else {}
        part.problems = list(problems(code, result, before, rows, config))
        parts.append(part)
        write(given.out, parts, result, tokens, config)
        print(describe(part), flush=True)
        if code == ENDED or part.problems:
            break
        before = result
    return parts


def write(out: Path, parts: Sequence[Part], result: dict[str, Any], tokens: Path, config: dict[str, Any]) -> None:
    dataset = json.loads((tokens / "dataset.json").read_text())
    sizes = {
        split: {name: sum(part[name] for part in found) for name in ("documents", "tokens", "bytes")}
        for split, found in dataset["splits"].items()
    }
    trained = parts[-1].steps * (config.get("batch_tokens") or 0)
    facts = {
        "command": " ".join(["python", *sys.orig_argv[1:]]), "environment": result.get("environment"), "sizes": sizes,
        "tokens": trained, "epochs": trained / sizes["train"]["tokens"], "parts": [asdict(part) for part in parts],
        "loss_curve": result.get("loss_curve"),
    }  # fmt: skip
    (out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")


def describe(part: Part) -> str:
    """Some lines."""
    head = f"part {part.number}: exit code {part.code}, {part.steps:,} steps so far"
    lines = [f"{name} by fifths: {', '.join(f'{x:,.5g}' for x in values)}" for name, values in part.medians.items()]
    if part.validation:
        lines.append("validation: " + ", ".join(f"{loss:.4f} at {step:.0f}" for step, loss in part.validation))
    return "\n  ".join([head, *lines, *(f"PROBLEM: {problem}" for problem in part.problems)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.endurance", description=(__doc__ or "").split(":")[0]
    )  # fmt: skip
    parser.add_argument("--out", type=new_folder, required=True, help="a new folder")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=7.0, help="of a part, its start included")
    parser.add_argument("--steps", type=int, default=4200, help="for which the schedule is planned")
    parser.add_argument("--tokens", type=Path, help="a folder that flash-prepare made; without it one is made")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model and this repository's tests, as for a CPU")
    parser.add_argument("overrides", nargs="*", help="of the run, as precision=bf16_masters")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(CUT))  # the part that is going on ends too
    tokens = given.tokens.resolve() if given.tokens else given.out / "tokens"
    if not given.tokens:
        prepare(tokens, tiny=given.tiny)
    return 1 if any(part.problems for part in take_all(given, tokens)) else 0


if __name__ == "__main__":
    sys.exit(main())
