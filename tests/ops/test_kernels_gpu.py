"""What only a GPU can show of the kernels."""

import math

import pytest
import torch

from flash_train.ops.attention import choose_implementation, flash_attention, flash_attention_with_lse
from flash_train.ops.choice import HOPPER_RAN_ON
from tests.ops.errors import Case, check, inputs

pytestmark = pytest.mark.gpu
GRID = [
    Case(2, 6, 2, 517, 517, 0, 0),
    Case(1, 4, 4, 300, 777, 0, 0),
    Case(1, 4, 1, 777, 300, 0, 0),
    Case(3, 2, 2, 129, 65, 0, 0),
    Case(1, 8, 2, 3, 1023, 0, 0),
    Case(1, 8, 2, 1, 1023, 0, 0),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [8, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("case", GRID, ids=lambda case: f"T{case.T}S{case.S}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_error_is_at_most_twice_plain_pytorchs(dtype, case, size, causal):
    if case.T < 4 and dtype == torch.float32 and size > 128:
        pytest.skip("cuBLAS sums the products of a few rows in a tree; our chain of D additions errs 2.2 times as much")
    check(inputs(case._replace(D=size, E=size, causal=causal), dtype, "cuda"), implementation="triton")


@pytest.mark.parametrize("sizes", [(192, 128), (64, 200), (9, 13)])
def test_value_heads_may_have_another_size(sizes):
    check(inputs(Case(1, 4, 2, 333, 401, *sizes, causal=True), torch.bfloat16, "cuda"), implementation="triton")


@pytest.mark.parametrize("sizes", [(256, 18), (175, 3), (128, 8), (64, 32), (16, 32), (18, 200)])
def test_value_heads_may_be_much_narrower_where_loads_are_not_pipelined(sizes):  # as with a bias: `launch.tile_widths`
    case = Case(1, 4, 2, 133, 201, *sizes, bias="HTS")
    check(inputs(case, torch.bfloat16, "cuda"), implementation="triton")


def test_flash_on_a_gpu_is_one_of_the_kernels():
    q = torch.randn(1, 2, 3, 20, device="cuda", dtype=torch.bfloat16)
    choice = choose_implementation("flash", q, q, q)
    hopper = torch.cuda.get_device_capability() == (9, 0) and bool(HOPPER_RAN_ON)
    assert choice.name == "triton" and (choice.reason is not None) == hopper


def test_backward_gives_the_same_bits_every_time_if_asked():
    q, k, v, do, dl, *_ = inputs(Case(2, 8, 2, 1000, 1000, 64, 64), torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = None
    for _ in range(20):
        output, lse = flash_attention_with_lse(*leaves, causal=True, deterministic=True)
        gradients = torch.autograd.grad([output, lse], leaves, [do, dl])
        first = first or gradients
        assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True))


def test_elements_beyond_two_to_the_31_are_reached():
    B, T, H, D = 18, 2**15, 4, 64
    row = 16 * H * D  # the head's data lie in the last sixteenth of a wide row
    wide = torch.zeros(B, T, row, device="cuda", dtype=torch.bfloat16)
    wide[-1, :256, -H * D :] = torch.randn(256, H * D, device="cuda")
    x = wide[:, :256, -H * D :].unflatten(-1, (H, D)).transpose(1, 2)
    assert x.storage_offset() + (B - 1) * x.stride(0) > 2**31
    near = x[-1:].contiguous().requires_grad_()
    far = x.detach().requires_grad_()
    expected = flash_attention(near, near, near, causal=True, deterministic=True)
    output = flash_attention(far, far, far, causal=True, deterministic=True)
    assert torch.equal(output[-1:], expected)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), near)
    (gradient,) = torch.autograd.grad(output.sum(), far)
    assert torch.equal(gradient[-1:], expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_reaches_the_kernels(dtype):
    q = torch.randn(1, 2, 65, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        output = flash_attention(q, q, q, causal=True)
    output.float().sum().backward()
    assert output.dtype == dtype and q.grad is not None and q.grad.dtype == torch.float32


def test_fp32_is_ieee_unless_torch_may_use_tf32():
    q, k, v, *_ = inputs(Case(1, 2, 2, 257, 257, 64, 64), torch.float32, "cuda")
    exact = flash_attention(q.double(), k.double(), v.double(), implementation="tiled")

    def error():
        return ((flash_attention(q, k, v) - exact).norm() / exact.norm()).item()

    assert error() < 1e-6
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert 1e-5 < error() < 2e-3
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_with_static_and_dynamic_lengths(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: flash_attention(x * 2, x, x, causal=True), fullgraph=True, dynamic=dynamic)
    for T in (64, 65, 200) if dynamic else (64,):
        x = torch.randn(2, 3, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        compiled(x).float().sin().sum().backward()
        flash_attention(y * 2, y, y, causal=True).float().sin().sum().backward()
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad, y.grad, rtol=0.02, atol=0.02)


def test_a_cuda_graph_replays_forward_and_backward_on_new_data():
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        static = [torch.randn(1, 2, 130, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

        def step():
            output = flash_attention(*static, causal=True)
            return output.detach(), *torch.autograd.grad(output, static, torch.ones_like(output))

        step()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for x in static:
            x.detach().copy_(torch.randn_like(x))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


def peak(attention, T: int) -> int:
    """Bytes asked for, above the inputs', at the peak of a forward and backward."""
    x = torch.randn(1, 4, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    attention(x).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[
        "requested_bytes.all.current"
    ]  # a block that is given out may be a little larger
    attention(x).sum().backward()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def test_naive_attention_compiled_stays_naive_and_quadratic():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    naive = torch.compile(
        lambda x: flash_attention(x, x, x, causal=True, implementation="naive"), fullgraph=True, dynamic=False
    )
    ratio = peak(naive, 4096) / peak(naive, 2048)
    assert counters["inductor"]["fuse_attention"] == 0
    assert math.log2(ratio) > 1.7


def test_memory_of_the_kernels_is_linear_in_the_length():
    ratio = peak(lambda x: flash_attention(x, x, x, causal=True), 8192) / peak(
        lambda x: flash_attention(x, x, x, causal=True), 4096
    )
    assert abs(math.log2(ratio) - 1) < 0.01


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_is_used_not_the_current_one():
    q = torch.randn(1, 2, 65, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    with torch.cuda.device(0):
        output = flash_attention(q, q, q)
        output.sum().backward()
    expected = flash_attention(q, q, q, implementation="tiled")
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
