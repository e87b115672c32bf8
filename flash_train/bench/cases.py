"""The problems that are timed: shapes, what a query sees, how many FLOPs that takes, and inputs."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

DIRECTIONS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""What is timed, and its FLOPs as a multiple of the forward's: two products forward; five backward, the recomputed
scores among them (the convention of the FlashAttention papers)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem, in the alphabet of `flash_attention`."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int
    causal: bool
    window: tuple[int | None, int | None] | None
    documents: tuple[int, ...] | None
    """Their lengths, one behind the other in each row of the batch; together T."""

    def __str__(self) -> str:
        sizes = {"B": self.B, "H": self.H, "G": self.G, "T": self.T, "S": self.S, "D": self.D, "E": self.E}
        same = {name for name, like in {"G": "H", "S": "T", "E": "D"}.items() if sizes[name] == sizes[like]}
        words = [f"{name}{size}" for name, size in sizes.items() if name not in same]
        words.append("causal" if self.causal else "full")
        if self.window is not None:
            sides = ":".join("" if side is None else str(side) for side in self.window)
            words.append(f"window {sides.removesuffix(':') if self.causal else sides}")
        if self.documents is not None:
            lengths = sorted({min(self.documents), max(self.documents)})
            words.append(f"{len(self.documents)} documents of {' to '.join(map(str, lengths))}")
        return " ".join(words)

    def bounds(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(the first key that each query sees, the last one + 1), both [T]; none where the second is not larger."""
        beside = torch.arange(self.T, device=device) + self.S - self.T
        left, right = self.window or (None, None)
        if self.causal:
            right = 0
        first, end = torch.zeros_like(beside), torch.full_like(beside, self.S)
        if self.documents is not None:
            lengths = torch.tensor(self.documents, device=device)
            end = lengths.cumsum(0).repeat_interleave(lengths)
            first = end - lengths.repeat_interleave(lengths)
        if left is not None:
            first = torch.maximum(first, beside - left)
        if right is not None:
            end = torch.minimum(end, beside + right + 1)
        return first, end

    def pairs(self) -> int:
        """Query-key pairs that take part, of one head of one row of the batch."""
        first, end = self.bounds()
        return int((end - first).clamp(min=0).sum())

    def flops(self, direction: str) -> float:
        """4 B H T S D forward if D = E and everything is seen; else the visible pairs' share of 2 B H T S (D + E)."""
        return DIRECTIONS[direction] * 2 * self.B * self.H * self.pairs() * (self.D + self.E)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.D)


def read_case(node: Mapping[str, Any], *, key: str) -> Case:
    """A case as a preset writes it: G, S and E may be left out where they are H, T and D.

    Raises ValueError that names `key`, the rule and the value.
    """
    names = list(inspect.signature(Case).parameters)
    for name in node:
        if name not in names:
            raise ValueError(f"{key} takes no {name!r}; choose among {', '.join(names)}")
    for name in ("B", "H", "T", "D"):
        if name not in node:
            raise ValueError(f"{key} must give B, H, T and D, and {name} is missing, in {dict(node)}")
    sizes = {name: node.get(name, node.get(like)) for name, like in zip("BHGTSDE", "BHHTTDD", strict=True)}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{key}.{name} must be a positive whole number, got {size!r}")
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"{key}: H must be a multiple of G, got H={sizes['H']} and G={sizes['G']}")
    causal, window, documents = node.get("causal", False), node.get("window"), node.get("documents")
    if not isinstance(causal, bool):
        raise ValueError(f"{key}.causal must be true or false, got {causal!r}")
    if window is not None:
        whole = isinstance(window, list) and len(window) == 2
        if not whole or any(side is not None and (not isinstance(side, int) or side < 0) for side in window):
            raise ValueError(f"{key}.window must be [left, right], null where it has no end, got {window!r}")
    if documents is not None:
        if not isinstance(documents, list) or any(not isinstance(n, int) or n < 1 for n in documents):
            raise ValueError(f"{key}.documents must be a list of lengths, got {documents!r}")
        if not sum(documents) == sizes["T"] == sizes["S"]:
            raise ValueError(
                f"{key}.documents must be T={sizes['T']} tokens together, and as many keys, got {sum(documents)} and "
                f"S={sizes['S']}"
            )
    return Case(
        **sizes,
        causal=causal,
        window=None if window is None else (window[0], window[1]),
        documents=None if documents is None else tuple(documents),
    )


class Inputs(NamedTuple):
    """q, k, v and the output's gradient: stored as [B, T, H, D], as projections leave them, seen as [B, H, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def make_inputs(case: Case, *, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Normally distributed numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (case.T, case.H, case.D), (case.S, case.G, case.D), (case.S, case.G, case.E), (case.T, case.H, case.E)
    return Inputs(
        *(
            torch.randn(case.B, *shape, device=device, dtype=dtype, generator=generator).transpose(1, 2)
            for shape in shapes
        )
    )
