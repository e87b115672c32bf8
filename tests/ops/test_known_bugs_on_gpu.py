"""The kinds of bugs in `test_known_bugs.py` that only a GPU can show: sizes, graphs, streams, devices, first calls."""

import importlib
import math
import os
import pkgutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.autograd import grad

from flash_train.ops import kernels
from flash_train.ops.attention import Mask, Score, flash_attention, flash_attention_packed
from flash_train.ops.attention import flash_attention_with_lse as with_lse
from tests.ops.tensors import packed, qkv

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SLIDING = Mask(window=(40, 0))  # so that long sequences cost little


@pytest.fixture
def big_memory():
    """For sizes past 2^31 elements; what one test holds is given back before the next."""
    if torch.cuda.get_device_properties(0).total_memory < 130 * 2**30:
        pytest.skip("needs a GPU of 140 GB")
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def halves(*shape: int) -> torch.Tensor:
    """Random bf16, made without a larger temporary."""
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()


def last_rows_agree(output, lse, leaves, do, part, mask):
    """Output, log-sum-exp and gradients of the batch's last part, against the part computed alone."""
    gradients = grad(output, leaves, do)
    small = [x.detach()[part].clone().requires_grad_() for x in leaves]
    expected, expected_lse = with_lse(*small, mask=mask, deterministic=True)
    assert torch.equal(output[part], expected) and torch.equal(lse[part], expected_lse)
    for a, b in zip(gradients, grad(expected, small, do[part]), strict=True):
        assert torch.equal(a[part], b)


@pytest.mark.parametrize(("B", "T", "D"), [(1030, 16384, 128), (2, 2**23 + 37, 128)], ids=["many rows", "long rows"])
def test_tensors_of_more_than_two_to_the_31_elements(big_memory, B, T, D):  # flash-attention #2611, pytorch #190857
    leaves = [halves(B, 1, T, D).requires_grad_() for _ in range(3)]
    assert leaves[0].numel() > 2**31
    output, lse = with_lse(*leaves, mask=SLIDING, deterministic=True)
    last_rows_agree(output, lse, leaves, halves(1, 1, 1, D).expand(B, 1, T, D), slice(-1, None), SLIDING)


def test_a_log_sum_exp_of_more_than_two_to_the_31_elements(big_memory):
    B, T, S = 2**25 + 3, 64, 2  # few keys: the copies of q and dO, in rows of 16 bytes, take 32 GiB each
    leaves = [halves(B, 1, rows, 1).requires_grad_() for rows in (T, S, S)]
    output, lse = with_lse(*leaves, deterministic=True)
    assert lse.numel() > 2**31
    last_rows_agree(output, lse, leaves, halves(1, 1, T, 1).expand(B, 1, T, 1), slice(-5, None), Mask())


def test_a_bias_and_a_mask_of_more_than_two_to_the_31_elements(big_memory):
    T = 46400
    q, k, v = leaves = [halves(1, 1, T, 16).requires_grad_() for _ in range(3)]
    bias = halves(1, 1, T, T).requires_grad_()
    allowed = torch.ones(1, 1, T, T, dtype=torch.bool, device="cuda")
    allowed[..., -3:, :] = torch.rand(3, T, device="cuda") < 0.5
    assert bias.numel() > 2**31
    output = flash_attention(*leaves, mask=Mask(allowed=allowed), score=Score(bias=bias))
    do = halves(1, 1, T, 16)
    dq, dbias = grad(output, (q, bias), do)
    part = [q.detach()[:, :, -3:].clone().requires_grad_(), bias.detach()[..., -3:, :].clone().requires_grad_()]
    expected = flash_attention(
        part[0], k.detach(), v.detach(), mask=Mask(allowed=allowed[..., -3:, :]), score=Score(bias=part[1])
    )
    expected_dq, expected_dbias = grad(expected, part, do[:, :, -3:])
    for a, b in ((output, expected), (dq, expected_dq), (dbias, expected_dbias)):
        torch.testing.assert_close(a[:, :, -3:], b, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(("B", "H"), [(70_001, 1), (1, 70_001), (17, 4099)])
def test_more_batch_rows_and_heads_than_65535(B, H):  # a grid's limit in every dimension but the first
    leaves = [halves(B, H, 17, 16).requires_grad_() for _ in range(3)]
    output, lse = with_lse(*leaves, causal=True, deterministic=True)
    do = halves(B, H, 17, 16)
    last = (slice(-1, None), slice(-1, None))
    last_rows_agree(output, lse, leaves, do, last, Mask(causal=True))


def blank(T: int, S: int) -> list[torch.Tensor]:
    """q, k, v of which the output is p itself, all p being equal."""
    eye = torch.eye(S, device="cuda").expand(1, 2, S, S).clone().requires_grad_()
    return [torch.zeros(1, 2, n, 16, device="cuda", requires_grad=True) for n in (T, S)] + [eye]


def test_a_cuda_graph_drops_other_elements_at_each_replay():  # flash-attention #2088: a constant seed
    leaves, T, S = blank(100, 64), 100, 64
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())

    def step():
        output = flash_attention(*leaves, dropout=0.5)
        return output.detach(), grad(output.sum(), leaves[2])[0]

    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        output, dv = step()
    masks = []
    for _ in range(5):
        graph.replay()
        masks.append((output > 0).clone())
        # dv = p^T 1: the backward dropped what the forward dropped
        torch.testing.assert_close(dv[..., 0], output.sum(-2), rtol=1e-5, atol=1e-5)
        assert 0.45 < masks[-1].float().mean().item() < 0.55
    for a, b in zip(masks, masks[1:], strict=False):
        assert 0.45 < (a == b).float().mean().item() < 0.55
    assert output.shape == (1, 2, T, S)


def test_a_cuda_graph_captures_every_feature_and_replays_on_new_data():  # triton #10596, pytorch #100196
    leaves, cu_seqlens = packed((70, 0, 131), (33, 60, 88), D=64, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(6, 1, 181, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sinks = torch.randn(6, device="cuda", requires_grad=True)
    allowed = torch.rand(201, 181, device="cuda") < 0.8
    leaves = [*leaves, bias, sinks]
    slopes = torch.linspace(0.01, 0.1, 6, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step():
        score = Score(soft_cap=20.0, alibi_slopes=slopes, bias=bias, sinks=sinks)
        mask = Mask(window=(50, 0), allowed=allowed)
        output, lse = flash_attention_packed(*leaves[:3], *cu_seqlens, mask=mask, score=score)
        return [output.detach(), lse.detach(), *grad(output.float().square().sum(), leaves)]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for x in leaves:
        x.detach().copy_(torch.randn_like(x))
    for x, new in zip(cu_seqlens, ([0, 100, 150, 201], [0, 10, 90, 181]), strict=True):
        x.copy_(torch.tensor(new))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@TWO_GPUS
def test_the_tensors_device_is_used_whichever_is_current():  # triton #2441, pytorch #124565
    expected = None
    for device in ("cuda:0", "cuda:1"):
        leaves = [x.to(device).detach().requires_grad_() for x in qkv(T=130, S=130, D=64, dtype=torch.bfloat16)]
        with torch.cuda.device(0):
            output, lse = with_lse(*leaves, causal=True, dropout=0.0)
            results = [output, lse, *grad(output.sum(), leaves)]
        assert all(x.device == torch.device(device) for x in results)
        assert torch.cuda.current_device() == 0
        results = [x.cpu() for x in results]
        expected = expected or results
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@TWO_GPUS
def test_two_gpus_in_two_threads():
    found = {}

    def work(device):
        leaves = [x.to(device).detach().requires_grad_() for x in qkv(T=130, S=130, D=64, dtype=torch.bfloat16)]
        for _ in range(20):
            output = flash_attention(*leaves, causal=True)
            found[device] = [x.cpu() for x in (output, *grad(output.sum(), leaves))]

    threads = [threading.Thread(target=work, args=(device,)) for device in ("cuda:0", "cuda:1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found["cuda:0"], found["cuda:1"], strict=True))


def test_the_current_stream_is_used():
    leaves = [x.requires_grad_() for x in qkv(T=130, S=130, D=64, dtype=torch.bfloat16, device="cuda")]
    expected = flash_attention(*leaves, causal=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: 0.05 s
        late = [x + 0 for x in leaves]  # ready after the sleep, on this stream alone
        output = flash_attention(*late, causal=True)
    assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    assert torch.equal(output, expected)


def test_no_length_compiles_a_kernel_anew():  # triton #9401, pytorch #176920
    from triton import knobs

    def step(T, S, B=2):
        leaves = qkv(B=B, T=T, S=S, D=64, dtype=torch.bfloat16, device="cuda")
        grad(flash_attention(*leaves, causal=True).sum(), leaves)

    step(100, 100)
    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **known: compiled.append(known["repr"])
    try:
        for T, S, B in ((1, 1, 1), (16, 16, 2), (17, 1, 3), (128, 128, 1), (129, 77, 2), (1, 1000, 16), (1024, 48, 5)):
            step(T, S, B)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


FIRST_CALL = """
import time
start = time.perf_counter()
import torch
{imported}
q = torch.randn(2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
{call}
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call(cache, imported="from flash_train import flash_attention", call="flash_attention(q, q, q, causal=True)"):
    """Seconds from the start of a process to its first output."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    script = FIRST_CALL.format(imported=imported, call=call)
    return float(
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
    )


def test_the_first_call_takes_seconds_and_the_next_process_hardly_longer_than_torch(tmp_path):
    cold, warm = first_call(tmp_path), first_call(tmp_path)
    torchs = first_call(tmp_path, "", "torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)")
    assert cold < 10 and warm < torchs + 1, f"cold {cold:.1f} s, warm {warm:.1f} s, torch alone {torchs:.1f} s"


def test_nothing_is_tuned_while_a_user_waits():  # triton #11847
    from triton.runtime.autotuner import Autotuner

    for module in pkgutil.iter_modules(kernels.__path__):
        held = vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).values()
        assert not any(isinstance(x, Autotuner) for x in held), module.name


def test_the_host_does_not_wait_for_the_device():
    leaves = qkv(T=2048, S=2048, D=64, dtype=torch.bfloat16, device="cuda")
    flash_attention(*leaves, causal=True, dropout=0.1).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        start = time.perf_counter()
        flash_attention(*leaves, causal=True, dropout=0.1).sum().backward()
        assert time.perf_counter() - start < 0.2 and not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("S", [64, 192, 320, 448, 576])
def test_no_nan_where_the_length_is_half_a_tile_past_whole_ones(dtype, S):  # pytorch #196678: cuDNN's dQ
    leaves = qkv(B=2, H=4, G=2, T=S, S=S, D=128, dtype=dtype, device="cuda")
    allowed = torch.rand(2, 1, S, S, device="cuda") < 0.9
    output = flash_attention(*leaves, mask=Mask(causal=True, allowed=allowed))
    do = torch.randn_like(output)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = flash_attention(*exact, mask=Mask(causal=True, allowed=allowed), implementation="naive")
    plain = [x.detach().requires_grad_() for x in leaves]
    rounded = flash_attention(*plain, mask=Mask(causal=True, allowed=allowed), implementation="naive")
    triples = zip(grad(output, leaves, do), grad(rounded, plain, do), grad(expected, exact, do.double()), strict=True)
    for a, b, c in triples:
        error = (a.double() - c).norm().item()
        assert math.isfinite(error) and error <= 2 * (b.double() - c).norm().item()
