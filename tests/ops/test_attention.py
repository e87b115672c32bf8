"""`flash_attention` on any device: what it promises, whichever implementation runs."""

import logging
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_train.ops import choice, library
from flash_train.ops.attention import Mask, Score, choose_implementation, flash_attention, flash_attention_with_lse
from tests.ops.tensors import qkv


def test_gradcheck_passes_on_output_and_log_sum_exp():
    assert torch.autograd.gradcheck(lambda q, k, v: flash_attention_with_lse(q, k, v, causal=True), qkv(T=3, S=4, D=3))


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_either_output_may_go_unused(used):
    q, k, v = qkv()
    gradients = []
    for name in ("tiled", "naive"):
        pair = flash_attention_with_lse(q, k, v, implementation=name)
        loss = torch.stack([x.sin().sum() for x, use in zip(pair, used, strict=True) if use]).sum()
        gradients.append(torch.autograd.grad(loss, [q, k, v], allow_unused=True))
    got, expected = gradients
    for name, a, b in zip("qkv", got, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, msg=f"gradient of {name}")


@pytest.mark.parametrize("name", ["tiled", "naive", "triton"])
def test_a_sink_of_minus_infinity_is_none(name):
    q, k, v = (x.detach().float().requires_grad_() for x in qkv(H=6, G=2, T=9, S=4))
    sinks = torch.tensor([-math.inf, -math.inf, 0.0, 1.0, -1.0, 2.0], requires_grad=True)
    outputs = [flash_attention(q, k, v, causal=True, score=Score(sinks=x), implementation=name) for x in (sinks, None)]
    gradients = torch.autograd.grad(outputs[0].square().sum(), [q, k, v, sinks])
    assert torch.equal(outputs[0][:, :2], outputs[1][:, :2]) and not torch.equal(*outputs)
    assert all(x.isfinite().all() for x in gradients) and (gradients[3][:2] == 0).all()


@pytest.mark.parametrize("name", ["tiled", "naive", "triton"])
def test_a_soft_cap_too_small_for_fp32_leaves_all_scores_alike(name):
    q, k, v = (x.detach().float().requires_grad_() for x in qkv(H=6, G=2, T=9, S=4))
    output = flash_attention(0 * q, k, v, score=Score(soft_cap=1e-50), implementation=name)
    torch.testing.assert_close(output, v.mean(2, keepdim=True).repeat_interleave(3, 1).expand_as(output))
    assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), [q, k, v]))


def test_rows_that_see_nothing_give_zero_and_minus_infinity():
    q, k, v = qkv(T=9, S=4)
    for name in ("tiled", "naive"):
        output, lse = flash_attention_with_lse(q, k, v, causal=True, implementation=name)
        output.sum().backward()
        assert torch.equal(output[:, :, :5], torch.zeros_like(output[:, :, :5]))
        assert (lse[:, :, :5] == -math.inf).all() and lse[:, :, 5:].isfinite().all()
        assert q.grad is not None and torch.equal(q.grad[:, :, :5], torch.zeros_like(q[:, :, :5]))
        q.grad = None


@pytest.mark.parametrize(("name", "heads"), [("tiled", 128), ("triton", 1)])  # so many that its tiles are 64 wide
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_tiles_outside_the_window_are_not_visited(name, heads):
    """One that was would bring its NaN along: 0 times NaN."""
    window = Mask(window=(1, 0))
    third = slice(128, 192)

    def call(keys, queries):
        q, k, v = leaves = [x.detach().float() for x in qkv(B=1, H=heads, G=1, T=192, S=192)]
        q[:, :, queries] = k[:, :, keys] = v[:, :, keys] = math.nan
        output = flash_attention(*(x.requires_grad_() for x in leaves), mask=window, implementation=name)
        return output, *torch.autograd.grad(output.sum(), leaves)

    output, dq, _, _ = call(slice(0, 64), slice(0, 0))
    assert output[:, :, third].isfinite().all() and dq[:, :, third].isfinite().all()
    assert output[:, :, 64].isnan().all()  # which the window reaches
    _, _, dk, dv = call(slice(0, 0), third)
    assert dk[:, :, :64].isfinite().all() and dv[:, :, :64].isfinite().all() and dv[:, :, 127].isnan().all()


@pytest.mark.parametrize(("B", "T", "S"), [(0, 7, 11), (2, 0, 11), (2, 7, 0), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("name", ["flash", "tiled", "naive"])
def test_batches_queries_and_keys_may_be_none_or_one(name, B, T, S):
    leaves = qkv(B=B, T=T, S=S)
    sinks = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    for score in (None, Score(sinks=sinks)):
        output, lse = flash_attention_with_lse(*leaves, causal=True, score=score, implementation=name)
        gradients = torch.autograd.grad(output.sum(), leaves)
        assert output.shape == (B, 6, T, 5) and lse.shape == (B, 6, T)
        assert [x.shape for x in gradients] == [x.shape for x in leaves]
        if S == 0:
            assert (output == 0).all() and (lse == (0.0 if score else -math.inf)).all()


@pytest.mark.parametrize("shape", [(5, 5), (1, 7), (3, 7), (7, 3)])
@pytest.mark.parametrize("name", ["sdpa", "sdpa_math", "naive", "naive_reversed"])
def test_every_implementation_aligns_the_last_query_with_the_last_key(name, shape):
    q, k, v = qkv(T=shape[0], S=shape[1])
    expected = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(flash_attention(q, k, v, causal=True, implementation=name), expected)


def test_the_default_device_plays_no_part():
    q, k, v = qkv()
    expected = flash_attention(q, k, v, causal=True)
    with torch.device("meta"):
        output = flash_attention(q, k, v, causal=True)
        output.sum().backward()
    assert torch.equal(output, expected)


def test_output_is_a_free_view_of_tokens_by_channels():
    q, k, v = qkv()
    output = flash_attention(q, k, v)
    tokens = output.transpose(1, 2).reshape(2, 7, 6 * 5)
    assert tokens.data_ptr() == output.data_ptr() and tokens.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_to_its_own_dtype(dtype):
    q, k, v = (x.detach().float().requires_grad_() for x in qkv())
    with torch.autocast("cpu", dtype=dtype):
        output, lse = flash_attention_with_lse(q, k, v.to(dtype), causal=True)  # as from a norm beside a linear layer
    output.float().sum().backward()
    assert output.dtype == dtype and lse.dtype == torch.float32
    assert q.grad is not None and q.grad.dtype == torch.float32
    same = flash_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True)
    assert torch.equal(output, same)


def test_compiled_naive_attention_stays_naive():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    def model(x):
        q, k, v = x.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return flash_attention(q, k, v, causal=True, implementation="naive").transpose(1, 2).flatten(2)

    x = torch.randn(2, 13, 48, requires_grad=True)
    torch.compile(model, fullgraph=True)(x).sum().backward()
    assert counters["inductor"]["fuse_attention"] == 0


def test_flops_are_the_definitions_and_the_recomputed_scores():
    q, k, v = qkv()
    v = v[..., :3]  # another head size
    totals = []
    for name in ("flash", "naive"):
        with FlopCounterMode(display=False) as counter:
            flash_attention(q, k, v, implementation=name).sum().backward()
        totals.append(counter.get_total_flops())
    scores = 2 * 2 * 6 * 7 * 11 * 5
    assert totals[0] == totals[1] + scores


def test_a_step_down_is_logged_once_with_its_reason(caplog):
    library._log_once.cache_clear()
    q, k, v = qkv()
    with caplog.at_level(logging.WARNING, logger="flash_train"):
        flash_attention(q, k, v)
        flash_attention(q, k, v)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: tiled runs instead of flash: the Triton kernels run on a GPU, and these tensors are on cpu"
    ]
    assert choose_implementation("flash", q, k, v).name == "tiled"
    assert choose_implementation("sdpa", q, k, v) == ("sdpa_flash", None)


@pytest.mark.parametrize(
    ("installed", "capability", "expected"),
    [
        (True, (8, 0), ("triton", None)),
        (False, (8, 0), ("tiled", "Triton is not installed")),
        (True, (7, 5), ("tiled", "Triton needs a GPU of compute capability 8.0 or later, and this one has 7.5")),
    ],
)
def test_flash_on_a_gpu_steps_down_where_triton_cannot_run(monkeypatch, installed, capability, expected):
    monkeypatch.setattr(choice, "triton_installed", lambda: installed)
    monkeypatch.setattr(choice, "_nvidia_capability", lambda device: capability)
    with FakeTensorMode():
        q = torch.empty(1, 2, 3, 16, device="cuda", dtype=torch.bfloat16)
        assert choose_implementation("flash", q, q, q) == expected
