"""What is counted, is what torch allocates."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from flash_train.diagnostics.cpu_peak import PeakProbe
from flash_train.memory.live import CATEGORIES, LiveBytes
from tests.memory.toys import Language, adam, take_real_steps, tokens


def test_a_block_lives_from_its_operator_to_the_death_of_its_last_view() -> None:
    with LiveBytes(nn.Identity()) as live:
        live.enter("one")
        x = torch.empty(100)
        view = x[::2].t()
        del x
        live.enter("two")
        y = torch.empty(50, dtype=torch.float64)
        del view, y
        live.enter("three")
    assert {name: peak.size for name, peak in live.peaks().items()} == {"one": 400, "two": 800, "three": 0}
    assert [peak.blocks[0].phase for peak in list(live.peaks().values())[:2]] == ["one", "one"]


def test_sizes_are_rounded_up_one_by_one() -> None:
    with LiveBytes(nn.Identity()) as live:
        live.enter("only")
        kept = [torch.empty(1), torch.empty(129)]
    assert live.peaks(rounded_to=512)["only"].size == 512 + 1024
    assert len(kept) == 2


def test_what_an_operator_takes_and_gives_back_is_in_the_peak_and_not_after_it() -> None:
    def inside(operator: object, *_: object) -> int:
        return 1000 if operator is torch.ops.aten.neg.default else 0

    x = torch.empty(10)
    with LiveBytes(nn.Identity(), inside=inside) as live:
        live.hold("inputs", [x])
        live.enter("one")
        y = -x
        live.enter("two")
        del y
    one, two = live.peaks().values()
    assert (one.size, two.size) == (1080, 80)
    assert one.categories["workspaces"] == 1000


def test_each_block_knows_its_shape_its_operator_and_the_module_that_made_it() -> None:
    module = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU())
    with LiveBytes(module) as live:
        live.hold("parameters", module)
        live.enter("forward")
        y = module(torch.ones(7, 3))
        del y
    found = {(block.shape, block.operation, block.module) for block in live.peaks()["forward"].blocks}
    assert {((7, 5), "aten.mm.default", "0"), ((7, 5), "aten.relu.default", "1"), ((5, 3), "", "")} <= found


@pytest.mark.parametrize("implementation", ["naive", "sdpa"])
def test_a_real_step_peaks_where_the_allocators_own_events_say(implementation: str) -> None:
    batch, module = tokens(), Language(implementation)
    live = take_real_steps(module, batch, adam)
    probe, optimizer = PeakProbe(), adam(module)
    probe.start()
    for step in range(2):
        if step == 1:
            probe.begin("forward", [module, optimizer, batch])
        loss = module.training_step(batch)
        optimizer.zero_grad()
        probe.mark("backward" if step else "")
        loss.backward()
        probe.mark("optimizer" if step else "")
        optimizer.step()
        del loss
    allocator = probe.stop()
    for phase in ("forward", "backward"):  # what the update's kernels take on a CPU is inside of operators
        assert live.peaks()[phase].size == pytest.approx(allocator.phases[phase], rel=0.02), phase


def test_categories_are_what_they_are_called() -> None:
    batch, module = tokens(), Language("naive")
    peak = take_real_steps(module, batch, adam).peaks()["forward"]
    parameters = sum(4 * p.numel() for p in module.parameters())
    counted = 4 * len(list(module.parameters()))  # Adam's own step counters
    assert peak.categories["parameters"] == peak.categories["gradients"] == parameters
    assert peak.categories["optimizer state"] == 2 * parameters + counted
    assert peak.categories["inputs"] == 2 * 8 * batch["inputs"].numel()
    assert sum(peak.categories.values()) == peak.size == sum(block.size for block in peak.blocks)
    assert tuple(peak.categories) == CATEGORIES


def test_activations_are_what_autograd_saves() -> None:
    batch, module = tokens(), Language("naive")
    known = {p.untyped_storage().data_ptr() for p in [*module.parameters(), *batch.values()]}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss = module.training_step(batch)
    by_autograd = sum(size for address, size in saved.items() if address not in known)
    with LiveBytes(module) as live:
        live.hold("parameters", module)
        live.hold("inputs", batch)
        live.enter("forward")
        again = module.training_step(batch)
        live.hold_activations()
        live.enter("backward")
    assert live.peaks()["backward"].categories["activations"] == by_autograd + 4  # and the loss itself
    assert loss.isfinite() and again.isfinite()
