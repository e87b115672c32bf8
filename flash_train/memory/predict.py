"""predict_peak: the peak memory of a training step, before it runs, on a machine that could not run it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from flash_train.memory.attribution import Breakdown, Recorder
from flash_train.memory.cards import GIB, ROUNDING, Card, card_of
from flash_train.memory.cuda_rules import cuda_rules, inside
from flash_train.memory.live import Block, LiveBytes, Peak
from flash_train.memory.replay import Replay
from flash_train.memory.step import FakeStep, OptimizerMaker


@dataclass(frozen=True)
class Prediction:
    """What one training step will need. All sizes in bytes."""

    phases: dict[str, Peak]
    """"forward", "backward" and "optimizer": the moment of each with the most live bytes."""
    requested: int
    """The peak before each block is rounded up."""
    cublas: int
    """cuBLAS's workspace, which is alive in every phase; 0 on a CPU."""
    context: int
    """Outside of torch's allocator; 0 on a CPU."""
    replay: Replay | None = field(default=None, repr=False, compare=False)
    """The start of such a training, for torch's CUDA allocator; None on a CPU, which has another."""

    @property
    def allocated(self) -> dict[str, int]:
        """Each phase's peak as the allocator counts it: the blocks that are alive, rounded up, with cuBLAS's, and what
        it leaves uncut: the rest of a large block, where that is not above 1 MiB."""
        replayed = self.replay.allocated if self.replay else {}
        return {name: max(peak.size + self.cublas, replayed.get(name, 0)) for name, peak in self.phases.items()}

    @property
    def phase(self) -> str:
        """The one that has the peak."""
        allocated = self.allocated
        return max(allocated, key=lambda name: allocated[name])

    @property
    def peak(self) -> int:
        """What `torch.cuda.max_memory_allocated` will say."""
        return max(self.allocated.values())

    @property
    def smooth(self) -> int:
        """The peak without what is uncut: as a step's rows or tokens grow, a maximum of polynomials."""
        return max(peak.size for peak in self.phases.values()) + self.cublas

    @property
    def rounding(self) -> int:
        """The part of the peak that is the allocator's rounding."""
        return max(peak.size for peak in self.phases.values()) - self.requested

    @property
    def categories(self) -> dict[str, int]:
        """The peak by category (`live.CATEGORIES`), rounding in its place, "cuBLAS" and "uncut": they add up to
        `peak`."""
        peak = self.phases[self.phase]
        others = {"cuBLAS": self.cublas, "uncut": self.peak - peak.size - self.cublas}
        return {name: size for name, size in (peak.categories | others).items() if size}

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What is alive at the peak, largest first."""
        return self.phases[self.phase].blocks

    def needed(self, allowance: float) -> int:
        """What a card must have: the peak, `allowance` of it again for what fragmentation wastes, which is more than
        is uncut and contains it, and the context."""
        return max(round(self.smooth * (1 + allowance)), self.peak) + self.context


class Predictor:
    """`predict_peak` for many batches of one module, which is copied once; its arguments, but for the batch.

    Args:
        change: what to do with the copy before anything else.
        fused: let the optimizer take its step in one kernel.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: OptimizerMaker | None = None,
        precision: str = "32-true",
        accumulate: int = 1,
        gradient_clip: float | None = None,
        device: str = "cuda",
        card: Card | None = None,
        change: Callable[[nn.Module], Any] | None = None,
        fused: bool = False,
    ) -> None:
        if device not in ("cuda", "cpu"):
            raise ValueError(f"device must be cuda or cpu, got {device!r}: the rules of other devices are not known")
        self._card = (card or card_of(24 * GIB)) if device == "cuda" else None
        with self._rules():
            self._step = FakeStep(
                module,
                optimizer=optimizer,
                precision=precision,
                accumulate=accumulate,
                gradient_clip=gradient_clip,
                multi_tensor=device == "cuda",
                change=change,
                fused=fused,
            )

    def __call__(self, batch: Any) -> Prediction:
        card = self._card
        live: Callable[[nn.Module], LiveBytes] = partial(LiveBytes, inside=inside(card.capability if card else None))
        with self._rules():
            counted = self._step.take(batch, live)
        requested = max(peak.size for peak in counted.peaks().values())
        if card is None:
            return Prediction(counted.peaks(), requested, cublas=0, context=0)
        return Prediction(
            counted.peaks(rounded_to=ROUNDING),
            requested,
            cublas=card.cublas,
            context=card.context,
            replay=Replay(counted.events, cublas=card.cublas_sizes),
        )

    def breakdown(self, batch: Any, *, validation: bool = False) -> Breakdown:
        """The same step, or a `validation_step`, by module, by tensor, and what scores and logits take of it; nobody
        measures, but what cuBLAS takes is `untracked`, with what the allocator leaves uncut."""
        card = self._card
        live = partial(Recorder, device="cpu", inside=inside(card.capability if card else None), sdpa=False)
        with self._rules():
            recorder = self._step.validate(batch, live) if validation else self._step.take(batch, live)
        if recorder.error is not None:
            raise recorder.error
        if card is None:
            return recorder.breakdown({}, step=0, source="prediction")
        replayed = {} if validation else Replay(recorder.events, cublas=card.cublas_sizes).allocated
        peaks = {
            phase: max(peak.size + card.cublas, replayed.get(phase, 0))
            for phase, peak in recorder.peaks(rounded_to=ROUNDING).items()
        }
        return recorder.breakdown(peaks, step=0, source="prediction", rounded_to=ROUNDING)

    def _rules(self) -> Any:
        return cuda_rules(self._card.capability) if self._card else nullcontext()


def predict_peak(
    module: nn.Module,
    batch: Any,
    *,
    optimizer: OptimizerMaker | None = None,
    precision: str = "32-true",
    accumulate: int = 1,
    gradient_clip: float | None = None,
    device: str = "cuda",
    card: Card | None = None,
) -> Prediction:
    """The peak memory of a training step of `module` on `batch`, without a GPU and without the memory.

    The step runs on fake tensors, which have shapes and no data; `module` and `batch` stay as they are.

    >>> import torch
    >>> class Model(torch.nn.Linear):
    ...     def training_step(self, batch):
    ...         return self(batch).square().mean()
    >>> prediction = predict_peak(Model(256, 256, bias=False), torch.empty(64, 256), device="cpu",
    ...                           optimizer=lambda module: torch.optim.AdamW(module.parameters()))
    >>> prediction.phase, prediction.categories["parameters"]
    ('optimizer', 262144)

    Args:
        module: has a `training_step(batch)` or `training_step(batch, batch_index)` that returns the loss, or a mapping
            with "loss"; a LightningModule or not. Real, or built under a FakeTensorMode.
        batch: what `training_step` takes, real or made under the module's FakeTensorMode; only shapes count.
        optimizer: makes the optimizer from the module; None: the module's `configure_optimizers`.
        precision: Lightning's name: "32-true", "bf16-mixed", "bf16-true", "16-mixed" or "16-true".
        accumulate: micro-batches of a step.
        gradient_clip: largest gradient norm; handed to the module's `configure_gradient_clipping` where it has one.
        device: "cuda", for what torch's CUDA code allocates (see `cuda_rules.py`), or "cpu".
        card: whose kernels and workspaces are meant; None: an Ampere's.

    Raises:
        TypeError: `module` is no nn.Module.
        ValueError: the module, or what is asked, is none of the above; or its step asks for the values of tensors.
    """
    predictor = Predictor(
        module,
        optimizer=optimizer,
        precision=precision,
        accumulate=accumulate,
        gradient_clip=gradient_clip,
        device=device,
        card=card,
    )
    return predictor(batch)
