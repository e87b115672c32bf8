"""OOMExplainer: the right phase, module, tensor and advice; the exception as it was; nothing of the run is touched."""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doomed import SCORES, SGD, B, C, Doomed, H, T, V, say, tokens
from lightning.pytorch.loggers import WandbLogger
from tiny_training import trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train.diagnostics import incident as incidents
from flash_train.diagnostics import oom as oom_module
from flash_train.diagnostics.explanation import Explanation, counters_advice
from flash_train.diagnostics.incident import Counters, Incident, out_of_memory
from flash_train.diagnostics.oom import OOMExplainer
from flash_train.diagnostics.oom_output import as_text
from flash_train.diagnostics.probe import MemoryProbe
from flash_train.memory.cards import GIB, MIB

TEN = 10 * GIB
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def die(module: Doomed, folder: Path, *callbacks: Any, validate: bool = False, **settings: Any) -> OOMExplainer:
    """Trains until memory runs out, which it does as without the explainer."""
    explainer = OOMExplainer(folder=folder)
    loop = trainer(*callbacks, explainer, **settings)
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        loop.fit(module, tokens(), tokens() if validate else None)
    if isinstance(module.error, BaseException):
        error = caught.value
        assert error is module.error and error.__cause__ is None and error.__context__ is None and len(error.args) == 1
    return explainer


def known(explainer: OOMExplainer) -> Explanation:
    assert explainer.explanation is not None
    return explainer.explanation


def changes(explanation: Explanation) -> dict[str, Any]:
    return {advice.change: advice for advice in explanation.advice}


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_phase_module_and_tensor_are_named_and_the_exception_goes_on(phase: str, tmp_path: Path) -> None:
    size, shape = (4 * V * C, (V, C)) if phase == "optimizer" else (SCORES, (B, H, T, T))
    found = known(die(Doomed(phase, say(size)), tmp_path))
    assert (found.phase, found.step, found.basis, found.left_out) == (phase, 1, "prediction", ())
    assert found.moment is not None
    tensor = found.moment.tensor
    assert (tensor.shape, tensor.phase) == (shape, phase)
    if phase == "forward":
        assert (found.incident.module, tensor.module) == ("blocks.1.attention",) * 2
        assert found.moment.memory.culprits["score matrices"] >= SCORES * 2  # the first layer's, and these scores


def test_in_the_optimizers_step_only_what_helps_there_is_advised(tmp_path: Path) -> None:
    found = known(die(Doomed("optimizer", say(4 * V * C)), tmp_path))
    assert list(changes(found)) == ["a fused optimizer step"]
    sgd = known(die(Doomed("optimizer", say(4 * V * C), partial(SGD, momentum=0.9)), tmp_path))
    assert sgd.moment is None and sgd.parameters == ("embed.weight", "head.weight")
    assert "the size of the parameter embed.weight and 1 more: its optimizer state" in as_text(sgd)
    assert "No change that was tried takes anything off the optimizer's step" in as_text(sgd)


@pytest.mark.parametrize("sanity", [True, False])
def test_validation_is_a_step_of_its_own(sanity: bool, tmp_path: Path) -> None:
    module = Doomed("validation", say(SCORES))
    found = known(die(module, tmp_path, validate=True, num_sanity_val_steps=int(sanity)))
    assert found.phase == ("the sanity check" if sanity else "validation")
    assert found.moment is not None and found.moment.tensor.module == "blocks.1.attention"
    assert found.moment.memory.categories["activations"] == 0
    assert "validation on 2 rows instead of 4" in changes(found)
    assert not any("checkpointing" in change for change in changes(found))


def test_what_a_cpu_really_refuses_is_explained_to_the_byte(tmp_path: Path) -> None:
    found = known(die(Doomed("forward", 1 << 45), tmp_path))
    assert found.incident.requested == 1 << 45 and found.incident.tolerance == 0
    assert found.moment is not None and found.moment.tensor.shape == (1 << 45,)
    assert found.moment.tensor.module == "blocks.1.attention"
    assert "No change that was tried takes 1 % off; the largest is [35184372088832] uint8, empty" in as_text(found)


def test_advice_is_ranked_predicted_and_says_how(tmp_path: Path) -> None:
    found = known(die(Doomed("forward", say(SCORES)), tmp_path))
    by_name = changes(found)
    savings = [advice.saves for advice in found.advice]
    assert savings == sorted(savings, reverse=True)
    flash = by_name["flash attention in blocks.0.attention and 1 more"]
    # Of each layer the probabilities are kept; the rest of the peak is where the loss is.
    assert flash.basis == "modelled" and flash.saves == 2 * (SCORES - SCORES // T)
    assert by_name["2 rows instead of 4, 2 accumulated"].basis == "re-run"
    assert {"checkpointing of each block", "precision bf16-mixed"} <= set(by_name)
    assert all(advice.fits is None for advice in found.advice)  # nobody knows what a CPU has


def test_it_is_printed_and_written_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = known(die(Doomed("forward", say(SCORES)), tmp_path))
    printed = capsys.readouterr().out
    assert "Out of memory in the forward of step 1 (cpu)" in printed
    assert "768 KiB in the forward of blocks.1.attention, for [4, 3, 128, 128] float32, " in printed
    written = (tmp_path / "oom_rank0" / "report.txt").read_text()
    assert "flash attention in blocks.0.attention and 1 more" in written and "torch said: CUDA out" in written
    document = json.loads((tmp_path / "oom_rank0" / "report.json").read_text())
    assert document["advice"][0]["saves"] == found.advice[0].saves
    assert document["moment"]["tensor"]["module"] == "blocks.1.attention"
    assert len(printed.splitlines()) < 40


def test_a_wandb_logger_gets_the_folder_as_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    class Run:
        def log_artifact(self, path: str, **kwargs: Any) -> None:
            got.append((sorted(file.name for file in Path(path).iterdir()), kwargs))

    class Logger(WandbLogger):
        def __init__(self) -> None: ...

        name = version = property(lambda self: "abc")  # pyright: ignore
        save_dir = property(lambda self: str(tmp_path))  # pyright: ignore
        experiment = property(lambda self: Run())  # pyright: ignore
        log_metrics = log_hyperparams = log_graph = finalize = save = after_save_checkpoint = lambda *_, **__: None

    die(Doomed("forward", say(SCORES)), tmp_path, logger=Logger())
    assert got == [(["report.json", "report.txt"], {"name": "out-of-memory-abc", "type": "out-of-memory"})]


def test_a_step_that_cannot_be_faked_is_explained_by_the_probed_one(tmp_path: Path) -> None:
    class Reading(Doomed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch.sum().item() >= 0  # a whole number, which fake tensors have not
            return super().training_step(batch, batch_idx)

    found = known(die(Reading("forward", say(SCORES)), tmp_path, MemoryProbe(step=0, folder=tmp_path)))
    assert found.basis == "profiler" and found.moment is not None
    assert found.moment.tensor.module == "blocks.1.attention"
    assert [advice.basis for advice in found.advice] == ["modelled"] * len(found.advice) and found.advice
    assert found.left_out[0].startswith("the step could not be taken on fake tensors: training_step must not depend")


def test_a_healthy_run_is_told_the_same_where_its_step_is_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = MemoryProbe(step=1, advice=True)
    torch.manual_seed(7)
    module = Doomed()
    trainer(probe).fit(module, tokens())
    assert probe.advisory is not None and probe.breakdown is not None
    predicted, probed = probe.advisory.breakdown.peak, probe.breakdown.peak
    assert predicted.measured == pytest.approx(probed.measured, abs=64)
    for culprit in ("logits and their loss", "score matrices", "optimizer state"):
        assert predicted.culprits[culprit] == probed.culprits[culprit]
    flash = next(advice for advice in probe.advisory.advice if advice.change.startswith("flash"))
    assert probe.breakdown.flash_saves is not None and flash.saves == probe.breakdown.flash_saves.peak
    printed = capsys.readouterr().out
    assert "Most of the peak: logits and their loss" in printed and "what to change, best first" in printed


def test_other_exceptions_are_none_of_its_business(tmp_path: Path) -> None:
    assert die(Doomed("forward", RuntimeError("shapes do not match")), tmp_path).explanation is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["explain", "_release", "incident_of"])
def test_a_fault_of_its_own_is_logged_and_the_exception_is_the_runs(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise AttributeError("of our own")

    monkeypatch.setattr(OOMExplainer if fault == "_release" else oom_module, fault, broken)
    die(Doomed("forward", say(SCORES)), tmp_path)
    assert "OOMExplainer failed" in caplog.text and "of our own" in caplog.text


def test_a_step_that_waits_for_others_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(oom_module, "explain", lambda *_, **__: let_go.wait(30))
    monkeypatch.setattr(oom_module, "PATIENCE", 0.001)
    die(Doomed("forward", say(SCORES)), tmp_path)
    let_go.set()
    assert "was not ready after" in caplog.text


def test_the_observer_runs_no_operation_and_swallows_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    statistics = {
        name: {"all": {"current": size}} for name, size in (("allocated_bytes", TEN), ("reserved_bytes", TEN))
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: statistics)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"total_memory": 2 * TEN}))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": []})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    explainer, module, other = OOMExplainer(), Doomed(), nn.Linear(1, 1)
    explainer._names = {id(module.blocks[1].mix): "blocks.1.mix"}

    def forward(self: Any) -> None:
        incidents._observe(0, GIB, TEN, GIB)  # as the allocator calls it, from wherever it was asked

    try:
        incidents.listen(lambda *_: 1 / 0)
        incidents.listen(explainer._on_out_of_memory)
        with Watching():
            forward(module.blocks[1].mix)
        incident = explainer._incident
        forward(other)
        assert explainer._incident is not incident and explainer._incident.module is None  # pyright: ignore
        incidents._observe(1, GIB, TEN, GIB)
        assert explainer._incident.counters == incident.counters  # pyright: ignore
    finally:
        incidents._listeners.clear()
    assert ran == [] and incident is not None and incident.module == "blocks.1.mix"
    assert incident.counters == Counters(allocated=TEN, reserved=TEN, limit=TEN, free=GIB, total=2 * TEN, retries=0)
    assert explainer._snapshot == {"segments": []}


def test_a_request_is_matched_as_the_allocator_rounds() -> None:
    def asked(requested: int, tolerance: int = 0) -> Any:
        return Incident(requested, tolerance, None, "", None).asked_for

    assert asked(2 * MIB)(700) and asked(20 * MIB)(3 * MIB) and asked(32 * MIB)(31 * MIB) and asked(1536)(1030)
    assert not asked(32 * MIB)(29 * MIB) and not asked(20 * MIB)(12 * MIB)
    assert asked(GIB + 4 * MIB, 5 * MIB)(GIB)  # a message has two decimals


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("HIP out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (KeyboardInterrupt(), False),
        (RuntimeError(7), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors_also_behind_them(error: BaseException, is_one: bool) -> None:
    assert (out_of_memory(error) is error) == is_one
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert (out_of_memory(wrapped) is error) == is_one


def test_fragmentation_and_other_processes_are_advice_where_they_are_the_reason() -> None:
    def advice(allocated: int, reserved: int, free: int, before: int | None = None) -> list[str]:
        counters = Counters(allocated, reserved, limit=20 * GIB, free=free, total=20 * GIB, retries=0)
        return [each.change for each in counters_advice(Incident(GIB, 0, None, "", counters), before)]

    assert advice(18 * GIB, 19 * GIB + GIB // 2, GIB // 8) == []  # 1.5 GiB unused of 19.5: less than a tenth
    assert advice(15 * GIB, 19 * GIB, GIB // 2) == ["expandable segments"]
    assert advice(10 * GIB, 10 * GIB, GIB // 2) == ["other processes off this GPU"]
    assert advice(10 * GIB, 10 * GIB, GIB // 2, before=9 * GIB) == []  # they were there before
    assert advice(10 * GIB, 10 * GIB, GIB // 2, before=GIB) == ["what came onto this GPU since this run"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"folder": 3}, TypeError, "folder must be a path or None, got int: give a string"),
        ({"history": -1}, ValueError, "history must be a number of allocations from 0 on, got -1"),
        ({"seconds": 0}, ValueError, "seconds must be a positive number, got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        OOMExplainer(**arguments)
