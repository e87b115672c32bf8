import pytest
import torch
from torch import nn

from flash_train.comparison.gradients import gradient_errors
from flash_train.models.gpt import GPT

T, V = 37, 53


def make_model(implementation: str) -> GPT:
    torch.manual_seed(3)
    return GPT(vocabulary_size=V, context_length=T, width=24, depth=2, heads=3, implementation=implementation)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(V, (2, T + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_every_arm_is_as_exact_as_naive_in_the_precision_of_the_run(precision: str):
    arms = ("naive", "naive_reversed", "sdpa", "flash")
    errors = gradient_errors(make_model, *batch(), implementations=arms, precision=precision)
    unit = {"32-true": 1e-7, "bf16-mixed": 1e-3, "bf16-true": 1e-3, "16-mixed": 1e-4}[precision]
    assert unit / 10 < errors["naive"] < unit * 100
    assert all(error <= 2 * errors["naive"] for error in errors.values())


def test_documents_reach_every_arm_and_the_truth():
    documents = torch.tensor([4, 9]).repeat_interleave(torch.tensor([20, T - 20])).expand(2, T)
    arms = ("naive", "flash")
    packed = gradient_errors(make_model, *batch(), implementations=arms, precision="32-true", documents=documents)
    assert 0 < packed["flash"] <= 2 * packed["naive"] < 1e-5

    def forgetful(implementation: str) -> nn.Module:
        model = make_model(implementation)
        if implementation == "flash":
            forward = model.forward
            model.forward = lambda tokens, documents=None, **head: forward(tokens)
        return model

    errors = gradient_errors(forgetful, *batch(), implementations=arms, precision="32-true", documents=documents)
    assert errors["flash"] > 100 * errors["naive"]


def test_an_arm_that_does_not_take_the_model_leaves_the_others_their_numbers():
    def windowed(implementation: str) -> GPT:
        torch.manual_seed(3)
        return GPT(
            vocabulary_size=V, context_length=T, width=24, depth=2, heads=3, window=5, implementation=implementation
        )

    arms = ("naive", "sdpa", "flash")
    assert list(gradient_errors(windowed, *batch(), implementations=arms, precision="32-true")) == ["naive", "flash"]


def test_the_check_can_fail():
    class Slightly(nn.Module):
        def __init__(self, model: GPT) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens) * 1.0001

    def one_wrong(implementation: str) -> nn.Module:
        model = make_model(implementation)
        return Slightly(model) if implementation == "flash" else model

    errors = gradient_errors(one_wrong, *batch(), implementations=("naive", "flash"), precision="32-true")
    assert errors["flash"] > 2 * errors["naive"]


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision must be one of .* got '8-true'"):
        gradient_errors(make_model, *batch(), implementations=("naive",), precision="8-true")
