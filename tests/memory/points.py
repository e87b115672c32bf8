"""The training steps whose predicted peaks are held against measured ones: GPT-2 124M one factor at a time, random
combinations, and models of other people.

A point is made from its JSON, and with it `python -m tests.memory.accuracy --point` takes it alone.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch.optim import SGD

from flash_train.models.gpt import GPT
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw, muon
from tests.memory.foreign import FOREIGN, foreign_batch, foreign_module

ATTENTION = ("naive", "sdpa", "flash")
SIZES: dict[str, dict[str, Any]] = {
    "gpt2_124m": {"width": 768, "depth": 12, "heads": 12},
    "llama_124m": {"width": 768, "depth": 12, "heads": 12, "kv_heads": 4, "positions": "rotary", "norm": "rms",
                   "feed_forward": "swiglu", "hidden_size": 2432},
    "tiny": {"width": 64, "depth": 2, "heads": 4},
}  # fmt: skip
VOCABULARY = {"tiny": 503}
TINY_FOREIGN = "tiny_encoder"
TOKENS = 8192
"""Of a micro-batch, in as many rows as there are to T; one row where T is more."""
NAIVE_DEPTH = 3
"""Of naive attention at T = 16k: twelve layers need two such GPUs."""
FACTORS: dict[str, dict[str, Any]] = {
    "bf16-true": {"precision": "bf16-true"},
    "fp32": {"precision": "32-true"},
    "SGD": {"optimizer": "sgd"},
    "checkpointing": {"checkpointing": "block"},
    "accumulation": {"accumulate": 2},
    "chunked loss": {"chunk_rows": 2048},
    "compile": {"compile": True, "depth": 4},  # the compiler's time grows with the depth
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(adamw, lr=1e-4, fused=True),
    "adamw_foreach": partial(adamw, lr=1e-4, fused=False),
    "sgd": lambda module: SGD(module.parameters(), lr=1e-3, momentum=0.9),
    "muon": partial(muon, lr=1e-4, fused=True),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One training step. `factor` is what the point is there for."""

    factor: str
    model: str = "gpt2_124m"
    attention: str = ""
    length: int = 1024
    rows: int = 1
    depth: int | None = None
    """None: the model's own."""
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    checkpointing: str = "none"
    checkpoint_every: int = 1
    accumulate: int = 1
    chunk_rows: int | None = None
    half_residual: bool = False
    dropout: float = 0.0
    compile: bool = False

    def __str__(self) -> str:
        parts = [self.model, self.attention, f"T={self.length}", f"B={self.rows}"]
        for field in fields(self)[5:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(value if isinstance(value, str) else f"{field.name}={value}")
        return " ".join(part for part in parts if part)

    def to_json(self) -> str:
        """What differs from the defaults."""
        kept = {field.name: field.default for field in fields(self)}
        return json.dumps({name: value for name, value in asdict(self).items() if value != kept[name]})

    @classmethod
    def from_json(cls, text: str) -> "Point":
        return cls(**json.loads(text))

    @property
    def vocabulary(self) -> int:
        return VOCABULARY.get(self.model, 50304)


def module_of(point: Point) -> LightningModule:
    """Raises ImportError where the model's library is not there."""
    if point.model in FOREIGN:
        return foreign_module(point.model)
    sizes = dict(SIZES[point.model])
    if point.depth is not None:
        sizes["depth"] = point.depth
    model = GPT(vocabulary_size=point.vocabulary, context_length=point.length, implementation=point.attention,
                checkpointing=point.checkpointing, checkpoint_every=point.checkpoint_every,
                half_residual=point.half_residual, dropout=point.dropout, **sizes)  # fmt: skip
    return LanguageModel(
        model, optimizer=OPTIMIZERS[point.optimizer], loss_chunk_rows=point.chunk_rows, compile=point.compile
    )


def batch_of(point: Point) -> Any:
    """One micro-batch, on torch's default device."""
    if point.model in FOREIGN:
        return foreign_batch(point.model, point.rows, point.length)
    return {name: torch.randint(point.vocabulary, (point.rows, point.length)) for name in ("inputs", "targets")}


def points(seed: int, *, combinations: int = 20) -> Iterator[Point]:
    """All of them: 18 lengths, 42 factors, the random combinations of a seed, the foreign models."""
    for attention in ATTENTION:
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            depth = NAIVE_DEPTH if (attention, length) == ("naive", 16384) else None
            yield Point(factor="length", attention=attention, length=length, rows=rows_of(length), depth=depth)
        for length in (2048, 8192):
            for factor, change in FACTORS.items():
                taken = taking(attention, change.get("precision", ""))
                yield Point(factor=factor, attention=taken, length=length, rows=rows_of(length), **change)
    yield from combined(seed, combinations)
    for model, (rows, length) in FOREIGN.items():
        if model == TINY_FOREIGN:
            continue
        for precision in ("bf16-mixed", "32-true"):
            yield Point(factor="foreign", model=model, rows=rows, length=length, precision=precision)


def tiny_points(seed: int) -> Iterator[Point]:
    """A few, of a model that a CPU trains in a moment."""
    sizes: dict[str, Any] = {"model": "tiny", "rows": 2}
    for attention in ATTENTION:
        yield Point(factor="length", attention=attention, length=128, **sizes)
    yield Point(factor="chunked loss", attention="flash", length=128, chunk_rows=64, **sizes)
    yield Point(factor="foreign", model=TINY_FOREIGN, rows=3, length=64, precision="32-true")


def rows_of(length: int) -> int:
    return max(1, TOKENS // length)


def taking(attention: str, precision: str) -> str:
    """Its name where that precision is taken: SDPA's flash back end takes halves only."""
    return "sdpa_efficient" if (attention, precision) == ("sdpa", "32-true") else attention


def combined(seed: int, count: int) -> Iterator[Point]:
    """Random ones, of odd lengths too, that one GPU of 140 GiB has room for beside others."""
    r = random.Random(seed)
    for _ in range(count):
        precision = r.choice(("bf16-mixed", "bf16-mixed", "bf16-true", "32-true"))
        attention = taking(r.choice(ATTENTION), precision)
        models = ("gpt2_124m", "llama_124m")[: 1 if attention == "sdpa_efficient" else 2]  # no grouped heads there
        length = r.choice((1024, 2048, 4096, 8192, r.randint(300, 8192)))
        most = 2 * TOKENS // length
        if attention == "naive":
            most = min(most, 2 * 4096**2 // length**2)
            length, most = (length, most) if most else (4096, 1)
        yield Point(
            factor="random",
            model=r.choice(models),
            attention=attention,
            length=length,
            rows=r.randint(1, most),
            depth=r.choice((None, 4, 9, 16)),
            precision=precision,
            optimizer=r.choice(("adamw", "adamw", "adamw_foreach", "sgd", "muon")),
            checkpointing=(checkpointing := r.choice(("none", "none", "block", "selective"))),
            checkpoint_every=1 if checkpointing == "none" else r.choice((1, 2)),
            accumulate=r.choice((1, 1, 2, 3)),
            chunk_rows=r.choice((None, None, 1000, 2048)),
            half_residual=precision == "bf16-mixed" and r.random() < 0.3,
            dropout=r.choice((0.0, 0.0, 0.1)),
        )
