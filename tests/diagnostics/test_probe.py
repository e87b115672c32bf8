"""MemoryProbe and probe_memory: exact bytes, nothing hidden, nothing disturbed."""

import csv
import json
import logging
import weakref
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from tiny_training import VOCABULARY, RecordingLogger, TinyModule, ValidatedModule, batches, trainer
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset

from flash_train.diagnostics import probe as probe_module
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.probe import MemoryProbe, probe_memory
from flash_train.diagnostics.probe_output import findings, print_breakdown
from flash_train.memory.attribution import Breakdown
from flash_train.memory.live import CATEGORIES
from flash_train.models.gpt import GPT

ROWS, WIDTH, OUT = 32, 257, 61
FP32 = 4


def linear() -> tuple[nn.Linear, Any]:
    model = nn.Linear(WIDTH, OUT, bias=False)
    return model, lambda x: model(x).square().mean()


def cross_entropy_of(model: nn.Module) -> Any:
    return lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


class Watching(TinyModule):
    """Notes in which steps anything looked on, and how."""

    def __init__(self) -> None:
        super().__init__(during=self._look)
        self.seen: dict[int, set[bool]] = {}

    def _look(self, where: str) -> None:
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        self.seen.setdefault(step, set()).add(not nothing_looks_on())


def nothing_looks_on() -> bool:
    hooks = nn.modules.module._global_forward_pre_hooks or nn.modules.module._global_forward_hooks
    modes = _get_current_dispatch_mode_stack() or _get_current_function_mode_stack()
    return not (modes or hooks or torch.autograd.profiler._is_profiler_enabled)


def test_bytes_of_a_step_are_exact() -> None:
    model, loss = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(ROWS, WIDTH)
    probed = probe_memory(model, x, loss=loss, optimizer=optimizer)
    weights, outputs = FP32 * WIDTH * OUT, FP32 * ROWS * OUT
    state = 2 * weights + FP32  # two moments, and the number of steps
    assert probed.source == "profiler" and list(probed.phases) == ["forward", "backward", "optimizer"]
    # The gradients of the step before are there; at the peak live the outputs, their squares and the mean.
    assert probed.phases["forward"].categories == {
        "parameters": weights,
        "gradients": weights,
        "optimizer state": state,
        "activations": outputs + FP32,
        "inputs": FP32 * ROWS * WIDTH,
        "workspaces": 0,
        "temporaries": outputs,
    }
    assert all(0 <= phase.untracked < 64 for phase in probed.phases.values())  # scalars that operators make inside
    largest = probed.phases["forward"].tensors[0]
    assert (largest.size, largest.count, largest.shape, largest.dtype) == (2 * weights, 2, (OUT, WIDTH), "float32")


@dataclass
class Wrapped:
    x: Tensor
    more: Any


@pytest.mark.parametrize("wrap", [lambda x: Wrapped(x, iter("ab")), lambda x: UserDict(x=x, more=iter("ab"))])
def test_a_batch_of_any_kind_is_counted_once_and_never_used_up(wrap: Any) -> None:
    model, loss = linear()
    batch = wrap(torch.ones(ROWS, WIDTH))
    probed = probe_memory(model, batch, loss=lambda b: loss(b.x if isinstance(b, Wrapped) else b["x"]))
    assert probed.peak.categories["inputs"] == FP32 * ROWS * WIDTH and 0 <= probed.peak.untracked < 64
    assert list(batch.more if isinstance(batch, Wrapped) else batch["more"]) == ["a", "b"]


def test_every_byte_is_in_a_category_a_module_and_a_tensor_and_the_rest_is_untracked() -> None:
    model = GPT(vocabulary_size=11, context_length=37, width=24, depth=2, heads=2, implementation="flash")
    tokens = torch.randint(11, (3, 37))
    probed = probe_memory(
        model, tokens, loss=lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    )
    for phase in probed.phases.values():
        assert sum(phase.categories.values()) == sum(phase.modules.values()) == phase.tracked
        assert sum(tensor.size for tensor in phase.tensors) == phase.tracked
        assert phase.tracked + phase.untracked == phase.measured
    # What our operator takes inside itself no tracker sees, and the allocator does.
    assert probed.phases["backward"].untracked > 0
    written = Console(record=True, width=100)
    print_breakdown(probed, written)
    assert "untracked" in written.export_text()


def test_parameters_gradients_and_state_belong_to_their_modules() -> None:
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    probed = probe_memory(model, torch.ones(3, 5), loss=lambda x: model(x).mean(), optimizer=optimizer)
    modules = probed.phases["optimizer"].modules
    assert (modules["0"], modules["2"]) == (3 * FP32 * 5 * 7, 3 * FP32 * 7)


def test_what_the_backward_makes_belongs_to_the_module_whose_forward_it_undoes() -> None:
    class Head(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + torch.zeros(1))

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return torch.cat([2 * x * grads[0]] * 9)[: len(x)]  # large, so that here is the peak

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Square.apply(torch.tanh(x))

    model = nn.Sequential(nn.Linear(5, 701), nn.GELU(), Custom(), Head(701, 1))
    probed = probe_memory(model, torch.ones(37, 5), loss=lambda x: model(x).mean())
    made = {tensor.operation: tensor.module for tensor in probed.phases["backward"].tensors}
    assert (made["aten.cat.default"], made["aten.mm.default"]) == ("2", "3"), made


def test_another_profiler_leaves_the_tracker_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, loss = linear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        probed = probe_memory(model, torch.ones(ROWS, WIDTH), loss=loss)
    assert probed.source == "tracker" and probed.peak.untracked == 0
    assert any("nothing but the tracker measured" in line for line in findings(probed))


def test_a_run_is_probed_logged_and_written_once(tmp_path: Path) -> None:
    recording = RecordingLogger()
    probe = MemoryProbe(step=2, folder=tmp_path / "run")
    loggers = [CSVLogger(tmp_path), recording]
    trainer(probe, max_steps=6, logger=loggers).fit(TinyModule(), batches(6))
    assert probe.breakdown is not None and probe.breakdown.step == 2
    assert recording.steps_of("memory/probe/peak_gib") == [2]
    (peak,) = recording.values_of("memory/probe/peak_gib")
    parts = (*(name.replace(" ", "_") for name in CATEGORIES), "untracked")
    assert peak == pytest.approx(sum(recording.values_of(f"memory/probe/{part}_gib")[0] for part in parts))
    assert peak * 2**30 == probe.breakdown.peak.measured
    document = json.loads((tmp_path / "run" / "memory_probe.json").read_text())
    assert document["peak_bytes"] == probe.breakdown.peak.measured and "untracked" in document["phases"]["forward"]
    assert (tmp_path / "run" / "memory_probe.png").read_bytes().startswith(b"\x89PNG")
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["memory/probe/untracked_gib"]] == ["2"]


def test_without_a_folder_files_go_where_the_logger_writes_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(MemoryProbe(step=1)).fit(TinyModule(), batches(4))
    assert list(tmp_path.iterdir()) == []
    logs = CSVLogger(tmp_path)
    trainer(MemoryProbe(step=1), logger=logs).fit(TinyModule(), batches(4))
    assert (Path(logs.log_dir) / "memory_probe.json").exists()


def test_only_the_probed_step_is_watched() -> None:
    module = Watching()
    probe = MemoryProbe(step=2)
    trainer(probe, max_steps=5).fit(module, batches(5))
    assert module.seen == {0: {False}, 1: {True}, 2: {True}, 3: {False}, 4: {False}}  # the profiler in step 1
    assert nothing_looks_on()
    # Nor does the death of a tensor that was probed call anybody.
    assert all(weakref.getweakrefcount(weight.untyped_storage()) == 0 for weight in module.parameters())


def test_the_two_steps_that_a_cpu_probe_slows_are_named() -> None:
    disturbed: list[int] = []

    class Asking(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if probe.disturbs_timing(batch_idx):
                disturbed.append(batch_idx)

    probe = MemoryProbe(step=2)
    trainer(probe, max_steps=5).fit(Asking(), batches(5))
    assert disturbed == [1, 2]


def test_a_probed_run_learns_what_an_unprobed_one_learns() -> None:
    def weights(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(7)
        module = TinyModule()
        trainer(*callbacks).fit(module, batches(4))
        return list(module.parameters())

    for probed, plain in zip(weights(MemoryProbe(step=1)), weights(), strict=True):
        assert torch.equal(probed, plain)


def test_all_micro_batches_of_a_step_are_probed_and_validation_between_them_is_not() -> None:
    probe = MemoryProbe(step=1)
    recording = RecordingLogger()
    module = ValidatedModule()
    trainer(probe, max_steps=3, accumulate_grad_batches=3, val_check_interval=4, logger=recording).fit(
        module, batches(9), batches(2)
    )
    probed = probe.breakdown
    assert probed is not None and list(probed.phases) == ["forward", "backward", "optimizer"]
    weights = sum(p.nbytes for p in module.parameters())
    # Of the second and third micro-batch, the gradients of the first are there throughout.
    assert probed.phases["forward"].categories["gradients"] == weights
    assert probed.phases["backward"].categories["gradients"] >= weights / 2
    assert abs(probed.phases["backward"].untracked) < 0.02 * probed.phases["backward"].measured


def test_the_data_set_that_micro_batches_are_cut_from_is_no_part_of_the_step() -> None:
    probe, tokens = MemoryProbe(step=1), torch.randint(VOCABULARY, (1000, 8))
    trainer(probe, max_steps=3, accumulate_grad_batches=3).fit(TinyModule(), DataLoader(Rows(tokens), batch_size=2))
    assert probe.breakdown is not None
    for phase in probe.breakdown.phases.values():
        assert 0 <= phase.untracked < 1000 < tokens.nbytes


@pytest.mark.parametrize("touch", [lambda x: x[1:], lambda x: x.add_(1)], ids=["view", "in place"])
def test_what_was_there_before_and_is_nobody_s_is_no_part_of_a_cpu_step(touch: Any) -> None:
    (model, loss), older = linear(), torch.ones(100_000)
    probed = probe_memory(model, torch.ones(ROWS, WIDTH), loss=lambda x: loss(x) + touch(older)[0])
    assert all(0 <= phase.untracked < 64 for phase in probed.phases.values())


class Rows(Dataset[Any]):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.tokens[index], "targets": self.tokens[index]}


def test_a_folder_that_cannot_be_written_costs_the_files_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    probe, recording = MemoryProbe(step=1, folder=tmp_path / "file" / "folder"), RecordingLogger()
    with caplog.at_level(logging.WARNING):
        trainer(probe, max_steps=3, logger=recording).fit(TinyModule(), batches(3))
    assert "The probe's files could not be written" in caplog.text and "stopped measuring" not in caplog.text
    assert any("memory/probe/peak_gib" in metrics for _, metrics in recording.calls)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_probed_eagerly_says_so_and_stays_compiled(in_place: bool) -> None:
    compiled: list[int] = []
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)

        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    class Net(nn.Sequential):  # torch compiles no frame of its own containers in place
        def forward(self, input: Tensor) -> Tensor:
            return self[1](self[0](input))

    module = TinyModule()
    module.net = Net(*module.net)
    if in_place:
        module.net.compile(backend=backend)
    else:
        module.net = torch.compile(module.net, backend=backend)  # pyright: ignore
    probe = MemoryProbe(step=2)
    trainer(probe, max_steps=5).fit(module, batches(5))
    probed = probe.breakdown
    assert probed is not None and probed.compiled and any("uncompiled" in line for line in probed.notes)
    assert "net.1" in probed.phases["forward"].modules and not any("_orig" in x for x in probed.peak.modules)
    assert len(compiled) == 1 and len(ran) == 4


def test_manual_optimization_is_one_phase_and_is_not_predicted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Manual(TinyModule):
        def __init__(self) -> None:
            super().__init__(width=1009)  # weights, and what belongs to them, are most of it
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    probe = MemoryProbe(step=1, advice=True)
    trainer(probe).fit(Manual(), batches(4))
    assert probe.breakdown is not None and list(probe.breakdown.phases) == ["step"]
    parts = probe.breakdown.peak.categories
    assert parts["gradients"] > 0, parts  # which are gone when the batch ends
    said = capsys.readouterr().out
    assert "Not predicted: the step could not be taken on fake tensors: module must leave optimization to" in said
    assert probe.advisory is not None and probe.advisory.breakdown is probe.breakdown
    assert "stopped measuring" not in caplog.text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_step_of_nested_tensors_is_probed() -> None:
    class Ragged(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
            return self.loss(batch) + rows.to_padded_tensor(0.0).sum()

    probe = MemoryProbe(step=1)
    trainer(probe).fit(Ragged(), batches(4))
    assert probe.breakdown is not None and probe.breakdown.peak.measured > 0


def test_an_exception_in_the_probed_step_leaves_everything_as_it_was() -> None:
    class Failing(TinyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2 and self.failing:
                raise RuntimeError("of the user's own")
            return super().training_step(batch, batch_idx)

        failing = True

    module, probe = Failing(), MemoryProbe(step=2)
    with pytest.raises(RuntimeError, match="of the user's own"):
        trainer(probe).fit(module, batches(4))
    assert nothing_looks_on() and probe.breakdown is None and probe.result() is None
    module.failing = False
    trainer(probe).fit(module, batches(4))
    assert probe.breakdown is not None and probe.breakdown.source == "profiler"


def test_an_exception_in_a_probed_function_leaves_everything_as_it_was() -> None:
    model, _ = linear()

    def loss(x: Tensor) -> Tensor:
        raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        probe_memory(model, torch.ones(ROWS, WIDTH), loss=loss, warmup=0)
    assert nothing_looks_on()


def test_a_failure_of_the_probe_ends_the_probe_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise AttributeError("of our own")

    monkeypatch.setattr("flash_train.memory.scores.ScoreFinder.observe", broken)
    module, probe = TinyModule(), MemoryProbe(step=1)
    running = trainer(probe)
    running.fit(module, batches(4))
    assert running.global_step == 4 and probe.breakdown is None and nothing_looks_on()
    assert "training goes on" in caplog.text and "of our own" in caplog.text


def test_beside_the_monitor_both_measure_in_their_own_steps() -> None:
    probe, monitor = MemoryProbe(), MemoryMonitor()
    trainer(probe, monitor, max_steps=6).fit(TinyModule(), batches(6))
    assert probe.breakdown is not None and (probe.breakdown.step, probe.breakdown.source) == (4, "profiler")
    assert monitor.result()["peak_allocated_bytes"] > 0


def test_where_the_monitor_measures_the_probe_gives_way() -> None:
    probe, monitor = MemoryProbe(step=2), MemoryMonitor(probe_step=2)
    trainer(probe, monitor).fit(TinyModule(), batches(4))
    assert probe.breakdown is not None and probe.breakdown.source == "tracker"
    assert monitor.result()["source"] == "profiler" and monitor.result()["peak_allocated_bytes"] > 0


def test_a_short_run_is_probed_in_its_last_step() -> None:
    probe = MemoryProbe(step=50)
    trainer(probe, max_steps=3).fit(TinyModule(), batches(3))
    assert probe.breakdown is not None and probe.breakdown.step == 2


def test_training_that_ends_before_the_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Stopping(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = True

    with caplog.at_level(logging.WARNING):
        trainer(MemoryProbe(step=3)).fit(Stopping(), batches(4))
    assert "No step was probed" in caplog.text


def test_the_sentences_name_the_modules_the_bytes_and_what_flash_saves() -> None:
    model = GPT(vocabulary_size=11, context_length=64, width=24, depth=2, heads=2, implementation="naive")
    tokens = torch.randint(11, (3, 64))
    probed = probe_memory(
        model, tokens, loss=lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    )
    first, second, *_ = findings(probed)  # 2 x 96 KiB, less 2 x 1.5 KiB of log-sum-exp
    assert first.startswith("Score matrices in blocks.0.attention and 1 more: [3, 2, 64, 64] float32, 96.00 KiB saved")
    assert second.startswith(
        "Flash attention would save 189.00 KiB of what is saved for the backward"
    )  # 192 - 3 of LSE


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"module": nn.Linear}, TypeError, "module must be an nn.Module, got type: give the module, not its class"),
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer must be a torch.optim.Optimizer or None, got type"),
        ({"optimizer": torch.optim.LBFGS([torch.ones(1)])}, ValueError, "and LBFGS takes as many as it likes"),
        ({"module": nn.Linear(1, 1, device="meta")}, ValueError, "and Linear is on meta: predict_peak takes it"),
        ({"warmup": -1}, ValueError, "warmup must be a number of steps from 0 on, got -1"),
        ({"loss": None}, ValueError, "Linear has no training_step: give loss=lambda batch: ..."),
        ({"loss": lambda x: x}, ValueError, r"got a tensor of shape \[32, 257\] without a gradient"),
        ({"loss": lambda x: 1.0}, ValueError, "loss must give one number with a gradient, got float"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    model, loss = linear()
    call = {"module": model, "loss": loss} | arguments
    with pytest.raises(error, match=text):
        probe_memory(call.pop("module"), torch.ones(ROWS, WIDTH), **call)
    assert nothing_looks_on()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"step": -1}, ValueError, "step counts steps from 0, got -1: leave it out for the fifth step"),
        ({"step": 1.5}, ValueError, "step counts steps from 0, got 1.5"),
        ({"folder": 3}, TypeError, "folder must be a path or None, got int"),
    ],
)
def test_callbacks_arguments_that_make_no_sense_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MemoryProbe(**arguments)


def test_the_documented_example_runs() -> None:
    import doctest

    answer = doctest.testmod(probe_module)
    assert answer.attempted >= 4 and answer.failed == 0


@pytest.mark.gpu
def test_on_a_gpu_the_allocators_peak_is_explained_but_for_workspaces() -> None:
    others = torch.cuda.memory_allocated()
    model = GPT(vocabulary_size=256, context_length=512, width=256, depth=2, heads=4, implementation="naive").cuda()
    tokens = torch.randint(256, (4, 512), device="cuda")

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())

    probed: Breakdown = probe_memory(model, tokens, loss=loss, optimizer=torch.optim.AdamW(model.parameters()))
    assert probed.source == "allocator" and len(probed.score_matrices) == 2
    for phase in probed.phases.values():
        assert (
            -(2**21) < phase.untracked - others < 96 * 2**20
        )  # two cuBLAS workspaces of 32 MiB, and what operators take
    assert nothing_looks_on()
