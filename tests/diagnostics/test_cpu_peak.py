"""The CPU probe sees each byte, also inside an op that a dispatch mode takes for one call."""

import pytest
import torch
from torch import Tensor, nn

from flash_train.diagnostics.cpu_peak import PeakProbe, storages


@torch.library.custom_op("flash_train_tests::with_temporary", mutates_args=())
def with_temporary(x: Tensor, size: int) -> Tensor:
    temporary = torch.empty(size, dtype=torch.uint8)
    del temporary
    return x.clone()


def test_the_peak_is_exact_to_the_byte_with_temporaries_inside_ops() -> None:
    x = torch.ones(101)  # 404 bytes
    probe = PeakProbe()
    probe.start()
    probe.begin("forward", [x])
    y = with_temporary(x, 12_347)
    probe.mark("backward")
    z = torch.cat([y, y])
    del y
    probe.mark("optimizer")
    del z
    probe.mark("")
    outside = torch.empty(100_003, dtype=torch.uint8)
    del outside
    peak = probe.stop()
    assert peak.phases == {"forward": 404 + 12_347, "backward": 404 + 404 + 808, "optimizer": 404 + 808}
    assert peak.overall == 404 + 100_003


def test_gradients_that_the_step_before_left_are_counted_until_they_are_released() -> None:
    weight = nn.Parameter(torch.ones(1000))  # 4000 bytes
    probe = PeakProbe()
    probe.start()
    (weight * 2).sum().backward()
    probe.begin("forward", [weight])
    probe.mark("backward")
    weight.grad = None
    probe.mark("optimizer")
    peak = probe.stop()
    assert peak.phases == {"forward": 8000, "backward": 8000, "optimizer": 4000}


def test_blocks_of_an_earlier_probe_do_not_disturb_a_later_one() -> None:
    def peak_of(size: int) -> int:
        probe = PeakProbe()
        probe.start()
        probe.begin("forward", [])
        kept.append(torch.empty(size, dtype=torch.uint8))
        return probe.stop().overall

    kept: list[Tensor] = []
    assert peak_of(1_000_003) == 1_000_003
    kept.clear()  # released unseen: the allocator still believes in it
    for _ in range(20):
        kept.append(torch.empty(1_000_003, dtype=torch.uint8))
        kept.clear()
    assert peak_of(101) == 101


def test_held_memory_is_parameters_buffers_gradients_and_optimizer_state_once_each() -> None:
    module = nn.Linear(7, 11)
    module.register_buffer("table", torch.zeros(13))
    module.cache = torch.zeros(3)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    parameters = (7 * 11 + 11) * 4
    steps = 2 * 4
    held = storages([module, optimizer, {"again": module.weight[0]}])
    assert sum(held.values()) == 4 * parameters + steps + 13 * 4 + 3 * 4


def test_it_refuses_to_run_inside_another_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        with pytest.raises(RuntimeError, match="another one is running"):
            PeakProbe().start()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    old = torch.ones(10)
    probe = PeakProbe()
    probe.start()
    del old
    probe.begin("forward", [])
    probe.stop()
    assert capfd.readouterr() == ("", "")
