"""The Triton kernels: in Triton's interpreter on a CPU (small), and at full size on a GPU."""

import math

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from flash_train.ops.attention import Score, choose_implementation, flash_attention, flash_attention_with_lse
from flash_train.ops.features import Terms
from flash_train.ops.kernels import launch, operands
from flash_train.ops.kernels.launch import tile_widths
from flash_train.ops.kernels.tiles import Constants
from tests.ops import sweep
from tests.ops.errors import Case, check, inputs, results

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    not ON_GPU and triton.__version__.startswith("3.6."),
    reason="Triton 3.6's interpreter reads loop bounds in a way that NumPy 2.4 refuses and 2.3 warns of",
)
# the interpreter's cast to bf16 truncates
BUDGET = {torch.bfloat16: 2.0 if ON_GPU else 4.0}
SMALL = [
    Case(2, 6, 2, 37, 41, 24, 24),
    Case(1, 2, 2, 70, 33, 40, 40),  # causal: the first 37 rows see nothing
    Case(1, 3, 1, 1, 50, 16, 8),
    Case(1, 2, 2, 9, 1, 16, 12, output_dtype=torch.float32),  # one key: dP - delta cancels
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What a kernel forgets to write is NaN, and what it writes beside an output is found."""
    with sweep.poisoned_memory("triton", "cpu") as memory:
        yield
        assert not memory.touched_outside()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_lose_no_more_than_plain_pytorch(dtype, case, causal):
    x = inputs(case._replace(causal=causal), dtype, DEVICE)
    check(x, implementation="triton", budget=BUDGET.get(dtype, 2.0))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, in the interpreter
@pytest.mark.parametrize("causal", [False, True])
def test_a_score_far_above_its_rows_first_ones_is_not_lost(causal):
    """Rows' maxima are looked for in their last keys alone. This is an early one, e^S more than 2^128 times theirs."""
    x = inputs(Case(1, 2, 1, 200, 200, 16, 16, causal=causal), torch.float32, DEVICE)
    with torch.no_grad():
        x.k[:, :, 3] *= 200.0
    assert (x.q @ x.k[:, :, 3, :, None]).max() / 4 > 128 * math.log(2)
    check(x, implementation="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_key_is_passed_on(dtype):
    """P is 1: the output is v itself, and dS = dO v - delta cancels down to -dL, but for the products' rounding."""
    x = inputs(Case(1, 4, 2, 33, 1, 9, 20), dtype, DEVICE)
    q, k, v, do, dl, *_ = x
    output, lse, dq, *_ = results(x, implementation="triton").values()
    k, v = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    assert torch.equal(output.double(), v.expand_as(output))
    torch.testing.assert_close(lse.double(), (q.double() @ k.transpose(-1, -2)).squeeze(-1) / 3, rtol=1e-6, atol=1e-6)
    exact = dl.double().unsqueeze(-1) * k / 3
    roundings = 2 * v.shape[-1] * torch.finfo(torch.float32).eps * (do.double().abs() @ v.abs().transpose(-1, -2))
    rounded = torch.finfo(dtype).eps if DEVICE == "cuda" or dtype != torch.bfloat16 else 2 * torch.finfo(dtype).eps
    assert ((dq.double() - exact).abs() <= roundings * k.abs() / 3 + 2 * rounded * exact.abs()).all()


@pytest.mark.parametrize("layout", ["heads first", "sliced", "broadcast gradient", "transposed head"])
def test_any_strides_give_the_same_answer(layout):
    q, k, v, do, *_ = inputs(Case(2, 4, 2, 19, 23, 16, 16), torch.float32, DEVICE)
    expected = gradients(q.contiguous(), k.contiguous(), v.contiguous(), torch.ones_like(do).contiguous())
    if layout == "heads first":
        q, k, v = (x.contiguous() for x in (q, k, v))
    elif layout == "sliced":
        q, k, v = (torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v))
    elif layout == "transposed head":
        q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
    do = torch.ones((), device=DEVICE).expand(do.shape) if layout == "broadcast gradient" else torch.ones_like(do)
    for a, b in zip(gradients(q, k, v, do), expected, strict=True):
        torch.testing.assert_close(a, b)


def gradients(q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = flash_attention(*leaves, causal=True, implementation="triton")
    return [output.detach(), *torch.autograd.grad(output, leaves, do)]


def test_rows_that_see_nothing_give_zero_and_minus_infinity():
    q, k, v, do, *_ = inputs(Case(1, 2, 2, 40, 7, 16, 16), torch.float32, DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention_with_lse(*leaves, causal=True, implementation="triton")
    dq, dk, dv = torch.autograd.grad(output, leaves, do)
    assert (output[:, :, :33] == 0).all() and (dq[:, :, :33] == 0).all()
    assert (lse[:, :, :33] == -math.inf).all() and lse[:, :, 33:].isfinite().all()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("implementation", ["triton", "tiled"])
def test_products_of_minus_infinity_are_keys_that_nobody_sees(implementation):
    torch.manual_seed(0)
    q, k, v = torch.rand(1, 2, 32, 16) + 0.1, torch.randn(1, 2, 96, 16), torch.randn(1, 2, 96, 16)
    k[:, :, :40] = -math.inf  # whole tiles of them, the first ones
    output, lse = flash_attention_with_lse(q, k, v, implementation=implementation)
    expected = flash_attention_with_lse(q, k[:, :, 40:], v[:, :, 40:], implementation="naive")
    for ours, theirs in zip((output, lse), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_layouts_that_models_have_are_read_as_they_are():
    fused = torch.empty(2, 7, 3, 4, 80, dtype=torch.bfloat16)  # a projection to queries, keys and values at once
    for part in fused.unbind(2):
        x = part.transpose(1, 2)  # [B, H, T, D]
        for y in (x, x.contiguous(), x[:, :1].expand(2, 4, 7, 80), x[:1].expand(5, 4, 7, 80), x[:, :, ::2], x[1:, 2:]):
            assert operands.readable(y) is y


def test_rows_that_are_no_runs_of_whole_vectors_are_copied():
    x = torch.randn(2, 4, 7, 24)
    for y in (x[..., 1:17], x.mT.contiguous().mT[..., :16], x[..., ::3][..., :4], x[..., :5]):
        copy = operands.readable(y)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and copy.shape[3] % 4 == 0
        assert torch.equal(copy[..., : y.shape[3]], y) and (copy[..., y.shape[3] :] == 0).all()


def test_the_copy_of_one_head_of_one_column_is_no_channels_last_tensor():
    x = torch.randn(2, 9, 1, 1).transpose(1, 2)
    assert operands.readable(x).stride() == (36, 36, 4, 1)  # the copy engine takes multiples of 16 bytes only


def test_the_tiles_of_keys_and_values_are_swizzled_alike():  # what else ptxas may make of them: `launch.tile_widths`
    for D in range(1, 257):
        for E in range(1, 257):
            d, e = tile_widths(D, E)
            assert d >= D and e >= E and (d == e or min(d, e) >= 64)
    assert tile_widths(64, 64) == (64, 64) and tile_widths(192, 128) == (256, 128) and tile_widths(32, 18) == (32, 32)


@pytest.mark.parametrize("column", [1, 2**22])
def test_elements_too_far_apart_for_a_tiles_32_bit_offsets_are_copied(column):
    def apart(row):
        return torch.empty(1, device="meta").as_strided((1, 1, 16, 16), (0, 0, row, column))

    near, far = apart(2**23 - column - 1), apart(2**23 - column)
    assert operands.near_pairs(far).stride() == (256, 256, 16, 1) and operands.near_pairs(near) is near
    assert 255 * (near.stride(2) + near.stride(3)) < 2**31
    assert operands.readable(apart(2**23 - 4)).stride(2) == (2**23 - 4 if column == 1 else 16)
    assert operands.readable(apart(2**23)).stride(2) == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=torch.float64), "take fp16, bf16 and fp32, not torch.float64; implementation='flash' takes"),
        (dict(size=257), "take head sizes 1 to 256, not 257"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name_and_stepped_down_otherwise(change, message):
    x = torch.randn(1, 1, 3, change.get("size", 16), dtype=change.get("dtype", torch.float32), device=DEVICE)
    with pytest.raises(ValueError, match=message):
        choose_implementation("triton", x, x, x)
    assert choose_implementation("flash", x, x, x).name == "tiled"


class Kernel:
    """Stands in for a kernel, and for what Triton compiles of it, on a GPU that holds tiles of so many keys."""

    __name__ = "kernel"

    def __init__(self, keys):
        self.keys = keys
        self.tried = []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_stages=None, **_):
        block_s = args[-len(Constants._fields) :][Constants._fields.index("BLOCK_S")]
        self.tried.append((block_s, num_stages))
        if block_s > self.keys or (num_stages or 0) > 1:
            raise OutOfResources(2**18, 2**17, "shared memory")
        return self


def test_a_tile_that_the_gpu_cannot_hold_makes_room_for_a_smaller_one_said_once(monkeypatch, caplog):
    monkeypatch.setattr(launch, "_FITTING", {})
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    q = torch.randn(1, 2, 3, 64, dtype=torch.bfloat16)
    call = launch.Call(q, q, Terms(1.0), q)

    def start(kernel):
        call.start("forward", kernel, [q, q, q], 2, lambda row: (1, (), ()))

    small = Kernel(keys=32)
    start(small)
    assert small.tried == [(64, 3), (64, 2), (64, 1), (32, 1)]
    assert len(caplog.records) == 3 and "the forward kernel takes" in caplog.text and "shared memory" in caplog.text
    start(small)
    assert small.tried[4:] == [(32, None)] and len(caplog.records) == 3  # the compiled kernel, at once

    launch._FITTING.clear()
    launch._COMPILED.clear()
    with pytest.raises(OutOfResources):
        start(Kernel(keys=0))


@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")  # LOWEST - m: minus infinity will do
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_bias_as_large_as_fp32_allows_is_no_mask(sign):
    """In units of log2 it would be infinite; where a row has nothing else, its keys are alike."""
    q, k, v, *_ = inputs(Case(1, 2, 2, 5, 7, 16, 16), torch.float32, DEVICE)
    bias = torch.full((7,), sign * torch.finfo(torch.float32).max, device=DEVICE)
    output, lse = flash_attention_with_lse(q, k, v, score=Score(bias=bias), implementation="triton")
    torch.testing.assert_close(output, v.mean(2, keepdim=True).expand_as(output))
    assert lse.isfinite().all()


@pytest.mark.parametrize("slope", [1e37, 3e38])
def test_alibi_slopes_that_leave_a_row_its_own_key_alone_make_no_nan(slope):
    """A whole tile's scores would be minus infinity, and no mask has told the kernel to expect it."""
    q, k, v = (x.requires_grad_() for x in inputs(Case(1, 2, 2, 70, 70, 16, 16), torch.float32, DEVICE)[:3])
    score = Score(alibi_slopes=torch.full((2,), slope, device=DEVICE))
    output, lse = flash_attention_with_lse(q, k, v, score=score, implementation="triton")
    torch.testing.assert_close(output, v)
    assert lse.isfinite().all()
    dq, dk, dv = torch.autograd.grad(output.sum(), (q, k, v))
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
    torch.testing.assert_close(dv, torch.ones_like(v))
