from typing import Any

import pytest
import torch
from torch import Tensor

from flash_train.models.generation import generate, sample
from flash_train.models.gpt import GPT

VOCABULARY, CONTEXT = 11, 13


def make(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary_size": VOCABULARY, "context_length": CONTEXT, "width": 16, "depth": 2}
    model = GPT(**{**sizes, "heads": 2, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary", "vocabulary_multiple": 64, "tied_embeddings": False}])
def test_the_likeliest_token_follows_the_last_tokens_of_the_context(changes: dict[str, Any]) -> None:
    model, tokens = make(**changes), PROMPT
    for _ in range(20):  # longer than the context
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1)[:, None]), 1)
    rows = generate(model, PROMPT, max_new_tokens=20, temperature=0)
    assert torch.equal(torch.stack(rows), tokens[:, 3:])
    assert len(tokens.unique()) > 2


def test_tokens_are_drawn_from_capped_logits() -> None:
    """So small a cap makes all tokens as likely; without it so low a temperature leaves few."""
    distinct = []
    for cap in (None, 1e-5):
        rows = generate(
            make(logit_soft_cap=cap), PROMPT, max_new_tokens=99, temperature=0.01, generator=seeded(1)
        )  # fmt: skip
        distinct.append(len(torch.stack(rows).unique()))
    assert distinct[0] < VOCABULARY == distinct[1]


def test_one_seed_draws_the_same_tokens_and_another_one_others() -> None:
    model = make(dropout=0.5).train()

    def drawn(seed: int) -> Tensor:
        return torch.stack(generate(model, PROMPT, max_new_tokens=20, generator=seeded(seed)))

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert model.training


def test_a_row_ends_before_its_end_token_and_the_others_go_on() -> None:
    model = make()
    whole = generate(model, PROMPT, max_new_tokens=20, generator=seeded(3))
    end = int(whole[0][4])
    cut = generate(model, PROMPT, max_new_tokens=20, generator=seeded(3), end=[end])
    for row, before in zip(cut, whole, strict=True):
        assert end not in row and torch.equal(row, before[: len(row)])
        assert len(row) == len(before) or before[len(row)] == end
    assert len(cut[0]) <= 4 and len(cut[0]) != len(cut[1])


def test_tokens_beyond_the_tokenizer_s_are_never_drawn() -> None:
    rows = generate(make(), PROMPT, max_new_tokens=50, temperature=9.0, vocabulary_size=6, generator=seeded(1))
    assert torch.stack(rows).max() == 5


def counts(**settings: Any) -> Tensor:
    """How often each token is drawn, of 4,000, where their probabilities are 0.5, 0.3, 0.15 and 0.05."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().expand(4000, -1)
    return sample(logits, generator=seeded(0), **settings).bincount(minlength=4) / 4000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.15, 0.5, 0.05, 0.3]),
        ({"temperature": 0.5}, [0.0225 / 0.365, 0.25 / 0.365, 0.0025 / 0.365, 0.09 / 0.365]),
        ({"temperature": 1e-320}, [0, 1, 0, 0]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"top_k": 9}, [0.15, 0.5, 0.05, 0.3]),
        ({"top_p": 0.79}, [0, 0.625, 0, 0.375]),
        ({"top_p": 0.81}, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.83}, [0, 0.625, 0, 0.375]),  # of three, the first two have 0.842
        ({"top_p": 1}, [0.15, 0.5, 0.05, 0.3]),
    ],
)
def test_tokens_are_drawn_by_their_probabilities(settings: dict[str, Any], expected: list[float]) -> None:
    found, wanted = counts(**settings), torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.025)
    assert torch.equal(found == 0, wanted == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"temperature": -1.0}, "temperature must be a number from 0 on, got -1.0: 0 takes the likeliest token"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 on, got nan"),
        ({"top_k": 0}, "top_k must be a positive integer, got 0"),
        ({"top_p": 0.0}, "top_p must be a probability above 0 and up to 1, got 0.0: None leaves it out"),
        ({"prompt": PROMPT[:, :0]}, r"prompt must be \[B, T\] with at least one token, got \[2, 0\]: begin with one"),
        ({"prompt": PROMPT + 6}, "prompt must hold tokens from 0 to 10, got 7 to 15: use the tokenizer"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompt": PROMPT, "max_new_tokens": 3} | changes
    with pytest.raises(ValueError, match=message):
        generate(make(), **arguments)


def test_broken_weights_are_refused() -> None:
    model = make()
    model.get_parameter("final_norm.weight").data.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits must be finite, and these are not: the weights are broken"):
        generate(model, PROMPT, max_new_tokens=3)
