"""What can be changed in a training step to see what it needs then: in the fake copy of its module, in its batch."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from flash_train.memory.fakes import empty_like


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """`batch` with every tensor changed, in lists, tuples, mappings and dataclasses, which are copied."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        if isinstance(x, Mapping):
            new: Any = copy.copy(x) if isinstance(x, MutableMapping) else dict(x)
            for name, value in x.items():
                new[name] = map_tensors(change, value)
            return new
        if hasattr(x, "__dataclass_fields__") and not isinstance(x, type):
            new = copy.copy(x)
            for name in x.__dataclass_fields__:
                object.__setattr__(new, name, map_tensors(change, getattr(x, name, None)))
            return new
        return x

    return tree_map(leaf, batch)


def shapes_of(batch: Any) -> Any:
    """`batch` without its data: every tensor on the device "meta", which has no memory."""
    return map_tensors(lambda x: empty_like(x, dtype=x.dtype, device="meta"), batch)


def rows_of(batch: Any) -> int | None:
    """The first dimension that all tensors in `batch` (but scalars) have in common, or None."""
    found: set[int] = set()
    map_tensors(lambda x: found.add(x.shape[0]) if x.dim() else None, batch)
    return found.pop() if len(found) == 1 else None


def first_rows(batch: Any, rows: int) -> Any:
    """The first `rows` of every tensor."""
    return map_tensors(lambda x: x[:rows] if x.dim() else x, batch)


def checkpoint_blocks(module: nn.Module) -> None:
    """Let every block of `module` run again in the backward instead of keeping what it made, in place.

    Blocks are the members, all of one class and with parts of their own, of an nn.ModuleList or nn.Sequential; a model
    that has `gradient_checkpointing_enable`, as those of transformers do, is asked to do it itself.

    Raises ValueError if there are none.
    """
    for part in module.modules():
        enable: Any = getattr(part, "gradient_checkpointing_enable", None)
        if callable(enable):
            enable()
            return
    blocks = list(blocks_of(module))
    if not blocks:
        raise ValueError(f"{type(module).__name__} has no list of blocks of one class to checkpoint")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of `module`, outermost first; what is in a block is not looked into."""
    for part in module.children():
        members = list(part.children())
        repeated = len(members) > 1 and len({type(member) for member in members}) == 1
        if isinstance(part, nn.ModuleList | nn.Sequential) and repeated and any(members[0].children()):
            yield from members
        else:
            yield from blocks_of(part)


def optimizer_like(optimizer: Optimizer, module: nn.Module) -> Callable[[nn.Module], Optimizer]:
    """Makes the same optimizer of a copy of `module`: for each group the parameters of the same names."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[parameter] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]

    def make(other: nn.Module) -> Optimizer:
        own = dict(other.named_parameters())
        kind: Any = type(optimizer)
        return kind([{**group, "params": [own[name] for name in group["params"]]} for group in groups])

    return make
