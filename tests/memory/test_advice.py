"""memory_advice: every effect is that of a step that was predicted or recorded, and what fits comes first."""

import doctest
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_train.memory import advice as advice_module
from flash_train.memory.advice import Advisory, memory_advice, modelled_advice
from flash_train.memory.changes import Advice
from flash_train.memory.levers import blocks_of, map_tensors, optimizer_like, rows_of
from flash_train.memory.predict import predict_peak
from tests.memory.toys import Foreign, Language, adam, tokens

B, T = 12, 256


def advise(module: nn.Module, batch: Any = None, **settings: Any) -> Advisory:
    batch = tokens(B, T) if batch is None else batch
    return memory_advice(module, batch, **{"optimizer": adam, "precision": "bf16-mixed"} | settings)


def named(advisory: Advisory, start: str) -> Advice:
    return next(advice for advice in advisory.advice if advice.change.startswith(start) and " + " not in advice.change)


class Wide(Language):
    """With a large vocabulary."""

    def __init__(self, implementation: str) -> None:
        super().__init__(implementation)
        self.wide = nn.Linear(101, 4001)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.wide(self.model(batch["inputs"]).flatten(0, 1))
        return nn.functional.cross_entropy(logits, batch["targets"].flatten())


@pytest.fixture(scope="module")
def wide() -> Advisory:
    return advise(Wide("naive"), tokens(8, 512))


@pytest.fixture(scope="module")
def naive() -> Advisory:
    return advise(Language("naive"))


def test_what_is_run_again_is_what_would_be_predicted(naive: Advisory) -> None:
    def peak(module: nn.Module, batch: Any = None, **settings: Any) -> int:
        batch = tokens(B, T) if batch is None else batch
        return predict_peak(module, batch, **{"optimizer": adam, "precision": "bf16-mixed"} | settings).peak

    whole = peak(Language("naive"))
    assert naive.breakdown.peak.measured == whole and naive.limit is None
    for start, changed in (
        ("6 rows instead of 12, 2 accumulated", peak(Language("naive"), tokens(6, T), accumulate=2)),
        ("checkpointing of each block", peak(Language("naive", "block"))),
    ):
        advice = named(naive, start)
        assert (advice.peak, advice.saves, advice.basis) == (changed, whole - changed, "re-run"), start
    halves = predict_peak(Language("naive"), tokens(B, T), optimizer=adam, precision="bf16-true").peak
    assert named(naive, "precision bf16-true").peak == halves
    # By rule of thumb it would have halved something: autocast's copies of scores in fp32 are more than fp32 takes.
    assert not any("bf16" in advice.change for advice in advise(Language("naive"), precision="32-true").advice)


def test_flash_is_modelled_and_is_near_what_it_really_saves(naive: Advisory) -> None:
    flash = named(naive, "flash attention in model.blocks.0.attention and 1 more")
    really = naive.breakdown.peak.measured - predict_peak(
        Language("flash"), tokens(B, T), optimizer=adam, precision="bf16-mixed"
    ).peak  # fmt: skip
    assert flash.basis == "modelled" and flash.saves == pytest.approx(really, rel=0.05)
    assert list(naive.breakdown.peak.culprits)[0] == "score matrices" and flash.then == "activations"


def test_without_a_limit_the_largest_saving_comes_first_and_nothing_is_said_to_fit(naive: Advisory) -> None:
    savings = [advice.saves for advice in naive.advice]
    assert savings == sorted(savings, reverse=True) and {advice.fits for advice in naive.advice} == {None}


def test_what_fits_comes_first_and_of_that_what_costs_nothing(naive: Advisory) -> None:
    flash = named(naive, "flash")
    advisory = advise(Language("naive"), limit=round(1.05 * flash.peak))
    first, *rest = advisory.advice
    assert first.change == flash.change and first.fits
    fitting = [bool(advice.fits) for advice in advisory.advice]
    assert fitting == sorted(fitting, reverse=True)
    # As few rows as it takes, and no fewer.
    rows = next(advice for advice in rest if "rows instead" in advice.change or "row instead" in advice.change)
    left = int(rows.change.split()[0])
    more = [size for size in (6, 4, 3, 2) if size > left]
    assert rows.fits and all(
        1.04 * predict_peak(Language("naive"), tokens(size, T), optimizer=adam, precision="bf16-mixed",
                            accumulate=B // size).peak > round(1.05 * flash.peak)
        for size in more
    )  # fmt: skip


def test_where_nothing_fits_alone_the_fewest_changes_that_do_together_come_first(naive: Advisory) -> None:
    alone = min(advice.peak for advice in naive.advice if "row" not in advice.change)
    batch = tokens(1, B * T)  # no fewer rows
    whole = advise(Language("naive"), batch)
    limit = round(1.04 * min(advice.peak for advice in whole.advice)) - 2**16
    first, *rest = advise(Language("naive"), batch, limit=limit).advice
    assert " + " in first.change and first.fits and not any(advice.fits for advice in rest)
    assert first.basis == "modelled + re-run" and alone
    hopeless, *_ = advise(Language("naive"), batch, limit=2**20).advice
    assert hopeless.fits is False and hopeless.change.count(" + ") >= first.change.count(" + ")


def test_changes_that_cost_nothing_go_together_before_one_that_costs(wide: Advisory) -> None:
    both = wide.breakdown.both_save
    assert both is not None
    left = max(phase.measured - both.phases[name] for name, phase in wide.breakdown.phases.items())
    first, second, *_ = advise(Wide("naive"), tokens(8, 512), limit=round(1.05 * left)).advice
    assert first.fits and first.peak == left and first.basis == "modelled"
    assert first.change.startswith(("cross-entropy over 2,048 rows at a time + flash", "flash attention in"))
    assert second.fits and second.basis == "re-run"


def test_what_cannot_be_changed_is_said_with_the_reason_and_so_is_want_of_time() -> None:
    class Picky(nn.Linear):
        def training_step(self, batch: Tensor) -> Tensor:
            if batch.shape[0] < 8:
                raise RuntimeError("eight rows at least")
            return self(batch).square().mean()

    advisory = advise(Picky(64, 64), torch.empty(8, 64))
    assert "4 rows instead of 8, 2 accumulated: eight rows at least" in advisory.left_out
    assert "checkpointing of each block: Picky has no list of blocks of one class to checkpoint" in advisory.left_out
    hurried = advise(Language("naive"), seconds=1e-9)
    assert "checkpointing of each block: there was no time left" in hurried.left_out
    assert [advice.basis for advice in hurried.advice] == ["modelled"] * len(hurried.advice) and hurried.advice


def test_a_recorded_step_gives_what_is_modelled_without_another(naive: Advisory) -> None:
    modelled = modelled_advice(naive.breakdown)
    assert modelled.advice == tuple(advice for advice in naive.advice if advice.basis == "modelled")


def test_after_flash_the_logits_are_the_next_culprit() -> None:
    advisory = advise(Wide("flash"), tokens(32, 256))
    assert list(advisory.breakdown.peak.culprits)[0] == "logits and their loss"
    assert named(advisory, "cross-entropy over 2,048 rows at a time").basis == "modelled"


def test_foreign_blocks_are_found_and_checkpointed() -> None:
    module = Foreign()
    assert list(blocks_of(module)) == list(module.body.layers)
    assert list(blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []
    batch = tuple(torch.randint(101, (8, 128)) for _ in range(2))
    assert named(advise(module, batch), "checkpointing").saves > 0


def test_transformers_checkpoints_its_own_models() -> None:
    transformers = pytest.importorskip("transformers")

    class Pretrained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=50, n_positions=128)
            self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

        def training_step(self, batch: Any) -> Tensor:
            return self.model(**batch).loss

    ids = torch.zeros(4, 128, dtype=torch.int64)
    advisory = advise(Pretrained(), UserDict(input_ids=ids, labels=ids))
    assert named(advisory, "checkpointing").saves > 0 and named(advisory, "flash attention in model.transformer.h.0")


def test_a_batch_may_be_any_tree() -> None:
    @dataclass(frozen=True, slots=True)
    class Sample:
        x: Tensor
        name: str

    x = torch.ones(6, 2)
    batch = {"a": [UserDict(x=x), Sample(x, "s")], "scale": torch.tensor(1.0), "n": None}
    assert rows_of(batch) == 6 and rows_of({"x": x, "y": x[:2]}) is None
    halved = map_tensors(lambda y: y[:3] if y.dim() else y, batch)
    assert halved["a"][0]["x"].shape == halved["a"][1].x.shape == (3, 2) and halved["a"][1].name == "s"
    assert batch["a"][0]["x"] is x  # pyright: ignore


def test_an_optimizer_is_made_again_with_its_groups() -> None:
    module, other = nn.Linear(2, 3), nn.Linear(2, 3)
    groups: Any = [{"params": [module.weight], "lr": 0.5}, {"params": [module.bias], "weight_decay": 0.25}]
    made = optimizer_like(torch.optim.AdamW(groups, lr=0.125), module)(other)
    first, second = made.param_groups
    assert first["params"] == [other.weight] and (first["lr"], second["lr"], second["weight_decay"]) == (
        0.5,
        0.125,
        0.25,
    )


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="phase must be forward, backward, optimizer, validation or None, got 'step'"):
        advise(Language("naive"), phase="step")
    with pytest.raises(ValueError, match="Language has no validation_step: there is nothing to validate"):
        advise(Language("naive"), phase="validation")


@pytest.mark.parametrize(
    "wrong", [{"limit": "24GiB"}, {"limit": 2.0}, {"limit": -1}, {"seconds": "x"}, {"seconds": -1}]
)
def test_a_limit_is_bytes_and_seconds_are_a_number(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be a number .*, got {wrong[name]!r}: "):
        advise(Language("naive"), **wrong)


def test_the_documented_example_runs() -> None:
    answer = doctest.testmod(advice_module)
    assert answer.attempted >= 4 and answer.failed == 0
