"""LiveBytes: every storage that torch's operators make, from its birth to its death, on real tensors and on fake ones.

It says what the caching allocator would say of requested bytes, and more: what each block was for, and who made it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "inputs",
    "workspaces",
    "temporaries",
)
"""Buffers are parameters; activations are what the forward made and the backward found alive, whoever keeps it;
workspaces live only inside one operator; temporaries are the rest."""

Inside = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], int]
"""(operator, arguments, keyword arguments, results) -> bytes that the operator takes and gives back while it runs."""


@dataclass(eq=False, slots=True)
class Block:
    """One storage. The bytes are those that were asked for, nothing rounded."""

    size: int
    shape: tuple[int, ...]
    """Of the tensor that came with it."""
    dtype: torch.dtype
    operation: str
    """Which operator made it; "" for what was alive before."""
    module: str
    """In whose forward, by its dotted name; "" outside of any, as in the backward."""
    phase: str
    category: str = "temporaries"
    added: bool = False
    """Whether it was added to a gradient of an earlier micro-batch: in the first one it would have become that."""


Event = tuple[str, Block, bool]
"""(phase, block, whether it was born or died)."""


@dataclass(frozen=True)
class Peak:
    """The moment of a phase with the most live bytes, each block rounded up as the allocator does."""

    size: int
    categories: dict[str, int]
    """Bytes by category; they add up to `size`."""
    blocks: tuple[Block, ...]
    """What was alive, largest first."""


@dataclass
class _Stack:
    """Which module's forward is running."""

    names: dict[nn.Module, str] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    def push(self, module: nn.Module, inputs: Any) -> None:
        self.running.append(self.names.get(module, ""))

    def pop(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.running.pop()

    def top(self) -> str:
        return next((name for name in reversed(self.running) if name), "")


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes(module) as live:`, counts the blocks of `device`; `live.enter(phase)` as phases change.

    A block is born when an operator returns a tensor of a storage that is not known yet, and dies with its storage: a
    custom operator's inner blocks are seen only by way of `inside`. What is alive before goes in by `hold`.
    Each operator costs some 15 microseconds of the host's time.
    """

    def __init__(self, module: nn.Module, *, device: str = "cpu", inside: Inside | None = None) -> None:
        super().__init__()
        self._module = module
        self._device = device
        self._inside = inside
        self._stack = _Stack({part: name for name, part in module.named_modules()})
        self._phase = ""
        self._alive: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._events: list[Event] = []
        self._phases: list[str] = []

    def __enter__(self) -> "LiveBytes":
        self._hooks = (
            register_module_forward_pre_hook(self._stack.push),
            register_module_forward_hook(self._stack.pop, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    @property
    def events(self) -> tuple[Event, ...]:
        """Every birth and death so far, in order."""
        return tuple(self._events)

    def enter(self, phase: str) -> None:
        """What follows belongs to `phase`, which may come again."""
        self._phase = phase
        if phase not in self._phases:
            self._phases.append(phase)
        # So that a phase which only releases has a peak as well.
        self._events.append((phase, _NOTHING, True))

    def hold(self, category: str, tensors: Any) -> None:
        """Put the tensors in a module, an optimizer's state, a list or any other tree under `category`."""
        assert category in CATEGORIES
        for tensor in _tensors(tensors):
            block = self._find(tensor) or self._bear(tensor, "")
            if block is not None:
                block.category = category

    def hold_training(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Parameters, gradients and the optimizers' state."""
        self.hold("parameters", self._module)
        self.hold_gradients()
        for optimizer in optimizers:
            self.hold("optimizer state", optimizer)

    def hold_gradients(self) -> None:
        """Whatever the parameters' `grad` are now."""
        self.hold("gradients", [p.grad for p in self._module.parameters() if p.grad is not None])

    def hold_activations(self) -> None:
        """At the end of a forward: whatever it made that is still alive."""
        for _, block in self._alive.values():
            if block.category == "temporaries":
                block.category = "activations"

    def peaks(self, *, rounded_to: int = 1) -> dict[str, Peak]:
        """Each phase's peak, in the order in which they were first entered; sizes rounded up to multiples."""
        highest, at, total = dict.fromkeys(self._phases, -1), dict.fromkeys(self._phases, 0), 0
        for index, (phase, block, born) in enumerate(self._events):
            size = round_up(block.size, rounded_to)
            total += size if born else -size
            if phase and total > highest[phase]:
                highest[phase], at[phase] = total, index
        return {phase: self._peak(at[phase], rounded_to) for phase in self._phases}

    def _peak(self, index: int, rounded_to: int) -> Peak:
        alive: dict[Block, None] = {}
        for _, block, born in self._events[: index + 1]:
            if born:
                alive[block] = None
            else:
                del alive[block]
        alive.pop(_NOTHING, None)
        categories = {name: 0 for name in CATEGORIES}
        for block in alive:
            categories[block.category] += round_up(block.size, rounded_to)
        blocks = tuple(sorted(alive, key=lambda block: -block.size))
        return Peak(sum(categories.values()), categories, blocks)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operator is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it more often than for all the rest
        results = operator(*args, **(kwargs or {}))
        if isinstance(results, Tensor):
            self._notice(results, operator)
        elif isinstance(results, tuple | list):
            for result in tree_leaves(results):
                if isinstance(result, Tensor):
                    self._notice(result, operator)
        if self._inside is not None and (size := self._inside(operator, args, kwargs or {}, results)):
            block = self._block(size, (size,), torch.uint8, str(operator), category="workspaces")
            self._events += [(self._phase, block, True), (self._phase, block, False)]
        if operator is _ADD:
            self._add(*args[:2])
        return results

    def _add(self, total: Tensor, part: Any) -> None:
        into = self._find(total)
        if into is not None and into.category == "gradients" and (block := self._find(part)) is not None:
            block.added = True

    def _notice(self, tensor: Tensor, operator: Any) -> None:
        if self._find(tensor) is None:
            self._bear(tensor, str(operator))

    def _find(self, tensor: Tensor) -> Block | None:
        storage = storage_of(tensor)
        entry = None if storage is None else self._alive.get(id(storage))
        return None if entry is None else entry[1]

    def _bear(self, tensor: Tensor, operation: str) -> Block | None:
        storage = storage_of(tensor)
        if storage is None or tensor.device.type != self._device:
            return None
        shape = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)
        block = self._block(storage.nbytes(), shape, tensor.dtype, operation)
        key = id(storage)  # a storage keeps its Python object for life, and with it the address

        def died(_: Any) -> None:
            del self._alive[key]
            self._events.append((self._phase, block, False))

        self._alive[key] = weakref.ref(storage, died), block
        self._events.append((self._phase, block, True))
        return block

    def _block(
        self, size: int, shape: tuple[int, ...], dtype: torch.dtype, operation: str, category: str = "temporaries"
    ) -> Block:
        module = self._stack.top() if operation else ""
        return Block(size, shape, dtype, operation, module, self._phase, category)


_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add_.Tensor
"""By which autograd adds a gradient to the one that it finds."""
_NOTHING = Block(0, (), torch.uint8, "", "", "")


def storage_of(tensor: Tensor) -> Any:
    """None where it has none of its own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a sparse tensor, or a subclass that wraps others


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, nn.Module):
        yield from tree.parameters()
        yield from tree.buffers()
    elif isinstance(tree, torch.optim.Optimizer):
        yield from _tensors(list(tree.state.values()))
    elif isinstance(tree, Tensor):
        yield tree
    else:
        for item in parts_of(tree):
            yield from _tensors(item)


def parts_of(tree: Any) -> list[Any]:
    """What a mapping, list, tuple, set, deque or dataclass holds; nothing else, for to look into an iterator uses it up
    and an array is long."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, list | tuple | set | frozenset | deque):
        return list(tree)
    if hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        return [getattr(tree, name, None) for name in tree.__dataclass_fields__]
    return []


def round_up(size: int, multiple: int) -> int:
    """To a multiple of `multiple`."""
    return -(-size // multiple) * multiple
