from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from flash_train.models.gpt import GPT
from flash_train.training.groups import check_groups
from flash_train.training.optimizer import MuonWithAdamW, adamw, muon
from flash_train.training.schedule import (
    constant,
    constant_factor,
    warmup_cosine,
    warmup_cosine_factor,
    warmup_linear,
    warmup_stable_decay,
)


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


def test_fused_foreach_and_one_by_one_are_a_choice() -> None:
    plain = adamw(Tied(), lr=0.1, fused=False, foreach=False).param_groups[0]
    assert (plain["fused"], plain["foreach"]) == (False, False)
    at_once = adamw(Tied(), lr=0.1, foreach=True).param_groups[0]
    assert (at_once["fused"], at_once["foreach"]) == (False, True)
    with pytest.raises(ValueError, match="fused=True and foreach=True are two ways to make one update"):
        adamw(Tied(), lr=0.1, fused=True, foreach=True)


def names(module: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    found = {id(parameter): name for name, parameter in module.named_parameters()}
    return [found[id(parameter)] for parameter in parameters]


@pytest.mark.parametrize("make", [adamw, partial(muon, not_muon=())])
def test_patterns_of_names_overrule_the_shape(make) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Embedding(7, 3))
    groups = make(module, lr=0.1, weight_decay=0.3, decay=["0.bias"], no_decay=["2.*"]).param_groups
    decaying = sorted(name for g in groups if g["weight_decay"] == 0.3 for name in names(module, g["params"]))
    spared = sorted(name for g in groups if g["weight_decay"] == 0.0 for name in names(module, g["params"]))
    assert (decaying, spared) == (["0.bias", "0.weight", "1.weight"], ["1.bias", "2.weight"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": ["norm.*"], "no_decay": ["*.bias"]}, r"norm.bias is named by decay and by no_decay"),
        (
            {"no_decay": ["embeddings.*"]},
            r"'embeddings.\*' names no trainable parameter: they are called embedding.wei",
        ),
        ({"no_decay": ["frozen"]}, "'frozen' names no trainable parameter"),
        ({"weight_decay": -0.1}, "weight_decay cannot be -0.1"),
        ({"betas": [0.9]}, "betas are two numbers"),
    ],
)
def test_groups_that_cannot_be_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        adamw(Tied(), lr=0.1, **options)


def test_a_parameter_that_is_in_no_group_or_in_two_is_named() -> None:
    module = nn.Linear(3, 5)
    check_groups(module, [{"params": [module.weight]}, {"params": [module.bias]}])
    with pytest.raises(ValueError, match="in exactly one group of the optimizer, and bias is in none: add it to one"):
        check_groups(module, [{"params": [module.weight]}])
    with pytest.raises(ValueError, match="and weight is in 2:"):
        check_groups(module, [{"params": [module.weight, module.bias]}, {"params": [module.weight]}])


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="Tanh has no trainable parameter"):
        adamw(nn.Tanh(), lr=0.1)


def gpt(**options) -> GPT:
    torch.manual_seed(4)
    return GPT(vocabulary_size=11, context_length=5, width=12, depth=2, heads=3, bias=True, **options)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_inside_and_adamw_the_rest(tied: bool) -> None:
    model = gpt(tied_embeddings=tied)
    groups = muon(model, lr=0.1, adamw_lr=0.01, weight_decay=0.3).param_groups
    check_groups(model, groups)
    [inside] = [group for group in groups if group["muon"]]
    parts = ("attention.qkv", "attention.projection", "feed_forward.expand", "feed_forward.projection")
    assert names(model, inside["params"]) == [f"blocks.{i}.{part}.weight" for i in (0, 1) for part in parts]
    assert [(g["muon"], g["lr"], g["weight_decay"]) for g in groups] == [
        (True, 0.1, 0.3), (False, 0.01, 0.3), (False, 0.01, 0.0)
    ]  # fmt: skip
    outside = names(model, groups[1]["params"])
    assert outside == ["token_embedding.weight", "position_embedding.weight", *([] if tied else ["head.weight"])]


def steps(model: GPT, optimizers: list[torch.optim.Optimizer], number: int, *, first: int = 0) -> dict:
    for step in range(first, first + number):
        tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_both_parts_do_what_torch_s_own_do() -> None:
    model = gpt()
    one = steps(model, [muon(model, lr=0.02, adamw_lr=0.01)], 3)
    model = gpt()
    inside = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() == 2]
    decaying = [p for name, p in model.named_parameters() if "embedding" in name]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    two = [
        torch.optim.Muon(inside, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
    ]
    torch.testing.assert_close(one, steps(model, two, 3), rtol=0, atol=0)


def test_a_loaded_state_is_that_of_both_parts() -> None:
    model = gpt()
    whole = steps(model, [muon(model, lr=0.02)], 4)
    model = gpt()
    first = muon(model, lr=0.02)
    steps(model, [first], 2)
    again = muon(model, lr=0.02)
    again.load_state_dict(first.state_dict())
    torch.testing.assert_close(steps(model, [again], 2, first=2), whole, rtol=0, atol=0)
    assert isinstance(again, MuonWithAdamW) and len(again.state) == len(list(model.parameters()))


def test_without_a_matrix_inside_muon_is_refused() -> None:
    with pytest.raises(ValueError, match="Tied has no matrix for Muon, .*: use optimizer=adamw"):
        muon(Tied(), lr=0.1)


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


def test_the_line_falls_by_equal_steps_to_its_floor() -> None:
    seen = rates(partial(warmup_linear, warmup_steps=1, total_steps=5, floor=0.5), 7)
    assert seen == pytest.approx([1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0])


@pytest.mark.parametrize(("shape", "half_way"), [("linear", 1.0), ("sqrt", 2.0 * (1 - 0.5**0.5))])
def test_a_wsd_run_is_flat_until_its_last_share_and_ends_on_its_floor(shape: str, half_way: float) -> None:
    seen = rates(partial(warmup_stable_decay, warmup_steps=1, total_steps=10, decay=0.4, shape=shape), 12)
    assert seen[:7] == [1.0, *[2.0] * 6] and seen[8] == pytest.approx(half_way) and seen[10:] == [0.0, 0.0]
    assert 2.0 > seen[7] > seen[8] > seen[9] > 0.0


def test_a_longer_wsd_run_shares_its_trunk_with_the_shorter_one() -> None:
    short, long = (rates(partial(warmup_stable_decay, warmup_steps=2, total_steps=n), 16) for n in (20, 200))
    assert short == long


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": 0.0}, "decay is the share of all steps that ends the run, above 0 and at most 1, not 0.0"),
        ({"decay": 0.9}, r"warmup_steps=3 and a decay of 9 steps \(0.9 of all\) do not fit into total_steps=10"),
        ({"shape": "cubic"}, "shape is one of linear, sqrt, not 'cubic'"),
        ({"total_steps": 3}, "The decay needs steps after the warm-up"),
    ],
)
def test_a_wsd_run_that_cannot_be_is_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        warmup_stable_decay(SGD([torch.zeros(1)], lr=2.0), **{"warmup_steps": 3, "total_steps": 10, **options})


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
