"""The peak of a stretch of code: of tensors' bytes on a CPU, of the allocator's on a GPU."""

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flash_train.diagnostics.ledger import PeakLedger, ledger_of
from flash_train.memory.live import Block, LiveBytes
from flash_train.memory.sizes import human_bytes


@dataclass
class StretchPeak:
    """What `measured_peak` gives; the numbers are there when its block has ended."""

    source: str
    """ "cpu", or the GPU's kind and name."""
    size: int = 0
    """Bytes at the most, beyond those that were allocated before."""
    blocks: tuple[Block, ...] = ()
    """What they were then, largest first; a GPU's allocator does not know."""


@contextlib.contextmanager
def measured_peak(device: str | torch.device = "cpu") -> Iterator[StretchPeak]:
    """`with measured_peak() as peak: ...`, after which `peak.size` is how much memory the block took at the most.

    On a CPU these are the bytes of the storages that operators made inside, the same on every machine and in every
    run; what a custom operator takes and gives back inside itself is not seen, and a compiled module runs uncompiled.
    On a GPU it is the allocator's own peak above what was allocated at the beginning.

    >>> with measured_peak() as peak:
    ...     x = torch.ones(256, 256)
    ...     x = x + (x @ x)
    >>> peak.size == 3 * 4 * 256 * 256
    True

    Raises ValueError for a device that keeps no peaks, or that is not there.
    """
    device = _checked(device)
    if device.type == "cpu":
        born = BornInside()
        with _uncompiled(), born:
            born.enter("stretch")
            yield (peak := StretchPeak("cpu"))
        if born.error is not None:
            raise born.error
        highest = born.peaks()["stretch"]
        peak.size, peak.blocks = highest.size, tuple(block for block in highest.blocks if block.size)
        return
    ledger = _warm(device)
    gc.collect()  # what others left behind, and what would otherwise go at some moment inside
    before = ledger.fold().current[0]
    with ledger.scope("stretch") as scope:
        yield (peak := StretchPeak(f"{device.type}, {torch.cuda.get_device_name(device)}"))
    peak.size = max(0, scope.allocated - before)


class BornInside(LiveBytes):
    """Storages that were there before count nothing, and are known from the first operator that gets them.

    Whatever fails in the bookkeeping ends it, and the operators run on: `error` tells.
    """

    def __init__(self, *, device: str = "cpu", module: nn.Module | None = None) -> None:
        super().__init__(nn.Module() if module is None else module, device=device)
        self.error: Exception | None = None

    def survivors(self, phases: Collection[str]) -> list[Block]:
        """What was born in one of `phases` and is alive, in the order of birth."""
        return [block for _, block in self._alive.values() if block.phase in phases and block.size]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._unless_failed(self._meet, args, kwargs)
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def _meet(self, args: Any, kwargs: Any) -> None:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor) and self._find(given) is None:
                block = self._bear(given, "")
                if block is not None:
                    block.size = 0

    def _notice(self, tensor: Tensor, operator: Any) -> None:
        self._unless_failed(super()._notice, tensor, operator)

    def _unless_failed(self, act: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            try:
                act(*args)
            except Exception as error:
                self.error = error


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Operators inside compiled code are seen by nobody."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and to import it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        yield


def _checked(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be cpu or cuda, got {device!r}: torch knows no such") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(
            f"device must be cpu or cuda, got {device}: on others no peak can be told from the code before"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"device={device} needs a CUDA device and torch sees none: skip it here, or give device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


_WARMED: set[torch.device] = set()


def _warm(device: torch.device) -> PeakLedger:
    """cuBLAS takes workspaces at its first products and keeps them: they should not be the first test's."""
    if device not in _WARMED:
        _WARMED.add(device)
        with torch.enable_grad():
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
                nn.functional.linear(x @ x, x, x[0]).sum().backward()
    ledger = ledger_of(device)
    assert ledger is not None
    return ledger


def describe_blocks(blocks: tuple[Block, ...], *, most: int = 3) -> str:
    """The largest of `blocks` in words."""
    return "; ".join(
        f"{human_bytes(block.size)} {list(block.shape)} {str(block.dtype).removeprefix('torch.')}"
        f" ({block.operation.removeprefix('aten.').partition('.')[0] or block.category})"
        for block in blocks[:most]
    )
