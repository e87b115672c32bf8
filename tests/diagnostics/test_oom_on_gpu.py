"""A GPU's memory really runs out, in each phase: the explanation is right, and the best advice keeps its word.

What other processes take meanwhile would be part of an explanation, and one test takes all: each has the GPU to itself.
"""

import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tiny_training import trainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from flash_train.diagnostics.explanation import Explanation
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.oom import OOMExplainer
from flash_train.memory.cards import Card
from flash_train.memory.predict import Prediction, Predictor, predict_peak
from flash_train.models.gpt import GPT
from flash_train.ops.cross_entropy import chunked_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]

V, T, ROWS = 50304, 2048, 4


class Trained(pl.LightningModule):
    """A GPT, with whatever an advice asks for."""

    def __init__(
        self, *, implementation: str = "naive", checkpointing: str = "none", chunked: bool = False, fused: bool = False,
        width: int = 512, depth: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        self.chunked, self.fused = chunked, fused
        self.model = GPT(vocabulary_size=V, context_length=T, width=width, depth=depth, heads=8, positions="rotary",
                         implementation=implementation, checkpointing=checkpointing)  # fmt: skip
        self.hidden: Tensor | None = None
        if chunked:
            self.model.final_norm.register_forward_hook(self._keep)
            # What the head would make of all rows, nobody asks for.
            self.model.final_norm.register_forward_hook(lambda module, inputs, output: output[:, :1])

    def _keep(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.hidden = output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch)
        if not self.chunked:
            return cross_entropy(logits.flatten(0, 1).float(), batch.flatten())
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        head = self.model.token_embedding if self.model.head is None else self.model.head
        return chunked_cross_entropy(hidden, head.weight, batch)  # pyright: ignore[reportArgumentType]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True if self.fused else None)


class Counting(pl.Callback):
    """How many blocks the allocator had given out when the exception came by here."""

    given: int = 0

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.given = torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.fixture(autouse=True)
def whole_gpu() -> Iterator[None]:
    clean()
    yield
    clean()


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def card() -> Card:
    properties = torch.cuda.get_device_properties(0)
    return Card("", properties.total_memory, (properties.major, properties.minor))


def tokens(rows: int, batches: int = 2) -> Any:
    return DataLoader(torch.randint(V, (batches * rows, T)), batch_size=rows)  # pyright: ignore[reportArgumentType]


def limit_to(size: int) -> None:
    """`size` bytes beyond what others have."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + size) / total)


def fit(
    *callbacks: pl.Callback, rows: int = ROWS, accumulate: int = 1, precision: Any = "bf16-mixed",
    validation_rows: int = 0, **settings: Any,
) -> dict[str, int]:  # fmt: skip
    """Trains for two steps, then validates; bytes at the most in each phase."""
    others, monitor = torch.cuda.memory_allocated(), MemoryMonitor()
    settings_of_run: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": accumulate, "max_steps": 2}
    run = trainer(*callbacks, monitor, accelerator="cuda", **settings_of_run)
    module = Trained(**settings)
    run.fit(module, tokens(rows, 2 * accumulate), tokens(validation_rows) if validation_rows else None)
    return {phase: size - others for phase, size in monitor.result()["phases"].items() if size}


def batch(rows: int) -> Tensor:
    return torch.empty(rows, T, dtype=torch.int64, device="meta")


def predicted(rows: int = ROWS, **settings: Any) -> Prediction:
    return predict_peak(Trained(**settings), batch(rows), precision="bf16-mixed", card=card())


def die(folder: Path, limit: int, *callbacks: pl.Callback, **settings: Any) -> Explanation:
    explainer, before, after = OOMExplainer(folder=folder), Counting(), Counting()
    limit_to(limit)
    with pytest.raises(torch.OutOfMemoryError):
        fit(*callbacks, before, explainer, after, **settings)
    found = explainer.explanation
    assert found is not None and found.basis == "prediction" and found.incident.counters is not None
    assert before.given == after.given > 0  # nothing was allocated to explain it
    assert "segments" in pickle.loads((folder / "oom_rank0" / "snapshot.pickle").read_bytes())
    clean()
    return found


def applied(change: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in change.split(" + "):
        if part.startswith("flash attention"):
            settings["implementation"] = "flash"
        elif part.startswith("cross-entropy"):
            settings["chunked"] = True
        elif part.startswith("checkpointing"):
            settings["checkpointing"] = "block"
        elif part.startswith("a fused"):
            settings["fused"] = True
        elif part.startswith("precision"):
            settings["precision"] = part.split()[1]
        elif part.startswith("validation on"):
            settings["validation_rows"] = int(part.split()[2])
        else:
            rows, _, _, _, _, accumulated, _ = part.replace(",", "").replace("rows", "row").split()
            settings |= {"rows": int(rows), "accumulate": int(accumulated)}
    return settings


def confirm(found: Explanation, limit: int, phase: str | None = None, **settings: Any) -> None:
    """The best advice, applied, fits the limit, and saves what it said: of the step's peak, or of that of `phase`."""
    best = found.advice[0]
    assert best.fits, found.advice
    before = fit(**settings)
    clean()
    limit_to(limit)
    after = fit(**settings | applied(best.change))
    phases = before if phase is None else [phase]
    saved = max(before[name] for name in phases) - max(after[name] for name in phases)
    print(f"\n{best.change}: {best.saves / 2**30:.2f} GiB less predicted, {saved / 2**30:.2f} measured")
    assert best.saves == pytest.approx(saved, rel=0.1), (best.change, before, after)


@pytest.mark.parametrize(
    ("phase", "settings"),
    [("forward", {"rows": ROWS}), ("backward", {"rows": 8, "width": 256, "depth": 1})],  # its peaks are far apart
)
def test_the_phase_and_the_tensor_are_right_and_the_best_advice_fits_and_saves_what_it_says(
    phase: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    prediction = predicted(**settings)
    forward, backward = (prediction.phases[name].size for name in ("forward", "backward"))
    limit = round(0.6 * forward) if phase == "forward" else (forward + backward) // 2
    found = die(tmp_path, limit, **settings)
    assert found.phase == phase and found.moment is not None
    assert found.moment.tensor.phase == phase
    assert found.moment.tensor.culprit in ("score matrices", "logits and their loss")
    # Known but for cuBLAS's workspaces, and what the first step has not yet, gradients and state.
    assert found.incident.counters is not None
    alive = found.incident.counters.allocated
    assert found.moment.memory.tracked == pytest.approx(alive, rel=0.1, abs=2**29)
    confirm(found, limit, **settings)


def test_the_first_optimizer_step_makes_the_state_and_the_best_advice_makes_it_fit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"width": 2048, "depth": 8, "rows": 1, "implementation": "flash"}
    weights = sum(p.nbytes for p in Trained(width=2048, depth=8).parameters())
    backward = predicted(1, width=2048, depth=8, implementation="flash").phases["backward"].size
    limit = backward - 2 * weights + weights // 2  # of the state, which is twice the weights, a quarter
    found = die(tmp_path, limit, **settings)
    assert (found.phase, found.step) == ("optimizer", 0)
    assert found.parameters or (found.moment is not None and found.moment.tensor.phase == "optimizer")
    confirm(found, limit, "optimizer", **settings)


def test_validation_is_told_from_training_and_the_best_advice_makes_it_fit(tmp_path: Path) -> None:
    predictor = Predictor(Trained(), precision="bf16-mixed", card=card())
    training, validation = predictor(batch(1)).peak, predictor.breakdown(batch(16), validation=True).peak.measured
    assert validation > 4 * training  # 16.1 GiB and 2.6 on an H200
    limit, settings = (training + validation) // 2, {"rows": 1, "validation_rows": 16}
    found = die(tmp_path, limit, **settings)
    assert found.phase == "validation" and found.moment is not None
    assert found.moment.tensor.phase == "validation" and found.moment.tensor.shape[0] in (16, 16 * T)
    assert any(advice.change.startswith("validation on") for advice in found.advice)
    confirm(found, limit, "validation", **settings)


class Neighbour(pl.Callback):
    """Another process that takes all but `left` bytes of the GPU while training begins."""

    def __init__(self, left: int) -> None:
        self.left, self.size = left, 0
        self.process: subprocess.Popen[bytes] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.size = torch.cuda.mem_get_info()[0] - self.left
        taking = f"import torch; x = torch.empty({self.size}, dtype=torch.uint8, device='cuda')"
        script = f"{taking}; print('there', flush=True); input()"
        self.process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline().strip() == b"there"

    def leave(self) -> None:
        if self.process is not None:
            try:
                self.process.communicate(b"\n", timeout=60)
            finally:
                self.process.kill()


def test_another_process_is_named_where_it_is_the_reason_and_without_it_the_run_fits(tmp_path: Path) -> None:
    left = predicted().peak // 2
    explainer, neighbour = OOMExplainer(folder=tmp_path), Neighbour(left + 2**30)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            fit(explainer, neighbour)
    finally:
        neighbour.leave()
    found = explainer.explanation
    assert found is not None and found.phase in ("forward", "backward") and found.moment is not None
    best = found.advice[0]
    assert best.change == "what came onto this GPU since this run" and best.fits
    assert best.saves == pytest.approx(neighbour.size, rel=0.1)  # and its CUDA context
    clean()
    fit()
