"""Score matrices, found by what happens to them: a product of two activations, a softmax, a product with a third.

Shapes say nothing: a square hidden layer looks like scores, and a window's or a latent's scores are not square.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_train.memory.live import Block

PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2), "addmm": (1, 2), "addbmm": (1, 2), "linear": (0, 1)}
"""Where an operator's two factors stand."""
_SOFTMAXES = frozenset(("_softmax", "_safe_softmax", "exp", "exp_"))
"""With exp for a softmax by hand."""
_ELEMENTWISE = frozenset(
    "_softmax_backward_data native_dropout native_dropout_backward _to_copy clone copy_ cat empty_like zeros_like "
    "ones_like full_like rand_like bernoulli bernoulli_ constant_pad_nd slice_backward tril triu masked_fill "
    "masked_fill_ where tanh_backward".split()
)
"""What keeps each element in its place, or makes a tensor to go with it, and torch does not call pointwise."""

Find = Callable[[Tensor], Block | None]


@dataclass(eq=False)
class Scores:
    """One attention's T x S blocks: scores, probabilities, their masks, copies and gradients."""

    blocks: set[Block] = field(default_factory=set)
    rows: dict[Block, int] = field(default_factory=dict)
    """Of each softmax's result: how many softmaxes it holds, B H T."""
    found: bool = False
    """Whether probabilities were multiplied with values."""

    @property
    def module(self) -> str:
        """In whose forward the softmax ran."""
        return next(iter(self.rows)).module


class ScoreFinder:
    """`observe` each operator of a forward and a backward; `found` are the attentions that kept their scores.

    Followed through views, and operators that go element by element: scale, bias, mask, soft cap, dropout, casts, in
    any order. A factor that is a parameter, or made of parameters alone, makes a layer and not an attention; so a
    query that is itself a parameter is not found, since a mixture's router looks the same.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._weights: set[Block] = set()
        self._roles: dict[Block, str] = {}  # "scores", "probabilities", "gradient"
        self._groups: dict[Block, Scores] = {}
        self._again: set[Block] = set()  # made by a checkpointed forward, when the backward ran it again

    @property
    def found(self) -> list[Scores]:
        """In the order in which their first blocks were made."""
        return [group for group in dict.fromkeys(self._groups.values()) if group.found and group.rows]

    def observe(self, operator: Any, args: tuple[Any, ...], results: Any) -> None:
        """`operator`, a torch.ops overload, has run."""
        inputs = [self._find(x) for x in flat(args)]
        outputs = [block for x in flat((results,)) if (block := self._find(x)) is not None]
        if inputs and all(block is not None and self.is_weight(block) for block in inputs):
            self._weights.update(block for block in outputs if block.category != "parameters")
            return
        name = operator._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            self._product(*(self._find(args[at]) for at in PRODUCTS[name]), outputs=outputs)
        elif name in _SOFTMAXES or is_elementwise(operator):
            known = [block for block in inputs if block in self._groups]
            if known:
                self._follow(name, known, outputs)
                if name in _SOFTMAXES:
                    self._softmax(args, outputs)

    def adopt(self, block: Block, args: tuple[Any, ...]) -> None:
        """What the operator of these arguments took inside itself: for scores, it is theirs."""
        known = next((self._groups[x] for tensor in flat(args) if (x := self._find(tensor)) in self._groups), None)
        if known is not None:
            self._join(known, block, "gradient")

    def _product(self, a: Block | None, b: Block | None, *, outputs: list[Block]) -> None:
        if any(block is not None and self.is_weight(block) for block in (a, b)):
            return
        for block in (a, b):
            if block is None or self._roles.get(block) != "probabilities":
                continue
            # A checkpoint breaks its second forward off before the last product; the first one's gradient is another.
            if not in_backward() or block in self._again:
                self._groups[block].found = True
        for block in outputs:
            if block not in self._groups:
                self._join(Scores(), block, "gradient" if in_backward() else "scores")

    def _follow(self, name: str, known: list[Block], outputs: list[Block]) -> None:
        roles = {self._roles[block] for block in known}
        role = "probabilities" if "probabilities" in roles or name in _SOFTMAXES else "scores"
        if in_backward() or "gradient" in roles:
            role = "gradient"
        group = self._merge(self._groups[block] for block in known)
        for block in outputs:
            if block not in self._groups or name in _SOFTMAXES:
                self._join(group, block, role)

    def _softmax(self, args: tuple[Any, ...], outputs: list[Block]) -> None:
        x, *rest = args
        dim = rest[0] if rest and isinstance(rest[0], int) else -1
        for block in outputs:
            if self._roles[block] == "probabilities":
                self._groups[block].rows[block] = x.numel() // max(1, x.shape[dim])

    def _join(self, group: Scores, block: Block, role: str) -> None:
        group.blocks.add(block)
        self._groups[block], self._roles[block] = group, role
        if not in_backward() and torch._C._current_graph_task_id() != -1:
            self._again.add(block)

    def _merge(self, groups: Iterable[Scores]) -> Scores:
        first, *others = sorted(dict.fromkeys(groups), key=lambda group: -len(group.blocks))
        for other in others:
            first.blocks |= other.blocks
            first.rows |= other.rows
            first.found |= other.found
            self._groups.update(dict.fromkeys(other.blocks, first))
        return first

    def is_weight(self, block: Block) -> bool:
        """A parameter, or made of parameters alone."""
        return block.category == "parameters" or block in self._weights


def in_backward() -> bool:
    """Autograd runs, and not a checkpointed forward again, which it runs with gradients enabled."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def is_elementwise(operator: Any) -> bool:
    """Whether `operator`, a torch.ops overload, keeps each element in its place."""
    return operator._schema.name.removeprefix("aten::") in _ELEMENTWISE or torch.Tag.pointwise in operator.tags


def flat(args: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors in an operator's arguments."""
    for item in args:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple | list):
            yield from flat(item)
