"""LeakDetector: a leak is told soon and by name, healthy training is not."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_training import VOCABULARY, FakeAllocator, RecordingLogger, TinyModule, batches, trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, IterableDataset

from flash_train.diagnostics.in_use import AllocatorGauge, HostGauge
from flash_train.diagnostics.leaks import LeakDetector, _size_of
from flash_train.diagnostics.ledger import PeakLedger
from flash_train.diagnostics.trend import Growth, Trend

MIB = 2**20


class Cache(nn.Module):
    """Keeps a MiB of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach().mean() + torch.zeros(MIB // 4, device=x.device))
        return x


class Leaking(TinyModule):
    """With such a cache in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Cache())


class KeepingGraphs(TinyModule):
    """Keeps a number of each step for a plot, and with it all that its backward would need."""

    def __init__(self) -> None:
        super().__init__(width=256)
        self.numbers: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.numbers.append(self.net(batch["inputs"]).exp().mean())
        return super().training_step(batch, batch_idx)


class OfAnyLength(IterableDataset[Any]):
    """Batches of very different sizes."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        lengths = random.Random(5)
        while True:
            tokens = torch.randint(VOCABULARY, (lengths.randint(1, 5), lengths.randint(2, 150)))
            yield {"inputs": tokens, "targets": tokens}


def judge(size: Callable[[int], float], *, steps: int = 1000) -> Growth | None:
    """What Trend says of bytes by step, read at every fifth."""
    trend = Trend(least=64 * 1024)
    return next((found for step in range(10, steps, 5) if (found := trend.add(step, int(size(step))))), None)


def test_a_mebibyte_a_step_is_reported_within_100_steps(caplog: pytest.LogCaptureFixture) -> None:
    detector, logger = LeakDetector(), RecordingLogger()
    module = Leaking()
    trainer(detector, max_steps=100, logger=logger).fit(module, batches(100))
    leak = detector.result()["leak"]
    assert detector.result()["source"] == "malloc"
    assert leak["slope"] == pytest.approx(MIB, rel=0.02) and leak["since"] <= 12 and leak["step"] == 85
    assert leak["first_module"] == "net.1" and leak["out_of_memory_step"] > 85
    # Of two of the steps that were followed.
    (stayed,) = leak["stayed"]
    assert (stayed["bytes"], stayed["count"], stayed["shape"]) == (2 * MIB, 2, [MIB // 4])
    assert "Memory grows by 1.00 MiB a step since step 1" in caplog.text
    assert "; first in net.1: 2 x [262144] float32 (add.Tensor in net.1, 1.00 MiB a step)." in caplog.text
    assert logger.values_of("memory/growth_mib_per_step")[-1] == pytest.approx(1, rel=0.02)
    assert [step for step in range(100) if detector.disturbs_timing(step)] == [86, 87, 88, 89]
    assert not _get_current_dispatch_mode_stack() and not nn.modules.module._global_forward_hooks


def test_what_is_kept_by_a_graph_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    detector = LeakDetector(warmup_steps=2, every_n_steps=2)
    trainer(detector, max_steps=80, accumulate_grad_batches=2).fit(KeepingGraphs(), batches(160))
    leak = detector.result()["leak"]
    assert leak["first_module"] == "net.0" and "first in net.0" in caplog.text
    assert {each["module"] for each in leak["stayed"]} == {"net.0", "the training step"}


def test_a_thousand_steps_of_variable_lengths_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    detector = LeakDetector()
    trainer(detector, max_steps=1000).fit(TinyModule(), DataLoader(OfAnyLength(), batch_size=None))
    assert detector.result()["leak"] is None and "grows" not in caplog.text


def test_growth_is_dated_from_its_beginning() -> None:
    grown = judge(lambda step: 500 * MIB + 38 * MIB * max(0, step - 200))
    assert grown is not None
    assert (grown.slope, grown.since) == (38 * MIB, 200) and grown.step < 300


def test_slow_growth_under_noise_is_told_in_the_end() -> None:
    noise = random.Random(1)
    grown = judge(lambda step: 500 * MIB + step * MIB / 8 + noise.gauss(0, 3 * MIB), steps=4000)
    assert grown is not None and grown.slope == pytest.approx(MIB / 8, rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_noise_the_largest_so_far_and_what_levels_off_are_no_growth(seed: int) -> None:
    noise = random.Random(seed)
    largest = [0.0]

    def so_far(step: int) -> float:  # as a cache that is made anew for each longer sequence
        largest.append(max(largest[-1], *(noise.random() for _ in range(5))))
        return 500 * MIB * (1 + largest[-1] ** 2)

    assert judge(so_far) is None
    assert judge(lambda step: 500 * MIB + noise.gauss(0, 50 * MIB)) is None
    assert judge(lambda step: 500 * MIB + 200 * MIB * noise.random() ** 4) is None
    assert judge(lambda step: 500 * MIB - 300 * MIB * math.exp(-step / (30 + seed))) is None
    assert judge(lambda step: 500 * MIB * (1 + (step > 50) + (step > 400 + seed))) is None
    assert judge(lambda step: 500 * MIB + 60 * 1024 * step) is None  # less than `least`


def test_a_compiled_model_is_reported_and_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    detector, module = LeakDetector(), Leaking()
    module.net[2].compile(backend="eager")
    trainer(detector, max_steps=100).fit(module, batches(100))
    leak = detector.result()["leak"]
    assert leak["slope"] == pytest.approx(MIB, rel=0.02) and leak["first_module"] is None
    assert "the model is compiled, so that its tensors cannot be followed" in caplog.text


def test_an_error_in_its_own_code_ends_it_and_not_the_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostGauge, "read", lambda self: 1 // 0)
    run = trainer(LeakDetector(warmup_steps=0), max_steps=12)
    run.fit(TinyModule(), batches(12))
    assert run.global_step == 12 and "LeakDetector stopped measuring" in caplog.text


def test_on_an_accelerator_what_a_step_needs_for_a_moment_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    gauge = AllocatorGauge(PeakLedger(allocator), torch.device("cuda:0"))
    allocator.allocate(300)
    allocator.spike(200)  # 500 reserved
    assert gauge.read() == 300
    assert gauge.read() == 300
    free = 400
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    assert gauge.left() == 400 + 500 - 300 - 200
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.6, raising=False)
    assert gauge.left() == 100 + 500 - 300 - 200


def test_a_batch_is_left_out_as_the_allocator_counts_it() -> None:
    device = torch.device("meta")
    batch = {"tokens": torch.empty(65, dtype=torch.int64, device=device), "weights": [torch.empty(1, device=device)]}
    assert _size_of(batch | {"elsewhere": torch.empty(9)}, device) == 1024 + 512


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be a number of steps from 1 on, got 0: 5 is usual"),
        ({"warmup_steps": -1}, "warmup_steps must be a number of steps from 0 on, got -1: 10 is usual"),
        ({"least": "much"}, "least must be a size such as 24GiB, 80GB or a number of bytes, got 'much'"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LeakDetector(**wrong)


@pytest.mark.gpu
def test_on_a_gpu_the_allocators_bytes_tell(caplog: pytest.LogCaptureFixture) -> None:
    detector = LeakDetector()
    healthy = trainer(detector, accelerator="cuda", max_steps=1000)
    healthy.fit(TinyModule(width=256), DataLoader(OfAnyLength(), batch_size=None))
    assert detector.result() == {"source": "allocator", "growth_bytes_per_step": 0.0, "leak": None}
    trainer(detector, accelerator="cuda", max_steps=100).fit(Leaking(), batches(100))
    leak = detector.result()["leak"]
    assert leak["step"] < 100
    assert leak["slope"] == pytest.approx(MIB, rel=0.01) and leak["first_module"] == "net.1"
    assert leak["out_of_memory_step"] > 1000
