"""What the operators say that they allocate inside, they allocate."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train import flash_attention
from flash_train.diagnostics.cpu_peak import PeakProbe


class Calls(TorchDispatchMode):
    """Keeps the last call of each operator of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "flash_train":
            self.seen[operator.name()] = operator, [x.detach() if isinstance(x, Tensor) else x for x in args]
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "B, H, G, T, D, dtype",
    [
        (1, 4, 4, 1024, 32, torch.float32),
        (2, 6, 2, 300, 64, torch.float32),
        (16, 2, 2, 128, 32, torch.float32),
        (1, 4, 2, 512, 64, torch.bfloat16),
    ],
)
def test_on_a_cpu_the_tiles_are_declared_to_a_tenth(B: int, H: int, G: int, T: int, D: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, T, heads, D, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (H, G, G))
    with Calls() as calls:
        output = flash_attention(q, k, v, causal=True, implementation="tiled")
        output.backward(torch.randn_like(output))
    assert len(calls.seen) == 2
    for name, (operator, arguments) in calls.seen.items():
        probe = PeakProbe()
        probe.start()
        probe.begin("", [])
        results = operator(*arguments)
        peak = probe.stop().overall
        held = peak - sum(x.nbytes for x in results)
        assert operator.workspace_bytes(None, *arguments) == pytest.approx(held, rel=0.1), name
