"""The cases of the sweep: every feature with every other, at odd sizes and strides, each one made from its name."""

import random
from typing import NamedTuple

import torch

from tests.ops.cases import LAYOUTS, Case

TOGETHER = 40
"""Cases of the size "full" in a row that share what the kernels are compiled for: head sizes, dtype, features."""


class Size(NamedTuple):
    """What a case may be as large as; one in sixteen has no batch, no queries or no keys."""

    batches: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    """(H, G)"""
    lengths: tuple[int, ...]
    head_sizes: tuple[tuple[int, int], ...]
    """(D, E); any others stand for a quarter of the cases where `largest` is not 0."""
    largest: int
    together: int
    dtypes: tuple[torch.dtype, ...]


_THREE = (torch.float16, torch.bfloat16, torch.float32)
_HEADS = ((1, 1), (2, 1), (3, 3), (6, 2), (5, 1), (8, 4))
SIZES = {
    "tiny": Size(
        (1, 1, 1, 2), ((1, 1), (2, 1), (2, 2), (4, 2)), (1, 2, 5, 15, 16, 17, 23, 31, 33),
        ((8, 8), (16, 9), (5, 24), (1, 1), (40, 33)), 0, 1, _THREE,
    ),
    "small": Size(
        (1, 2, 3), _HEADS, (1, 3, 17, 37, 63, 64, 65, 71, 100, 129, 150),
        ((8, 8), (64, 64), (24, 40), (1, 3), (192, 128)), 256, 1, (*_THREE, torch.float64),
    ),
    "full": Size(
        (1, 2, 3, 5), _HEADS, (1, 2, 3, 16, 63, 64, 65, 100, 127, 128, 129, 192, 255, 257, 301, 511, 640),
        ((64, 64), (128, 128), (128, 128), (192, 128), (256, 256), (1, 1), (32, 256), (96, 80), (16, 16)),
        256, TOGETHER, _THREE,
    ),
}  # fmt: skip
_SHAPES = ("BHTS", "1HTS", "B1TS", "11TS", "HTS", "TS", "BH1S", "B11S", "BHT1", "1H11", "H1S", "T1", "S", "1")


def names(size: str, seed: int, count: int) -> list[str]:
    """Of the first `count` cases of a seed."""
    return [f"{size}-{seed}-{number}" for number in range(count)]


def generate(name: str) -> tuple[Case, torch.dtype, int]:
    """(case, dtype, the seed of its tensors)."""
    size_name, seed, number = name.split("-")
    size = SIZES[size_name]
    shared = random.Random(f"{size_name} {seed} {int(number) // size.together}")
    own = random.Random(name)
    case, dtype = _compiled(size, shared)
    return _filled(size, case, own), dtype, own.randrange(2**31)


def _compiled(size: Size, r: random.Random) -> tuple[Case, torch.dtype]:
    """What a kernel is compiled for; the values of the features that are on are still to be filled in."""
    dtype = r.choice(size.dtypes)
    D, E = r.choice(size.head_sizes)
    if size.largest and r.random() < 0.25:
        D, E = r.randint(1, size.largest), r.randint(1, size.largest)
    on = r.choice((0.0, 0.2, 0.2, 0.35, 0.35, 0.7))  # how likely a feature is
    wide = torch.promote_types(dtype, torch.float32)
    case = Case(
        1, 1, 1, 1, 1, D, E,
        causal=r.random() < 0.5,
        window=(None, None) if r.random() < on else None,
        documents=r.choice(("ids", "packed")) if r.random() < on else "",
        soft_cap=1.0 if r.random() < on else None,
        alibi=r.random() < on,
        bias="1" if r.random() < on else "",
        bias_dtype=r.choice((None, None, torch.float32, torch.bfloat16)),
        bias_gradient=r.random() < 0.7,
        allowed="1" if r.random() < on else "",
        sinks=r.random() < on,
        dropout=0.5 if r.random() < on else 0.0,
        output_dtype=wide if r.random() < 0.2 else None,
        lse_gradient=r.random() < 0.5,
        deterministic=r.choice((None, True, False)),
    )  # fmt: skip
    return case, dtype


def _filled(size: Size, case: Case, r: random.Random) -> Case:
    B, (H, G) = 1 if case.documents == "packed" else r.choice(size.batches), r.choice(size.heads)
    T, S = r.choice(size.lengths), r.choice(size.lengths)
    if size.together > 1 and r.random() < 0.03:
        B, H, G, T, S = 1, 2, 1, r.randint(1000, 2000), r.randint(1000, 2000)
    if r.random() < 1 / 16:
        B, T, S = r.choice(((B, 0, S), (B, T, 0), (B if case.documents == "packed" else 0, T, S)))
    if case.documents == "ids" or r.random() < 0.3:
        S = T

    def reach() -> int | None:
        return r.choice((None, 0, 1, r.randint(0, 20), r.randint(0, max(T, S))))

    return case._replace(
        B=B, H=H, G=G, T=T, S=S,
        window=case.window and (reach(), reach()),
        alignment=r.choice(("bottom_right", "bottom_right", "top_left")),
        soft_cap=case.soft_cap and r.choice((1.5, 10.0, 50.0)),
        bias=case.bias and r.choice(_SHAPES),
        bias_infinite=r.random() < 0.2,
        allowed=case.allowed and r.choice(_SHAPES),
        dropout=case.dropout and r.choice((0.1, 0.5, 0.9)),
        layout=r.choice(LAYOUTS),
    )  # fmt: skip
