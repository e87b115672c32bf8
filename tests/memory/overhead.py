"""What the monitors cost of a training step's time: `python -m tests.memory.overhead --help`.

One model trains in turns with the monitors and without, in one process; every second pair begins with the other.
A run's time is the device's own from the end of a step to that of the last, log steps among them, and nobody waits in
between. The exit code is 1 where the median of the pairs costs more than `--bound` per cent.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from flash_train.commands.environment import describe_environment
from flash_train.commands.run import quieten
from flash_train.diagnostics.leaks import LeakDetector
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.oom import OOMExplainer
from flash_train.diagnostics.speed import SpeedMonitor
from flash_train.models.gpt import GPT
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw

WARM_UP = 5
"""Steps of a run that are not timed; on a CPU MemoryMonitor follows two of them."""
LOG_EVERY = 10


@dataclass(frozen=True)
class Setting:
    """A model, its micro-batch, and how the two arms alternate."""

    sizes: dict[str, Any]
    vocabulary: int
    rows: int
    length: int
    precision: str
    steps: int
    """Timed, in a run."""


GPT2 = Setting({"width": 768, "depth": 12, "heads": 12}, 50304, 16, 1024, "bf16-mixed", 30)
TINY = Setting({"width": 32, "depth": 1, "heads": 2}, 101, 2, 32, "32-true", 10)


class Clock(lightning.Callback):
    """Seconds a step, after the first `WARM_UP`."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step not in (WARM_UP, trainer.max_steps):
            return
        if pl_module.device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, steps: int) -> float:
        begin, end = self._marks
        if isinstance(begin, float):
            return (end - begin) / steps
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps


def monitors(folder: Path) -> list[lightning.Callback]:
    return [MemoryMonitor(), SpeedMonitor(), OOMExplainer(folder=folder), LeakDetector()]


def seconds_a_step(module: LanguageModel, setting: Setting, device: str, callbacks: list[Any]) -> float:
    """Of one run."""
    clock, steps = Clock(), WARM_UP + setting.steps
    trainer = lightning.Trainer(
        accelerator=device, devices=1, max_steps=steps, precision=setting.precision,  # pyright: ignore
        callbacks=[*callbacks, clock], logger=DummyLogger(), log_every_n_steps=LOG_EVERY, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(setting.vocabulary, (setting.rows, setting.length))
    batches: Any = [{"inputs": tokens, "targets": tokens}] * steps
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return clock.seconds(setting.steps)


def compare(setting: Setting, device: str, pairs: int) -> list[tuple[float, float]]:
    """(without, with) the monitors, seconds a step, after a run of either that does not count."""
    model = GPT(vocabulary_size=setting.vocabulary, context_length=setting.length, **setting.sizes)
    module = LanguageModel(model, optimizer=partial(adamw, lr=1e-4))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(-1, pairs):
            times = {}
            for watched in (False, True) if pair % 2 else (True, False):
                callbacks = monitors(Path(folder)) if watched else []
                times[watched] = seconds_a_step(module, setting, device, callbacks)
            if pair >= 0:
                found.append((times[False], times[True]))
                print(f"{1e3 * times[False]:.3f} ms, with monitors {1e3 * times[True]:.3f}", flush=True)
    return found


def summary(found: list[tuple[float, float]]) -> dict[str, float]:
    """What the monitors cost, in per cent: median and quartiles of the pairs; and the step without them, in ms."""
    costs = [100 * (watched / plain - 1) for plain, watched in found]
    low, middle, high = statistics.quantiles(costs, n=4, method="inclusive")
    step = 1e3 * statistics.median(plain for plain, _ in found)
    return {"cost_percent": middle, "lower_quartile": low, "upper_quartile": high, "step_ms": step, "pairs": len(found)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.memory.overhead", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model, as for a CPU")
    parser.add_argument("--pairs", type=int, default=10, help="of runs, from 2 on")
    parser.add_argument("--bound", type=float, default=0.5, help="per cent that the monitors may cost")
    parser.add_argument("--out", type=Path, default=Path("memory-overhead.json"))
    given = parser.parse_args()
    quieten()
    warnings.filterwarnings("ignore", message=".*have no `val_dataloader`")
    torch.manual_seed(0)
    found = compare(TINY if given.tiny else GPT2, given.device, given.pairs)
    result = summary(found)
    facts = {"seconds": found, "environment": describe_environment(torch.device(given.device))}
    given.out.write_text(json.dumps(result | facts, indent=1) + "\n")
    print(
        f"the monitors cost {result['cost_percent']:+.2f} % of a {result['step_ms']:.2f} ms step, the median of "
        f"{len(found)} pairs (quartiles {result['lower_quartile']:+.2f} and {result['upper_quartile']:+.2f} %); "
        f"{given.bound:g} % are allowed"
    )
    return 0 if result["cost_percent"] <= given.bound else 1


if __name__ == "__main__":
    sys.exit(main())
