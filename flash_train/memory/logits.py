"""Logits, found by what happens to them: a product with a weight, log_softmax, the likelihood of the targets.

And what a loss takes in their place that makes the logits of some rows at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flash_train.memory.live import Block
from flash_train.memory.scores import PRODUCTS, Find, flat, in_backward, is_elementwise

CHUNK_ROWS = 2048
"""Of a chunked loss that is not told otherwise."""
_BACKWARDS = frozenset(("nll_loss_backward", "nll_loss2d_backward", "_log_softmax_backward_data"))


@dataclass(eq=False)
class Logits:
    """The outputs of one layer, their copies and log-probabilities, and the gradients of all these."""

    itemsize: int
    """Bytes of one logit, as the product made it."""
    hidden: int
    """Bytes of what the layer took."""
    weight: int
    """Numbers in its weight."""
    blocks: set[Block] = field(default_factory=set)
    first: dict[bool, Block] = field(default_factory=dict)
    """The first block of the forward (False) and of the backward (True)."""
    shape: tuple[int, ...] = ()
    classes: int = 0
    rows: int = 0
    found: bool = False
    """Whether a loss was taken of their log_softmax."""

    def chunked(self) -> Iterator[tuple[Block, int]]:
        """For the first block of either direction, the bytes that a chunked loss has at the most, instead of all.

        In the forward one chunk's logits, the weight as the product takes it, and the gradients, the weight's in fp32;
        in the backward these gradients, and what it makes of them.
        """
        chunk = min(CHUNK_ROWS, self.rows) * self.classes * self.itemsize
        gradients = self.hidden + 4 * self.weight
        for backward, block in self.first.items():
            cast = self.weight * self.itemsize if self.itemsize < 4 else 0
            yield block, 2 * gradients if backward else chunk + cast + gradients


class LogitFinder:
    """`observe` each operator of a forward and a backward; `found` are the layers whose outputs went into a loss.

    That is torch's cross-entropy (or log_softmax and nll_loss), whatever goes element by element before it: bias,
    scale, soft cap, shift, casts.
    """

    def __init__(self, find: Find, is_weight: Callable[[Block], bool]) -> None:
        self._find, self._is_weight = find, is_weight
        self._groups: dict[Block, Logits] = {}

    @property
    def found(self) -> list[Logits]:
        """In the order in which their first blocks were made."""
        return [group for group in dict.fromkeys(self._groups.values()) if group.found]

    def observe(self, operator: Any, args: tuple[Any, ...], results: Any) -> None:
        """`operator`, a torch.ops overload, has run."""
        name = operator._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            if not in_backward():
                self._product(*(args[at] for at in PRODUCTS[name]), results=results)
            return
        known = next((self._groups[block] for x in flat(args) if (block := self._find(x)) in self._groups), None)
        if known is None:
            return
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            known.found = True
        elif name == "_log_softmax":
            x: Tensor = args[0]
            known.shape, known.classes = tuple(x.shape), x.shape[args[1]]
            known.rows = x.numel() // max(1, known.classes)
            self._join(known, results)
        elif name in _BACKWARDS or is_elementwise(operator):
            self._join(known, results)

    def _product(self, a: Tensor, b: Tensor, *, results: Any) -> None:
        blocks = [self._find(a), self._find(b)]
        weights = [block is not None and self._is_weight(block) for block in blocks]
        if sum(weights) != 1 or not isinstance(results, Tensor):
            return
        weight, hidden = (a, b) if weights[0] else (b, a)
        self._join(Logits(results.itemsize, hidden.numel() * hidden.itemsize, weight.numel()), results)

    def _join(self, group: Logits, results: Any) -> None:
        for x in flat((results,)):
            block = self._find(x)
            if block is not None and block not in self._groups:
                group.blocks.add(block)
                group.first.setdefault(in_backward(), block)
                self._groups[block] = group
