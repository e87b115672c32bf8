"""Times the op on a GPU, in one process, the contestants interleaved: python -m tests.ops.benchmark [features]

Without an argument, beside SDPA's back ends at twelve shapes; with `features`, what windows, documents and the other
features cost and save, and the host's time for a short call.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from flash_train.ops.attention import Documents, Mask, Score, flash_attention, flash_attention_packed
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


def inputs(B: int, H: int, T: int, D: int) -> tuple[list[Tensor], Tensor]:
    """([q, k, v], dO): [B, T, H, D] in bf16, seen as [B, H, T, D]."""
    *leaves, do = (
        torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(4)
    )
    return leaves, do.detach()


def milliseconds(call: Callable[[], object]) -> float:
    median_time = do_bench(call, warmup=5, rep=25, return_mode="median")
    assert isinstance(median_time, float)
    return median_time


def backward(output: Tensor, leaves: list[Tensor], do: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(output, leaves, do, retain_graph=True)


def calls(B: int, H: int, T: int, D: int, causal: bool) -> dict[tuple[str, str], Callable[[], object]]:
    """(implementation, direction) -> what to time, bf16; the outputs agree, or there is nothing to time."""
    leaves, do = inputs(B, H, T, D)
    timed: dict[tuple[str, str], Callable[[], object]] = {}
    first = None
    for name in NAMES:

        def forward(name: str = name) -> Tensor:
            return flash_attention(*leaves, causal=causal, implementation=name)

        output = forward()
        first = output if first is None else first
        assert relative_error(output, first) < 0.01, name
        timed[name, "forward"] = forward
        timed[name, "backward"] = backward(output, leaves, do)
    return timed


def shapes() -> None:
    print("TFLOP/s forward / backward")
    for shape in SHAPES:
        B, H, T, D, causal = shape
        timed = calls(*shape)
        rounds = {key: [] for key in timed}
        for _ in range(3):
            for key, call in timed.items():
                rounds[key].append(milliseconds(call))
        flops = 4 * B * H * T * T * D / (2 if causal else 1)
        tera = {key: flops * (2.5 if key[1] == "backward" else 1) / median(ms) / 1e9 for key, ms in rounds.items()}
        speeds = [f"{name} {tera[name, 'forward']:.0f} / {tera[name, 'backward']:.0f}" for name in NAMES]
        print(f"B{B} H{H} T{T} D{D} {'causal' if causal else 'full'}:", ",  ".join(speeds), flush=True)


def long_sequences(T: int = 16384, part: int = 1024) -> None:
    print(f"T{T}, ms forward, replayed from a CUDA graph / forward / backward, and how many times as fast as causal")
    documents = Documents.from_ids((torch.arange(T, device="cuda") // part)[None])
    ends = torch.arange(0, T + 1, part, device="cuda", dtype=torch.int32)
    masks = {
        "causal": Mask(causal=True),
        f"window of {part}": Mask(causal=True, window=(part - 1, 0)),
        f"documents of {part}": Mask(causal=True, documents=documents),
    }
    for D, H in ((128, 16), (64, 32)):
        leaves, do = inputs(1, H, T, D)
        packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in leaves]
        timed: dict[str, tuple[Callable[[], Tensor], list[Tensor], Tensor]] = {
            name: (lambda mask=mask, leaves=leaves: flash_attention(*leaves, mask=mask), leaves, do)
            for name, mask in masks.items()
        }
        timed[f"packed documents of {part}"] = (
            lambda q=packed[0], k=packed[1], v=packed[2]: flash_attention_packed(q, k, v, ends, ends, causal=True)[0],
            packed,
            do[0].transpose(0, 1),
        )
        whole: list[float] = []
        for name, (forward, wanted, gradient) in timed.items():
            with torch.no_grad():
                replay = do_bench_cudagraph(forward, rep=50)
            assert isinstance(replay, float)
            times = [replay, milliseconds(forward), milliseconds(backward(forward(), wanted, gradient))]
            whole = whole or times
            ratios = " / ".join(f"{a / b:.1f}" for a, b in zip(whole, times, strict=True))
            print(f"D{D} H{H} {name}:", " / ".join(f"{x:.3f}" for x in times) + f", {ratios}", flush=True)


def features(B: int = 2, H: int = 16, T: int = 8192, D: int = 128) -> None:
    print(f"B{B} H{H} T{T} D{D} causal, ms forward / backward")
    leaves, do = inputs(B, H, T, D)
    bias = torch.randn(1, H, T, T, device="cuda", dtype=torch.bfloat16)
    learned = bias.detach().requires_grad_()
    allowed = torch.rand(1, 1, T, T, device="cuda") > 0.1
    per_head = torch.rand(H, device="cuda")
    causal = Mask(causal=True)
    for name, mask, score, dropout in (
        ("plain", causal, Score(), 0.0),
        ("sinks", causal, Score(sinks=per_head), 0.0),
        ("ALiBi", causal, Score(alibi_slopes=per_head), 0.0),
        ("dropout", causal, Score(), 0.1),
        ("soft cap", causal, Score(soft_cap=50.0), 0.0),
        ("bias", causal, Score(bias=bias), 0.0),
        ("bias and its gradient", causal, Score(bias=learned), 0.0),
        ("boolean mask", Mask(causal=True, allowed=allowed), Score(), 0.0),
    ):

        def forward(mask: Mask = mask, score: Score = score, dropout: float = dropout) -> Tensor:
            return flash_attention(*leaves, mask=mask, score=score, dropout=dropout)

        wanted = [*leaves, learned] if score.bias is learned else leaves
        print(f"{name}: {milliseconds(forward):.3f} / {milliseconds(backward(forward(), wanted, do)):.3f}", flush=True)


def host_time(B: int = 1, H: int = 12, T: int = 128, D: int = 64, count: int = 300) -> None:
    print(f"B{B} H{H} T{T} D{D} causal, host microseconds a call, forward / backward")
    leaves, do = inputs(B, H, T, D)
    for name in ("flash", "sdpa"):

        def forward(name: str = name) -> Tensor:
            return flash_attention(*leaves, causal=True, implementation=name)

        spent = []
        for call in (forward, backward(forward(), leaves, do)):
            for _ in range(30):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            spent.append((time.perf_counter() - start) / count * 1e6)
            torch.cuda.synchronize()
        print(f"{name}: {spent[0]:.0f} / {spent[1]:.0f}", flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    if sys.argv[1:] == ["features"]:
        long_sequences()
        features()
        host_time()
    else:
        shapes()
