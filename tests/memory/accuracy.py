"""Predicted against measured peak memory of training steps: `python -m tests.memory.accuracy --help`.

What is predicted is what `predict_peak` tells a user, of the module, the batch and the GPU; what is measured is what
MemoryMonitor reads of a Lightning run of three steps in a fresh process. Processes share the GPU, as many as their
predicted peaks leave room for: the allocator's peak is each one's own, and no time is measured. All errors must be
within `bound` (two per cent for eager steps of a GiB or more), or the exit code is 1. Results are written as they come.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from flash_train.commands.environment import describe_environment
from flash_train.commands.run import quieten
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.prediction import card_at
from flash_train.memory.cards import GIB, Card
from flash_train.memory.predict import predict_peak
from flash_train.memory.sizes import human_bytes, human_error
from tests.memory.accuracy_output import Outcome, print_report, verdict, write_files
from tests.memory.packing import Ended, Task, run_packed
from tests.memory.points import Point, batch_of, module_of, points, tiny_points

STEPS = 3
"""The first makes the optimizer's state, the second is the first whole one, and on a CPU the third is followed."""
SECONDS = 180
"""That one process may take: a compiled step takes the longest."""
SHARE = 0.97
"""Of the GPU's memory that the processes may take together."""


def room_of(peak: int) -> int:
    """Bytes that a process gets for a predicted peak: what the allocator keeps between its blocks, CUDA's context."""
    return round(1.12 * peak) + GIB


# One point


def predict(point: Point, device: str, card: Card | None) -> Outcome:
    """What `predict_peak` says of it."""
    try:
        with torch.device("meta"):
            module, batch = module_of(point), batch_of(point)
        found = predict_peak(
            module, batch, precision=point.precision, accumulate=point.accumulate, device=device, card=card
        )
    except ImportError as error:
        return Outcome(point, "not run", message=str(error))
    except Exception as error:
        return Outcome(point, "failed", message=f"not predicted: {_first_line(error)}")
    return Outcome(point, "predicted", found.peak, predicted_phases=found.allocated, message="it was not its turn yet")


def measure(point: Point, device: str, ready: Callable[[], Any]) -> dict[str, Any]:
    """What MemoryMonitor reads of a run of it in this process, which should have done nothing yet.

    `ready` is called before anything is on the device.
    """
    torch.manual_seed(0)
    module, monitor = module_of(point), MemoryMonitor()
    batches: Any = [batch_of(point)] * (STEPS * point.accumulate)
    ready()
    trainer = lightning.Trainer(
        accelerator=device, devices=1, max_steps=STEPS, precision=point.precision,  # pyright: ignore
        accumulate_grad_batches=point.accumulate, callbacks=[monitor], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    found = monitor.result()
    return {"measured": found["peak_allocated_bytes"], "reserved": found["peak_reserved_bytes"],
            "measured_phases": {name: size for name, size in found["phases"].items() if size}}  # fmt: skip


def measured_here(outcome: Outcome, device: str, ready: Callable[[], Any] = lambda: None) -> Outcome:
    """`outcome` with the measurement, or with the reason why there is none."""
    try:
        return replace(outcome, status="measured", message="", **measure(outcome.point, device, ready))
    except torch.OutOfMemoryError as error:
        return replace(outcome, status="out of memory", message=_first_line(error))
    except Exception as error:
        traceback.print_exc()
        return replace(outcome, status="failed", message=_first_line(error))


def measured_there(outcome: Outcome, ended: Ended) -> Outcome:
    """`outcome` with what the process that measured it has printed."""
    seconds, lines = ended.seconds, ended.output.strip().splitlines()
    if ended.code is None:
        return replace(outcome, status="failed", seconds=seconds, message=f"was stopped after {seconds:.0f} s")
    found = [line for line in lines if line.startswith('{"status": ')]  # libraries may speak after it, at the exit
    if found:
        return replace(outcome, seconds=seconds, **json.loads(found[-1]))
    last = lines[-1] if lines else "it said nothing"
    return replace(outcome, status="failed", seconds=seconds, message=f"died, exit code {ended.code}: {last}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# All of them


def predict_all(chosen: Sequence[Point], device: str, card: Card | None, processes: int) -> list[Outcome]:
    """In as many processes, in the order of `chosen`; with 0 in this one."""
    if processes == 0:
        return [predict(point, device, card) for point in chosen]
    found: dict[Point, Outcome] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(chosen)), mp_context=context, initializer=_alone) as pool:
        for each in as_completed([pool.submit(predict, point, device, card) for point in chosen]):
            outcome = each.result()
            found[outcome.point] = outcome
    return [found[point] for point in chosen]


def _alone() -> None:
    torch.set_num_threads(1)


def measure_all(predicted: Iterable[Outcome], device: str, budget: int, processes: int) -> Iterator[Outcome]:
    """Each as it is measured; one that ran out of memory beside others is measured again alone, in the end."""
    waiting = [outcome for outcome in predicted if outcome.status == "predicted"]
    if processes == 0:
        yield from (measured_here(outcome, device) for outcome in waiting)
        return
    # What is compiled takes longest, and what is largest leaves least room: these begin.
    waiting.sort(key=lambda outcome: (not outcome.point.compile, -(outcome.predicted or 0)))
    for together in (processes, 1):
        by_name = {outcome.point.to_json(): outcome for outcome in waiting}
        tasks = [
            Task(name, (sys.executable, "-m", __spec__.name, "--device", device, "--point", name),
                 room_of(outcome.predicted or 0))
            for name, outcome in by_name.items()
        ]  # fmt: skip
        waiting = []
        for ended in run_packed(tasks, budget=budget, processes=together, seconds=SECONDS):
            outcome = measured_there(by_name[ended.name], ended)
            if outcome.status == "out of memory" and together > 1:
                waiting.append(by_name[ended.name])
            else:
                yield outcome


def describe(outcome: Outcome) -> str:
    """One line of progress."""
    if outcome.measured is None or outcome.predicted is None:
        return f"{outcome.point}: {outcome.status}: {outcome.message}"
    sizes = f"predicted {human_bytes(outcome.predicted)}, measured {human_bytes(outcome.measured)}"
    return f"{outcome.point}: {sizes}, {human_error(outcome.error or 0.0)} ({outcome.seconds:.0f} s)"


def choose(given: argparse.Namespace, seed: int) -> list[Point]:
    found = list(tiny_points(seed) if given.tiny else points(seed, combinations=given.combinations))
    if given.factors:
        unknown = set(given.factors) - {point.factor for point in found}
        if unknown:
            raise SystemExit(f"--factors: there is no {', '.join(sorted(unknown))}")
        found = [point for point in found if point.factor in given.factors]
    return found


def run(given: argparse.Namespace) -> int:
    seed = random.randrange(10**6) if given.seed is None else given.seed
    device = torch.device(given.device)
    card = card_at(torch.device("cuda:0")) if device.type == "cuda" else None
    budget = round(SHARE * card.memory) if card else 2**63
    facts = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": date.today().isoformat(),
        "seed": seed,
        "environment": describe_environment(device),
    }
    chosen = choose(given, seed)
    print(f"{len(chosen)} points, seed {seed}, {card.name if card else device}", flush=True)
    found = {outcome.point: outcome for outcome in predict_all(chosen, device.type, card, given.processes)}
    print(f"{sum(x.status == 'predicted' for x in found.values())} predicted", flush=True)
    least = 0 if given.tiny else GIB
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what there is, is reported
    try:
        write_files(given.out, list(found.values()), facts, least=least)
        for outcome in measure_all(found.values(), device.type, budget, given.concurrent or given.processes):
            found[outcome.point] = outcome
            print(describe(outcome), flush=True)
            write_files(given.out, list(found.values()), facts, least=least)
    finally:
        print_report(list(found.values()), least=least)
    return 0 if verdict(list(found.values()), least=least) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.memory.accuracy", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a few points of a small model, as for a CPU")
    parser.add_argument("--seed", type=int, help="of the random combinations; drawn, and printed, if not given")
    parser.add_argument("--combinations", type=int, default=20, help="how many of them")
    parser.add_argument("--factors", nargs="+", help="these alone: length, fp32, random, foreign, ...")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1),
                        help="that predict; 0: all in this one, also what is measured")  # fmt: skip
    parser.add_argument("--concurrent", type=int, default=0, help="processes that measure, at most; 0: as many")
    parser.add_argument("--out", type=Path, default=Path("memory-accuracy"), help="folder of the files")
    parser.add_argument(
        "--point", type=Point.from_json, help="measure this one alone, as JSON, once there is a line to read"
    )
    given = parser.parse_args()
    quieten()
    warnings.filterwarnings("ignore", message=".*have no `val_dataloader`")
    if given.point is not None:
        outcome = measured_here(Outcome(given.point, "predicted"), given.device, sys.stdin.readline)
        found = asdict(outcome)
        kept = ("status", "message", "measured", "reserved", "measured_phases")
        print("\n" + json.dumps({name: found[name] for name in kept}), flush=True)
        return 0 if outcome.status == "measured" else 1
    if given.processes == 0 and given.device == "cuda":
        parser.error("on a GPU each point needs a process of its own: give --processes from 1 on")
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
