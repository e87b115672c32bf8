"""flash-tune as a person types it."""

import json
import math
from pathlib import Path

import pytest
import torch

from flash_train.commands.tune import _smoothed, _steepest, _undone, main
from flash_train.models.gpt import GPT
from tests.commands.conftest import Command

SMALL = ("recipes=overfit_tiny", "model.depth=1", "data.sequence_length=33", "hydra.run.dir=run")


def test_the_rate_where_the_loss_falls_fastest_by_factors_is_found() -> None:
    rates = [10 ** (-6 + step / 10) for step in range(60)]
    assert _steepest([(rate, -math.tanh(math.log10(rate / 1e-3))) for rate in rates]) == pytest.approx(1e-3)


def test_the_lowest_loss_is_where_it_was_and_not_where_a_running_mean_reaches_it() -> None:
    """Lightning's mean of the last fifty steps, in which the rate grows a thousandfold here."""
    rates = [10 ** (-7 + 7 * step / 99) for step in range(100)]
    losses = [3 + 2 * math.tanh(abs(math.log10(rate / 4e-3))) for rate in rates]
    mean, means = 0.0, []
    for step, loss in enumerate(losses, 1):
        mean = 0.98 * mean + 0.02 * loss
        means.append(mean / (1 - 0.98 ** (step + 1)))
    assert means[-1] < means[59], "it is still falling long after the loss has risen"
    curve = list(zip(rates, _smoothed(_undone([*means, math.nan])), strict=False))
    assert min(curve, key=lambda point: point[1])[0] == pytest.approx(4e-3, rel=0.2)
    assert _steepest(curve) == pytest.approx(2e-3, rel=0.5)


@pytest.mark.parametrize("accumulated", [(), ("batch_tokens=264",)])
def test_a_learning_rate_is_sought_and_drawn(command: Command, tmp_path: Path, accumulated: tuple[str, ...]) -> None:
    answer = command(main, *SMALL, "find=learning_rate", "learning_rate.steps=20", *accumulated)
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    rates, losses = zip(*found["curve"], strict=True)
    assert losses[0] == pytest.approx(math.log(256), abs=0.5) and found["learning_rate"] in rates
    assert f"optimizer.lr={found['learning_rate']:.2e}" in answer.out
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"result.json", "learning_rate.png"}


@pytest.mark.parametrize(
    ("changes", "fits", "most"),
    [
        (("batch_size.mode=binsearch",), 11, 11),
        (("batch_size.mode=power",), 8, 8),
        (("batch_size.limit=4",), 4, 4),
        (("batch_tokens=528",), 8, 11),  # 16 rows of 33 tokens
    ],
)
def test_the_most_rows_that_memory_holds_are_found(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], fits: int, most: int
) -> None:
    forward, tried = GPT.forward, []

    def small_memory(model: GPT, tokens: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        if len(tokens) > 11:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        tried.append(len(tokens))
        return forward(model, tokens, *rest, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(GPT, "forward", small_memory)
    answer = command(main, *SMALL, "find=batch_size", "batch_size.steps=2", *changes)
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (found["batch_size"], found["most_rows"]) == (fits, most) and most in tried
    assert f"data.batch_size={fits} fits" in answer.out


def test_where_one_row_is_too_much_memory_is_what_is_missing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(GPT, "forward", no_memory)
    answer = command(main, *SMALL, "find=batch_size")
    assert answer.code == 3 and "flash-tune: out of memory" in answer.err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("find=speed", "find must be one of learning_rate, batch_size, got 'speed'"),
        ("learning_rate.min=0", "learning_rate.min must be positive and below max, got 0 and 1.0"),
        ("learning_rate.steps=3", "learning_rate.steps must be at least 20, got 3"),
        ("batch_size.mode=halves", "batch_size.mode must be binsearch or power, got 'halves'"),
        ("batch_size.limit=0", "batch_size.limit must be a positive whole number, got 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(command: Command, change: str, text: str) -> None:
    answer = command(main, *SMALL, "find=batch_size", change)
    assert answer.code == 2 and answer.err == f"{answer.err.splitlines()[0]}\n" and text in answer.err
