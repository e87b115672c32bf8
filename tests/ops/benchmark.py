"""Times the op beside SDPA's back ends on a GPU, interleaved in one process: python -m tests.ops.benchmark"""

from collections.abc import Callable
from statistics import median

import torch
from triton.testing import do_bench

from flash_train.ops.attention import flash_attention
from tests.ops.errors import relative_error

NAMES = ("flash", "sdpa", "sdpa_cudnn")
SHAPES = [  # B, H, T, D, causal
    (32, 16, 512, 128, True),
    (8, 16, 2048, 128, True),
    (2, 16, 8192, 128, True),
    (1, 16, 16384, 128, True),
    (2, 16, 8192, 128, False),
    (32, 32, 512, 64, True),
    (8, 32, 2048, 64, True),
    (2, 32, 8192, 64, True),
    (1, 32, 16384, 64, True),
    (2, 32, 8192, 64, False),
    (32, 12, 1024, 64, True),
    (2, 8, 8192, 256, True),
]


def calls(B: int, H: int, T: int, D: int, causal: bool) -> dict[tuple[str, str], Callable[[], object]]:
    """(implementation, direction) -> what to time, bf16; the outputs agree, or there is nothing to time."""
    *leaves, do = (
        torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(4)
    )
    do = do.detach()
    timed: dict[tuple[str, str], Callable[[], object]] = {}
    first = None
    for name in NAMES:

        def forward(name: str = name) -> torch.Tensor:
            return flash_attention(*leaves, causal=causal, implementation=name)

        output = forward()
        first = output if first is None else first
        assert relative_error(output, first) < 0.01, name
        timed[name, "forward"] = forward
        timed[name, "backward"] = lambda output=output: torch.autograd.grad(output, leaves, do, retain_graph=True)
    return timed


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, "TFLOP/s forward / backward")
    for shape in SHAPES:
        B, H, T, D, causal = shape
        timed = calls(*shape)
        rounds = {key: [] for key in timed}
        for _ in range(3):
            for key, call in timed.items():
                rounds[key].append(do_bench(call, warmup=5, rep=25, return_mode="median"))
        flops = 4 * B * H * T * T * D / (2 if causal else 1)
        tera = {key: flops * (2.5 if key[1] == "backward" else 1) / median(ms) / 1e9 for key, ms in rounds.items()}
        speeds = [f"{name} {tera[name, 'forward']:.0f} / {tera[name, 'backward']:.0f}" for name in NAMES]
        print(f"B{B} H{H} T{T} D{D} {'causal' if causal else 'full'}:", ",  ".join(speeds), flush=True)


if __name__ == "__main__":
    main()
