from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_training import ToyData, ToyModel, language_model, trainer

from flash_train.training import master_weights
from flash_train.training.averaging import EMA
from flash_train.training.master_weights import AdamWWithMasters
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw
from flash_train.training.resume import find_checkpoint
from tests.training.endings import same

WAYS = [{"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}]


def masters_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    assert isinstance(optimizer, AdamWWithMasters)
    found = {name: optimizer.master(p) for name, p in module.named_parameters()}
    return {name: master for name, master in found.items() if master is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_updates_are_those_of_fp32_weights_with_the_same_gradients(
    way: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_weights, "_PORTION", 20)  # of 7, 63 and 9 elements: three portions
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 7))
    half = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 7))
    half.load_state_dict(wide.state_dict())
    half.to(dtype)
    half[1].float()  # the norm stays in fp32, as some models have it
    options = {"lr": 1e-3, "weight_decay": 0.3, "no_decay": ["2.weight"], **way}
    plain, ours = adamw(wide, **options), adamw(half, **options, master_weights=True)
    assert isinstance(ours, AdamWWithMasters)
    ours.begin_from(dict(zip(half.parameters(), [p.detach().clone() for p in wide.parameters()], strict=True)))
    for step in range(5):
        for p, q in zip(half.parameters(), wide.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        if step in (0, 3):  # a parameter without a gradient is left alone
            for net in (half, wide):
                list(net.parameters())[-1].grad = None
        for optimizer in (plain, ours):
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
            optimizer.step()
    for p, q in zip(half.parameters(), wide.parameters(), strict=True):
        master = ours.master(p)
        assert torch.equal(p, q.to(p.dtype)) and (p.dtype == torch.float32) == (master is None)
        assert master is None or torch.equal(master, q)
        assert all(torch.equal(ours.state[p][name], value) for name, value in plain.state[q].items())


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_a_step_is_a_few_operators_for_all_weights_and_reads_none_of_them() -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(20))).bfloat16()
    optimizer = adamw(model, lr=0.1, fused=True, master_weights=True)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    with Launches() as launches:
        optimizer.step()
    work = [name for name in launches.names if name != "empty_like" and not name.startswith("profiler::")]
    of_a_group = ["_foreach_copy_", "_foreach_add_.Scalar", "_fused_adamw_", "_foreach_copy_"]
    assert work == 2 * of_a_group, "matrices and biases are a group each"


class Watch(Callback):
    """The masters when training starts and after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, module: LightningModule) -> None:
        masters = masters_of(module, trainer.optimizers[0])
        assert all(torch.equal(masters[name].bfloat16(), p) for name, p in module.named_parameters())
        self.seen.append({name: master.clone() for name, master in masters.items()})


def module(**options: Any) -> LanguageModel:
    return language_model(optimizer=partial(adamw, lr=0.01, master_weights=True, **options))


def fit(
    folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, optimizer: Any = None, **options: Any
) -> LanguageModel:
    options = {"precision": "bf16-true", "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    training = module(**(optimizer or {}))
    trainer(folder, *callbacks, **options).fit(training, datamodule=ToyData(), ckpt_path=ckpt_path, weights_only=True)
    return training


def test_masters_begin_with_the_weights_that_were_drawn_not_with_what_bf16_left_of_them(tmp_path: Path) -> None:
    watch = Watch()
    fit(tmp_path, watch, max_steps=1)
    drawn = dict(language_model().named_parameters())
    assert all(torch.equal(master, drawn[name]) for name, master in watch.seen[0].items())
    assert not torch.equal(drawn["model.head.weight"], drawn["model.head.weight"].bfloat16().float())


def test_weights_that_were_changed_after_they_were_rounded_are_what_masters_begin_with() -> None:
    model = ToyModel().bfloat16()
    optimizer = adamw(model, lr=0.1, master_weights=True)
    assert isinstance(optimizer, AdamWWithMasters)
    optimizer.begin_from({p: p.detach().float() + 1 for p in model.parameters()})
    masters = masters_of(model, optimizer)
    assert all(torch.equal(masters[name], p.float()) for name, p in model.named_parameters())


@pytest.mark.parametrize("optimizer", [{}, {"fp32_gradients": True}, {"fused": True}], ids=str)
def test_a_resumed_run_goes_on_with_its_masters_bit_for_bit(tmp_path: Path, optimizer: dict[str, bool]) -> None:
    options = {"accumulate_grad_batches": 2, "optimizer": optimizer}
    fit(tmp_path / "whole", max_steps=9, **options)
    fit(tmp_path / "parts", max_steps=5, **options)
    stopped = find_checkpoint(tmp_path / "parts")
    masters = [state["master"] for state in read(stopped)["optimizer_states"][0]["state"].values()]
    assert {x.dtype for x in masters} == {torch.float32}
    assert not any(torch.equal(x, x.bfloat16().float()) for x in masters)
    fit(tmp_path / "parts", max_steps=9, ckpt_path=stopped, **options)
    parts, whole = (read(find_checkpoint(tmp_path / name)) for name in ("parts", "whole"))
    assert all(same(parts[key], whole[key]) for key in ("state_dict", "optimizer_states", "lr_schedulers"))


def read(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_without_masters_goes_on_with_masters_that_are_its_weights(tmp_path: Path, precision: str) -> None:
    watch = Watch()
    before = language_model(optimizer=partial(adamw, lr=0.01))
    trainer(tmp_path, max_steps=3, limit_val_batches=0, precision=precision).fit(before, datamodule=ToyData())
    stopped = find_checkpoint(tmp_path)
    fit(tmp_path, watch, max_steps=4, ckpt_path=stopped)
    weights = read(stopped)["state_dict"]
    assert all(torch.equal(master, weights[name].float()) for name, master in watch.seen[0].items())
    means = [state["exp_avg"] for state in read(find_checkpoint(tmp_path))["optimizer_states"][0]["state"].values()]
    assert {mean.dtype for mean in means} == {torch.float32}


def test_a_group_that_is_added_has_masters_and_a_groups_own_options_hold() -> None:
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = AdamWWithMasters([{"params": [first]}], lr=0.25, fp32_gradients=True)
    optimizer.add_param_group({"params": [second], "maximize": True})
    (first + second).sum().backward()
    optimizer.step()
    assert (first < 1).all() and (second > 1).all()
    for parameter in (first, second):
        master, gradient = optimizer.master(parameter), parameter.grad
        assert master is not None and master.dtype == torch.float32 and torch.equal(master.bfloat16(), parameter)
        assert gradient is not None and gradient.dtype == torch.float32
    with pytest.raises(ValueError, match="amsgrad=True is not for fp32 masters: leave it out, or take torch's AdamW"):
        AdamWWithMasters([{"params": [first], "amsgrad": True}])


def test_an_average_is_of_the_masters(tmp_path: Path) -> None:
    ema, watch = EMA(decay=0.9), Watch()
    fit(tmp_path, ema, watch, max_steps=4)
    expected = watch.seen[0]
    for masters in watch.seen[1:]:
        expected = {name: 0.9 * expected[name] + 0.1 * master for name, master in masters.items()}
    torch.testing.assert_close(ema.average, expected, rtol=1e-6, atol=1e-8)


def test_gradients_of_micro_batches_are_added_in_bf16_or_in_fp32() -> None:
    inputs = torch.randn(16, 4, 5).bfloat16()
    totals = {}
    for fp32_gradients in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(5, 3, bias=False).bfloat16()
        adamw(model, lr=0.1, master_weights=True, fp32_gradients=fp32_gradients)
        parts = []
        for rows in inputs:
            before = torch.zeros(()) if model.weight.grad is None else model.weight.grad.clone()
            model(rows).square().sum().backward()
            assert model.weight.grad is not None
            parts.append(model.weight.grad.double() - before.double())
        totals[fp32_gradients] = model.weight.grad
    exact = torch.stack(parts).sum(0)  # of the last, in fp32, whose differences are what came in
    errors = {way: float((total.double() - exact).norm() / exact.norm()) for way, total in totals.items()}
    assert totals[False].dtype == torch.bfloat16 and totals[True].dtype == torch.float32
    assert errors[True] < 1e-6 and errors[False] > 1e-3, errors


def test_fp32_gradients_without_masters_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32_gradients=True needs master_weights=True"):
        adamw(ToyModel(), lr=0.1, fp32_gradients=True)
