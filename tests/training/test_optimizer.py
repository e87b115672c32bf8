from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from flash_train.training.optimizer import adamw
from flash_train.training.schedule import constant, constant_factor, warmup_cosine, warmup_cosine_factor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_matrices_decay_gains_and_biases_do_not_and_a_tied_one_is_taken_once() -> None:
    module = Tied()
    matrices, vectors = adamw(module, lr=0.1, weight_decay=0.3).param_groups
    assert [id(p) for p in matrices["params"]] == [id(module.embedding.weight)] and matrices["weight_decay"] == 0.3
    expected = [module.norm.weight, module.norm.bias, module.head.bias]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in expected] and vectors["weight_decay"] == 0.0


def test_a_cpu_does_not_fuse_unless_asked() -> None:
    assert not adamw(Tied(), lr=0.1).defaults["fused"] and adamw(Tied(), lr=0.1, fused=True).defaults["fused"]


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="Tanh has no trainable parameter"):
        adamw(nn.Tanh(), lr=0.1)


def rates(schedule, steps: int) -> list[float]:
    optimizer = SGD([torch.zeros(1)], lr=2.0)
    scheduler = schedule(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_cosine_rises_from_the_first_step_peaks_once_and_ends_on_its_floor() -> None:
    seen = rates(partial(warmup_cosine, warmup_steps=3, total_steps=13, floor=0.25), 16)
    assert seen[:4] == [0.5, 1.0, 1.5, 2.0]
    assert seen[8] == pytest.approx(2.0 * (0.25 + 1.0) / 2), "half way down"
    assert all(a > b for a, b in zip(seen[3:13], seen[4:14], strict=True)) and seen[13:] == [0.5, 0.5, 0.5]
    factors = [warmup_cosine_factor(step, warmup_steps=3, total_steps=13, floor=0.25) for step in range(16)]
    assert seen == [2.0 * factor for factor in factors]


def test_a_constant_rate_warms_up_and_stays() -> None:
    assert rates(partial(constant, warmup_steps=1), 4) == [1.0, 2.0, 2.0, 2.0]
    assert constant_factor(0, warmup_steps=0) == 1.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"warmup_steps": 5, "total_steps": 5}, "needs steps after the warm-up, but total_steps=5 and warmup_steps=5"),
        ({"warmup_steps": 5, "total_steps": -1}, "or use a constant rate when the length is not known"),
        ({"warmup_steps": 1, "total_steps": 5, "floor": 1.5}, "floor is a fraction of the peak rate"),
        ({"warmup_steps": -1, "total_steps": 5}, "0 means no warm-up"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        warmup_cosine(SGD([torch.zeros(1)], lr=2.0), **options)
