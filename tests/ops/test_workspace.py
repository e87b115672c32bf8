"""What the operators say that they allocate inside, they allocate."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train import Mask, flash_attention
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


@pytest.mark.parametrize(("D", "H"), [(512, 4), (192, 8), (64, 4)])
def test_on_a_hopper_gpu_every_size_of_heads_has_a_number_and_grouped_heads_and_documents_take_more(D, H) -> None:
    def declared(G: int, documents: Tensor | None) -> list[int]:
        q, k, v = (torch.randn(1, T, heads, D).bfloat16().transpose(1, 2).requires_grad_() for heads in (H, G, G))
        with Calls() as calls:
            output = flash_attention(q, k, v, mask=Mask(causal=True, documents=documents), implementation="flash")
            output.sum().backward()
        return [operator.workspace_bytes((9, 0), *arguments) for operator, arguments in calls.seen.values()]

    T = 40
    plain, grouped = declared(H, None), declared(1, None)
    packed = declared(H, torch.zeros(1, T, dtype=torch.int64))
    assert plain[0] == grouped[0] == 0 and (packed[0] > 0) == (D <= 256)
    shares = 2 * H * T * 2 * D  # a dK and a dV of each query head's programs, bf16
    assert grouped[1] - plain[1] == (shares if D <= 256 else 0) and (packed[1] > plain[1]) == (D <= 256)
