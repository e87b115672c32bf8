"""The kinds of bugs that users of attention libraries have reported, each with a test that keeps it out of this one.

Here is what a CPU can show too: every test runs on the tiled path, and on a GPU on the kernels. What only a GPU can
show is in `test_known_bugs_on_gpu.py`. Two kinds are looked after elsewhere, see `ELSEWHERE`.
"""

import math
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd import grad

from flash_train.ops.attention import Documents, Mask, Score, flash_attention, flash_attention_packed
from flash_train.ops.attention import flash_attention_with_lse as with_lse
from flash_train.ops.partials import merge
from tests.ops.tensors import finite, packed, qkv

PLACES = pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param("tiled", "cpu", id="tiled"), pytest.param("flash", "cuda", id="kernels", marks=pytest.mark.gpu)],
)
ELSEWHERE = {
    "installation pain": ("tests/test_packaging.py", "test_triton_is_the_one_that_torch_asks_for"),
    "speed lost to another version of the compiler": ("tests/ops/test_compile_ahead.py", "def stack_bytes"),
}


def results(leaves, name, **options):
    """Output, log-sum-exp and gradients, or what another implementation gives of the same."""
    output, lse = with_lse(*leaves, implementation=name, **options)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    return [output.detach(), finite(lse).detach(), *grad((output * weights).sum() + finite(lse).sin().sum(), leaves)]


def same_as_the_definition(leaves, name, rtol=1e-4, atol=1e-5, **options):
    """fp32 results against the definition's in float64."""
    exact = results([x.detach().double().requires_grad_() for x in leaves], "naive", **options)
    for what, a, b in zip(("output", "lse", "dq", "dk", "dv"), results(leaves, name, **options), exact, strict=True):
        assert a.isfinite().all(), what
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol * max(1.0, b.abs().max().item()), msg=what)


@pytest.mark.parametrize(("path", "text"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_looked_after_elsewhere_is(path, text):
    assert text in (Path(__file__).parents[2] / path).read_text()


HIDING = {
    "causal, more queries than keys": lambda device: dict(causal=True),
    "a window beyond the keys": lambda device: dict(mask=Mask(window=(0, 0), alignment="top_left")),
    "a boolean mask": lambda device: dict(mask=Mask(allowed=torch.arange(70, device=device)[:, None] >= 30)),
    "a bias of minus infinity": lambda device: dict(
        score=Score(bias=torch.zeros(70, 1, device=device).index_fill(0, torch.arange(9, device=device), -math.inf))
    ),
}


@PLACES
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_rows_without_a_visible_key_make_no_nan(name, device, hide):  # pytorch #103963
    leaves = qkv(T=70, S=41, D=16, dtype=torch.float32, device=device)
    options = hide(device)
    output, lse = with_lse(*leaves, implementation=name, **options)
    empty = lse == -math.inf
    assert empty.any() and (output[empty] == 0).all()
    same_as_the_definition(leaves, name, **options)
    assert (results(leaves, name, **options)[2][empty] == 0).all()


@PLACES
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 320])
def test_no_length_gives_nan_gradients(name, device, S):  # pytorch #196678: cuDNN's dQ where S % 128 = 64
    generator = torch.Generator().manual_seed(S)
    for T in (1, S):
        leaves = qkv(B=1, H=2, G=1, T=T, S=S, D=16, dtype=torch.float32, device=device)
        allowed = (torch.rand(T, S, generator=generator) < 0.8).to(device)
        same_as_the_definition(leaves, name, mask=Mask(allowed=allowed))
        same_as_the_definition(leaves, name, causal=True)


@PLACES
@pytest.mark.parametrize("layout", ["broadcast", "scalar", "last stride 2", "transposed"])
def test_gradients_that_come_in_with_any_strides(name, device, layout):  # flash-attention #355: out.sum().backward()
    leaves = qkv(T=37, S=41, D=16, dtype=torch.float32, device=device)
    output = flash_attention(*leaves, implementation=name)
    dense = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    do = {
        "broadcast": dense[:, :, :1, :1].expand(output.shape),
        "scalar": torch.ones((), device=device).expand(output.shape),
        "last stride 2": dense.repeat_interleave(2, dim=-1)[..., ::2],
        "transposed": dense.transpose(-1, -2).contiguous().transpose(-1, -2),
    }[layout]
    for a, b in zip(grad(output, leaves, do, retain_graph=True), grad(output, leaves, do.contiguous()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@PLACES
@pytest.mark.parametrize("layout", ["one for the batch", "odd address", "last stride 2", "reversed roles"])
def test_inputs_with_any_strides(name, device, layout):  # pytorch #138581
    dense = [x.detach() for x in qkv(T=37, S=37, D=16, dtype=torch.float32, device=device)]
    dense = {
        "one for the batch": lambda: [x[:1].expand(2, -1, -1, -1) for x in dense],
        "odd address": lambda: [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in dense],
        "last stride 2": lambda: [x.repeat_interleave(2, dim=-1)[..., ::2] for x in dense],
        "reversed roles": lambda: [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in dense],
    }[layout]()
    ours = results([x.detach().requires_grad_() for x in dense], name, causal=True)
    copied = results([x.contiguous().requires_grad_() for x in dense], name, causal=True)
    for a, b in zip(ours, copied, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@PLACES
def test_inputs_that_torch_negates_when_they_are_read(name, device):  # and that a kernel reads as they lie in memory
    dense = torch.complex(*(x.detach() for x in qkv(G=6, T=37, S=37, D=16, dtype=torch.float32, device=device)[:2]))
    negated = dense.conj().imag
    assert negated.is_neg()
    ours = flash_attention(negated, negated, negated, implementation=name)
    torch.testing.assert_close(ours, flash_attention(*[negated.resolve_neg()] * 3, implementation=name))


@PLACES
def test_documents_of_no_length_and_garbage_in_the_padding(name, device):  # flash-attention #443
    lengths_q, lengths_k = (0, 33, 0, 5, 40, 0), (7, 20, 0, 0, 64, 0)
    leaves, cu_seqlens = packed(lengths_q, lengths_k, tail=9, D=16, dtype=torch.float32, device=device)
    for x in leaves:
        x.detach()[-9:] = math.nan
    output, lse = flash_attention_packed(*leaves, *cu_seqlens, causal=True, implementation=name)
    gradients = grad(output.sum() + finite(lse).sum(), leaves)
    assert all(x.isfinite().all() and (x[-9:] == 0).all() for x in (output, *gradients))
    for n, (t, s) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = (slice(int(x[n]), int(x[n + 1])) for x in cu_seqlens)
        parts = [x[part].transpose(0, 1)[None] for x, part in zip(leaves, (rows, keys, keys), strict=True)]
        expected = flash_attention(*parts, causal=True, implementation="naive")[0].transpose(0, 1)
        assert expected.shape[0] == t and parts[1].shape[2] == s
        torch.testing.assert_close(output[rows], expected, rtol=1e-4, atol=1e-5)


@PLACES
@pytest.mark.parametrize(("D", "E"), [(1, 1), (3, 7), (17, 33), (65, 100), (192, 128), (255, 256)])
def test_head_sizes_and_lengths_need_be_multiples_of_nothing(name, device, D, E):  # triton #621, pytorch #133321
    for T, S in ((1, 31), (37, 41)):
        same_as_the_definition(qkv(T=T, S=S, D=D, E=E, dtype=torch.float32, device=device), name, causal=True)


@PLACES
def test_fp32_is_computed_in_fp32(name, device):  # pytorch #161022: silently in TF32, whose error is 1e-3
    leaves = [x.detach() for x in qkv(T=129, S=129, D=64, dtype=torch.float32, device=device)]
    exact = flash_attention(*(x.double() for x in leaves), implementation="naive")
    error = (flash_attention(*leaves, implementation=name) - exact).norm() / exact.norm()
    assert error < 1e-6


@PLACES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_takes_fp32_and_mixed_inputs(name, device, dtype):  # diffusers #14104: "only support fp16 and bf16"
    q, k, v = qkv(T=37, S=41, D=16, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=dtype):
        output = flash_attention(q, k.to(dtype), v, causal=True, implementation=name)
    gradients = grad(output.float().sum(), (q, k, v))
    assert output.dtype == dtype and all(x.dtype == torch.float32 for x in gradients)
    expected = flash_attention(*(x.to(dtype) for x in (q, k, v)), causal=True, implementation=name)
    torch.testing.assert_close(output, expected)


@PLACES
def test_compiled_whole_without_a_graph_break_or_a_copy_of_the_lengths(name, device):  # flash-attention #1139, #2154
    torch._dynamo.reset()
    compiled = torch.compile(with_lse, fullgraph=True, backend="aot_eager", dynamic=True)
    for T, stance in ((37, "default"), (64, "fail_on_recompile"), (65, "fail_on_recompile")):
        leaves = qkv(T=T, S=T, D=16, dtype=torch.float32, device=device)
        with torch.compiler.set_stance(stance):
            ours = compiled(*leaves, causal=True, implementation=name)
        for a, b in zip(ours, with_lse(*leaves, causal=True, implementation=name), strict=True):
            torch.testing.assert_close(a, b)


@PLACES
def test_forward_and_backward_in_threads_of_their_own(name, device):  # triton #10002: an allocator per thread
    leaves = qkv(T=37, S=41, D=16, dtype=torch.float32, device=device)
    expected, found = results(leaves, name, causal=True), []
    threads = [threading.Thread(target=lambda: found.append(results(leaves, name, causal=True))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))


@PLACES
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_hundred_runs_give_the_same_bits(name, device, deterministic):  # flash-attention #414, #2510 (grouped heads)
    leaves = qkv(H=8, G=2, T=300, S=333, D=64, dtype=torch.float32, device=device)
    if device == "cuda":
        leaves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    runs = 100 if device == "cuda" else 3
    first = results(leaves, name, causal=True, deterministic=deterministic)
    for _ in range(runs - 1):
        again = results(leaves, name, causal=True, deterministic=deterministic)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@PLACES
@pytest.mark.parametrize(("T", "S"), [(1, 41), (37, 41), (41, 37)])
def test_which_corner_a_causal_mask_starts_from_is_said(name, device, T, S):  # pytorch #108108, flash-attention 2.1
    leaves = qkv(T=T, S=S, D=16, dtype=torch.float32, device=device)
    t, s = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)
    for alignment, shift in (("bottom_right", S - T), ("top_left", 0)):
        ours = results(leaves, name, mask=Mask(causal=True, alignment=alignment))
        expected = results(leaves, "naive", mask=Mask(allowed=s <= t + shift))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(results(leaves, name, causal=True)[0], results(leaves, name, mask=Mask(causal=True))[0])


@PLACES
def test_the_log_sum_exp_has_a_gradient(name, device):  # flash-attention #141, #404
    q, k, v = qkv(H=2, G=2, T=37, S=41, D=16, dtype=torch.float32, device=device)
    _, lse = with_lse(q, k, v, implementation=name)
    expected = torch.logsumexp(q.double() @ k.double().transpose(-1, -2) / 4, dim=-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(grad(lse.square().sum(), (q, k)), grad(expected.square().sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@PLACES
def test_a_gradient_penalty_has_a_gradient(name, device):  # pytorch #116350: no double backward
    def penalty(leaves, name):
        first = grad(flash_attention(*leaves, causal=True, implementation=name).sin().sum(), leaves, create_graph=True)
        return grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)

    leaves = qkv(T=37, S=41, D=16, dtype=torch.float32, device=device)
    exact = penalty([x.detach().double().requires_grad_() for x in leaves], "naive")
    for a, b in zip(penalty(leaves, name), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


@PLACES
def test_many_partial_results_do_not_add_up_rounding_errors(name, device):  # ring-flash-attention #42
    q, k, v = (x.detach() for x in qkv(T=37, S=512, D=16, dtype=torch.bfloat16, device=device))
    exact = flash_attention(q.double(), k.double(), v.double(), implementation="naive")
    whole = flash_attention(q, k, v, implementation=name)
    parts = [
        with_lse(q, k[:, :, n : n + 16], v[:, :, n : n + 16], output_dtype=torch.float32, implementation=name)
        for n in range(0, 512, 16)
    ]
    merged = merge(*zip(*parts, strict=True))[0].bfloat16()
    error, plain = ((x.double() - exact).norm() for x in (merged, whole))
    assert error <= 1.2 * plain


@PLACES
@pytest.mark.parametrize("shape", [(2, 6, 37, 41), (6, 1, 1), (2, 1, 37, 1), (41,), (1, 1, 1, 1)], ids=str)
def test_a_learned_bias_gets_the_sum_of_its_gradient(name, device, shape):  # pytorch #145208, #158212
    leaves = qkv(T=37, S=41, D=16, dtype=torch.float32, device=device)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()

    def gradient(name, leaves, bias):
        score = Score(bias=bias * 2, soft_cap=5.0)  # used twice: by the product and by the operator
        return grad(flash_attention(*leaves, score=score, implementation=name).sin().sum() + bias.sum(), bias)[0]

    exact = gradient("naive", [x.double() for x in leaves], bias.double())
    ours = gradient(name, leaves, bias)
    assert ours.shape == shape
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@PLACES
def test_shared_keys_get_the_sum_over_their_query_heads(name, device):  # native-sparse-attention-triton #27
    q, k, v = qkv(H=8, G=2, T=37, S=41, D=16, dtype=torch.float32, device=device)
    ours = results([q, k, v], name, causal=True)
    wide = [x.repeat_interleave(4, dim=1).detach().requires_grad_() for x in (k, v)]
    output, lse, dq, *expected = results([q, *wide], "naive", causal=True)
    expected = [output, lse, dq, *(x.unflatten(1, (2, 4)).sum(2) for x in expected)]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@PLACES
@pytest.mark.parametrize("window", [None, (20, 0)])
def test_a_packed_document_learns_nothing_of_its_neighbours(name, device, window):  # axolotl #449
    ids = torch.tensor([[0] * 30 + [1] * 50 + [0] * 20, [5] * 100]).to(device)
    for documents in (ids, Documents.from_ids(ids)):
        outputs = []
        for seed in (0, 1):
            leaves = qkv(T=100, S=100, D=16, dtype=torch.float32, device=device)
            for x, other in zip(
                leaves, qkv(T=100, S=100, D=16, dtype=torch.float32, device=device, seed=9), strict=True
            ):
                x.detach()[0, :, :30] = other.detach()[0, :, :30] * seed
            mask = Mask(causal=True, window=window, documents=documents)
            output = flash_attention(*leaves, mask=mask, implementation=name)
            outputs.append([output[0, :, 30:], output[1], *grad(output[0, :, 30:].sum(), leaves)])
        (a, a_next, *_), (b, b_next, *gradients) = outputs
        assert torch.equal(a, b) and torch.equal(a_next, b_next)
        assert all((x[0, :, :30] == 0).all() for x in gradients)
