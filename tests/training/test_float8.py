import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy_training import ToyData, trainer

from flash_train.models.gpt import GPT
from flash_train.training.float8 import convert_to_float8
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw


def make(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocabulary_size": 11, "context_length": 32, "width": 32, "depth": 2, "heads": 2, **options})


def test_without_torchao_fp8_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match=r"fp8 needs torchao, which cannot be imported .*'flash_train\[fp8\]'"):
        convert_to_float8(make())


def test_a_projection_that_is_passed_by_is_refused() -> None:
    with pytest.raises(ValueError, match="set checkpointing=none, or selective, in place of activation"):
        convert_to_float8(make(checkpointing="activation"))


def test_an_unknown_recipe_and_a_model_without_fitting_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe is one of tensorwise, rowwise, not 'blocks'"):
        convert_to_float8(make(), "blocks")
    with pytest.raises(ValueError, match="Sequential has no linear layer whose sizes are multiples of 16, as"):
        convert_to_float8(nn.Sequential(nn.Linear(16, 24)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_layers_round_to_fp8_and_all_else_stays(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    plain, model = make(), make()
    converted = convert_to_float8(model, recipe, emulate=True)
    parts = ("attention.qkv", "attention.projection", "feed_forward.expand", "feed_forward.projection")
    assert converted == [f"blocks.{block}.{part}" for block in (0, 1) for part in parts]
    tokens, losses, weights = torch.randint(11, (2, 32)), [], []
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(each(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        losses.append(loss)
        weights.append(each.get_parameter("blocks.0.feed_forward.expand.weight").grad)
    assert losses[0] != losses[1] and losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    assert 0 < (weights[0] - weights[1]).norm() < 0.2 * weights[0].norm() and weights[1].dtype == torch.float32
    plain.load_state_dict(model.state_dict())
    module = LanguageModel(model, optimizer=partial(adamw, lr=1e-3))
    trainer(tmp_path, max_steps=2, precision="bf16-mixed", limit_val_batches=0).fit(module, ToyData())


@pytest.mark.gpu
def test_a_compiled_model_learns_in_fp8_as_in_bf16() -> None:
    pytest.importorskip("torchao.float8")
    tokens = torch.randint(11, (8, 32), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses: list[float] = []
    for fp8 in (False, True):
        model = make(width=64).cuda()
        if fp8:
            convert_to_float8(model)
        model.compile()
        optimizer = adamw(model, lr=3e-3)
        loss = torch.inf
        for _ in range(60):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[1] < 1.0 and losses[1] == pytest.approx(losses[0], abs=0.3)
