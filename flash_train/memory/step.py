"""One training step of anybody's module on fake tensors, phase by phase, in the order in which Lightning takes it."""

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from flash_train.memory.fakes import DeepCopies, Fakes, OnCpu, Valueless, empty_like
from flash_train.memory.levers import map_tensors
from flash_train.memory.live import LiveBytes
from flash_train.memory.optimizers import fuse, gradient_like, only_optimizer
from flash_train.memory.training_step import describe, loss_and_beside, of_batch

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
}
"""Lightning's names: (what weights and batch become, what autocast takes)."""

OptimizerMaker = Callable[[nn.Module], Optimizer]
Live = TypeVar("Live", bound=LiveBytes)


class FakeStep:
    """A fake copy of `module`, which stays as it is, with an optimizer: `take` runs a step as training repeats it.

    In steady state, that is: the optimizer has its state, and the gradients of the step before lie there until the
    forward has ended, as Lightning leaves them. Of `accumulate` micro-batches the last is taken, which finds the
    gradients of the others: its peaks are the highest. A compiled module runs eagerly.

    Args:
        module: has a `training_step(batch)` or `training_step(batch, batch_index)` that returns the loss, or a mapping
            with "loss". A LightningModule's own `configure_gradient_clipping` is called. Real, or built under a
            FakeTensorMode.
        optimizer: makes the optimizer from a module; None: the module's `configure_optimizers`.
        precision: one of `PRECISIONS`.
        multi_tensor: as on a GPU, an optimizer that was told nothing updates all parameters by one operator.
        change: what to do with the copy before anything else.
        fused: let the optimizer take its step in one kernel.

    Raises:
        TypeError: `module` is no nn.Module, or `optimizer` no function.
        ValueError: it has no `training_step` or optimizes by hand, has no copy, or a tensor that is not dense; there is
            no optimizer or more than one, an unknown precision, an `accumulate` below 1, a clip that is not positive,
            or `fused` for an optimizer without it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: OptimizerMaker | None = None,
        precision: str = "32-true",
        accumulate: int = 1,
        gradient_clip: float | None = None,
        multi_tensor: bool = False,
        change: Callable[[nn.Module], Any] | None = None,
        fused: bool = False,
    ) -> None:
        _check(module, precision=precision, accumulate=accumulate, gradient_clip=gradient_clip)
        self._true_dtype, self._autocast_dtype = PRECISIONS[precision]
        self._accumulate = accumulate
        self._clip = gradient_clip
        self._mode = Fakes()
        self._reached: set[nn.Parameter] = set()
        with _quiet():
            with self._mode:
                self.module: Any = self._copy(module)
                if change is not None:
                    change(self.module)
            self._attach_trainer()
            with self._mode, OnCpu(), _valueless("the optimizer"):
                self.optimizer = only_optimizer(optimizer, self.module)
                self._warm_up(multi_tensor=multi_tensor, fused=fused)

    def take(self, batch: Any, live: Callable[[nn.Module], Live]) -> Live:
        """One step on `batch`, real or fake, in the phases "forward", "backward" and "optimizer" of what `live` makes.

        Raises ValueError if the step asks for the values of tensors, or gives no loss.
        """
        with self._mode, OnCpu(), _quiet(), torch.enable_grad():
            batch = map_tensors(self._fake_input, batch)
            counted = self._run(batch, live(self.module))
            parameters = list(self.module.parameters())
            idle = [p for p in parameters if p in self.optimizer.state and p not in self._reached]
            for parameter in idle:  # the warm-up gave them what training never does
                parameter.grad = None
                self.optimizer.state.pop(parameter, None)
            if idle or any(p.grad is not None and p.grad.is_sparse for p in parameters):  # and the warm-up's are dense
                counted = self._run(batch, live(self.module))
        return counted

    def validate(self, batch: Any, live: Callable[[nn.Module], Live]) -> Live:
        """A `validation_step` on `batch` between two steps of training, in one phase, "validation".

        Raises ValueError if there is no such method, or it asks for the values of tensors.
        """
        step = getattr(self.module, "validation_step", None)
        if not callable(step):
            raise ValueError(f"{type(self.module).__name__} has no validation_step: there is nothing to validate")
        with self._mode, OnCpu(), _quiet(), torch.no_grad():
            batch = map_tensors(self._fake_input, batch)
            counted = live(self.module)
            counted.hold_training([self.optimizer])
            counted.hold("inputs", batch)
            self.module.eval()
            try:
                with counted, self._precision(), _valueless("validation_step"):
                    counted.enter("validation")
                    of_batch(step)(batch)
            finally:
                self.module.train()
        return counted

    def _run(self, batch: Any, live: Live) -> Live:
        live.hold_training([self.optimizer])
        live.hold("inputs", batch)
        with live:
            live.enter("forward")
            loss, beside = self._loss(batch)
            live.hold_activations()
            if self._accumulate == 1:
                self.optimizer.zero_grad()
            live.enter("backward")
            loss.backward()
            live.hold_gradients()
            live.enter("optimizer")
            self._update()
            del loss, beside
        return live

    def _loss(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """And what was returned beside it."""
        with self._precision(), _valueless("training_step"):
            loss, beside = loss_and_beside(of_batch(self.module.training_step)(batch))
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise ValueError(
                f"training_step must return the loss, or a mapping that holds it under 'loss', got {describe(loss)}: "
                "return what .backward() is to be called on"
            )
        return loss / self._accumulate, beside

    def _update(self) -> None:
        clip = getattr(self.module, "configure_gradient_clipping", None)
        if callable(clip):
            clip(self.optimizer, self._clip, "norm")
        elif self._clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        self.optimizer.step()

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._true_dtype or before)
        try:
            # Lightning's autocast keeps no casts of weights either, which would outlive checkpointed blocks.
            on = self._autocast_dtype is not None
            with torch.autocast("cpu", dtype=self._autocast_dtype, enabled=on, cache_enabled=False):
                yield
        finally:
            torch.set_default_dtype(before)

    # Making it

    def _copy(self, module: nn.Module) -> nn.Module:
        """Everything but the tensors' data, and what belongs to a run."""
        memo: dict[int, Any] = {}
        for part in module.modules():
            for owner in (getattr(part, "_trainer", None), getattr(part, "_fabric", None)):
                if owner is not None:
                    memo[id(owner)] = None
            # Fake tensors take no numbers from it, and it has no copy among them.
            memo |= {id(x): x for x in vars(part).values() if isinstance(x, torch.Generator)}
            # A module with an _apply of its own decides for itself what .to(dtype) does to its buffers.
            convert = type(part)._apply is nn.Module._apply
            for tensor in part.parameters(recurse=False):
                fake = self._like(tensor, converted=True)
                memo.setdefault(id(tensor), nn.Parameter(fake, requires_grad=tensor.requires_grad))
            for tensor in part.buffers(recurse=False):
                memo.setdefault(id(tensor), self._like(tensor, converted=convert))
        try:
            with DeepCopies(lambda tensor: self._like(tensor, converted=False)):
                return copy.deepcopy(module, memo)
        except (TypeError, RuntimeError) as error:  # of a lock, a file, an iterator
            raise ValueError(
                f"module must be one that copy.deepcopy copies, and {type(module).__name__} is not "
                f"({next(iter(str(error).splitlines()), repr(error))}): keep what has no copy out of it"
            ) from error

    def _like(self, tensor: Tensor, *, converted: bool) -> Tensor:
        dtype = self._true_dtype if converted and self._true_dtype and tensor.is_floating_point() else tensor.dtype
        return empty_like(tensor, dtype=dtype, device="cpu")

    def _fake_input(self, tensor: Tensor) -> Tensor:
        return self._like(tensor, converted=True)

    def _attach_trainer(self) -> None:
        """A LightningModule may ask its trainer things, and its `self.log` needs one that ignores it."""
        package = _lightning_package(self.module)
        if package is not None:
            trainer = importlib.import_module(package).Trainer
            self.module.trainer = trainer(
                accelerator="cpu", barebones=True, accumulate_grad_batches=self._accumulate, max_steps=1
            )

    def _warm_up(self, *, multi_tensor: bool, fused: bool) -> None:
        """Gradients and optimizer state as a step before would have left them."""
        if fused:
            fuse(self.optimizer)
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = False  # it asks for a GPU, and takes no more memory there
            if multi_tensor and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reached.add)
                parameter.grad = gradient_like(parameter, self.optimizer)
        self.optimizer.step()


def _check(module: nn.Module, *, precision: str, accumulate: int, gradient_clip: float | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}: give the module, not its class")
    name = type(module).__name__
    if not callable(getattr(module, "training_step", None)):
        raise ValueError(
            f"module must have a training_step(batch) that returns the loss, and {name} has none: "
            "wrap it in an nn.Module that does"
        )
    if getattr(module, "automatic_optimization", True) is False:
        raise ValueError(
            f"module must leave optimization to Lightning, and {name} has automatic_optimization=False: "
            "predict a module whose training_step returns the loss"
        )
    lazy = [parameter for parameter, tensor in module.named_parameters() if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"module must know the shapes of its parameters, and {lazy[0]} waits for a first batch: run one through it"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate must be a number of micro-batches from 1 on, got {accumulate!r}")
    if gradient_clip is not None and not (isinstance(gradient_clip, int | float) and gradient_clip > 0):
        raise ValueError(f"gradient_clip must be a positive norm or None for no clipping, got {gradient_clip!r}")


def _lightning_package(module: nn.Module) -> str | None:
    """ "lightning.pytorch" or "pytorch_lightning", whichever the module is from."""
    for base in type(module).__mro__:
        if base.__name__ == "LightningModule":
            return base.__module__.partition(".core")[0]
    return None


@contextlib.contextmanager
def _valueless(what: str) -> Iterator[None]:
    """Say what it means when fake tensors are asked for what they have not."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, Valueless) as error:
        raise ValueError(
            f"{what} must not depend on the values of tensors, and {error.func} does: a prediction has none; leave out "
            "nonzero(), boolean indexing, .numpy(), and .item() of whole numbers and truth values"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A prediction announces no trainer, logs nothing, compiles nothing."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
