"""The operators under torch's compilers: whole graphs, one for all lengths, and partitioners that may save them."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_train.ops import library
from flash_train.ops.attention import (
    Documents,
    Mask,
    Score,
    flash_attention,
    flash_attention_packed,
    flash_attention_with_lse,
)
from tests.ops.tensors import finite, packed, qkv

H = 6


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def bias_and_sinks(T: int, S: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)
    bias, sinks = (torch.randn(shape, generator=generator) for shape in ((H, T, S), (H,)))
    return bias.requires_grad_(), sinks.requires_grad_()


def inside(q, k, v, bias, sinks, ids, *, dropout=0.0):
    """Every record is made in the compiled function."""
    mask = Mask(causal=True, window=(5, 0), documents=ids, allowed=bias.detach() < 1.5)
    score = Score(soft_cap=4.0, alibi_slopes=torch.linspace(0.1, 1, H, device=q.device), bias=bias, sinks=sinks)
    return flash_attention_with_lse(q * 2, k, v, mask=mask, score=score, dropout=dropout)


def outside(q, k, v, mask, score, *, dropout=0.0):
    """The records come from without."""
    return flash_attention_with_lse(q * 2, k, v, mask=mask, score=score, dropout=dropout)


def arguments(T: int, where: Callable, B: int = 2) -> tuple[list[Tensor], list]:
    """(the leaves, the arguments) of `inside` and `outside` at a length."""
    leaves = [*qkv(B=B, T=T, S=T, dtype=torch.float32, seed=T), *bias_and_sinks(T, T)]
    *tensors, bias, sinks = leaves
    ids = (torch.arange(T) >= T // 3).long().expand(B, T)
    if where is inside:
        return leaves, [*tensors, bias, sinks, ids]
    mask = Mask(window=(None, 0), documents=Documents.from_ids(ids), allowed=bias.detach() < 1.5)
    return leaves, [*tensors, mask, Score(soft_cap=4.0, bias=bias, sinks=sinks)]


def run(function: Callable, leaves: list[Tensor], args: list, **options) -> list[Tensor]:
    """The results and gradients, with torch's generator at a known place."""
    torch.manual_seed(11)
    output, lse = function(*args, **options)
    gradients = torch.autograd.grad(output.sin().sum() + finite(lse).sum(), leaves)
    return [output.detach(), lse.detach(), *gradients]


def agree(ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("where", [inside, outside])
def test_records_compile_whole_and_once_for_all_lengths(where, dropout):
    compiled = torch.compile(where, fullgraph=True, backend="aot_eager")
    for T, stance in ((7, "default"), (9, "default"), (12, "fail_on_recompile"), (31, "fail_on_recompile")):
        leaves, args = arguments(T, where)
        with torch.compiler.set_stance(stance):
            ours = run(compiled, leaves, args, dropout=dropout)
        agree(ours, run(where, leaves, args, dropout=dropout))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_packed_documents_compile_whole_and_once_for_all_lengths_and_numbers(dropout):
    def model(q, k, v, cu_q, cu_k):
        return flash_attention_packed(q, k, v, cu_q, cu_k, mask=Mask(causal=True, window=(4, 0)), dropout=dropout)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths, stance in (
        ((3, 4), "default"),
        ((5, 1, 3), "default"),
        ((4, 0, 9, 2), "fail_on_recompile"),
        ((31, 2, 3, 4, 5, 6), "fail_on_recompile"),
    ):
        leaves, cu_seqlens = packed(lengths, lengths, dtype=torch.float32)
        with torch.compiler.set_stance(stance):
            ours = run(compiled, leaves, [*leaves, *cu_seqlens])
        agree(ours, run(model, leaves, [*leaves, *cu_seqlens]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_compiles_whole_forward_and_backward(dynamic):
    compiled = torch.compile(inside, fullgraph=True, dynamic=dynamic)
    for T in (9, 14) if dynamic else (9,):
        leaves, args = arguments(T, inside)
        agree(run(compiled, leaves, args), run(inside, leaves, args))


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math", "naive", "naive_reversed"])
def test_every_implementation_compiles_whole_and_once_for_all_lengths(name):
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    for T, stance in ((7, "default"), (9, "default"), (12, "fail_on_recompile")):
        q = torch.randn(2, 4, T, 8)
        with torch.compiler.set_stance(stance):
            output = compiled(q, q, q, causal=True, implementation=name)
        torch.testing.assert_close(output, flash_attention(q, q, q, causal=True, implementation=name))


@pytest.mark.parametrize("name", ["scale", "dropout", "soft_cap"])
def test_numbers_may_be_symbols(name):
    def model(q, k, v, x):
        if name == "soft_cap":
            return flash_attention(q, k, v, score=Score(soft_cap=x))
        return flash_attention(q, k, v, **{name: x})

    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (0.25, 0.5, 0.75):
        torch.manual_seed(0)
        ours = compiled(q, k, v, x)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, model(q, k, v, x))


def test_a_window_may_grow_with_the_length():
    def model(q):
        return flash_attention(q, q, q, mask=Mask(window=(q.shape[2] // 2, 0)))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for T, stance in ((8, "default"), (12, "default"), (20, "fail_on_recompile"), (31, "fail_on_recompile")):
        q = torch.randn(1, 2, T, 4, requires_grad=True)
        with torch.compiler.set_stance(stance):
            output = compiled(q)
            output.sum().backward()
        torch.testing.assert_close(output, model(q))


class Exported(nn.Module):
    """A module with one feature."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.sinks = nn.Parameter(torch.linspace(-1, 1, H))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        masks = {
            "causal": lambda: Mask(causal=True),
            "window": lambda: Mask(window=(3, 2), alignment="top_left"),
            "documents": lambda: Mask(causal=True, documents=ids),
            "allowed": lambda: Mask(allowed=(torch.arange(T)[:, None] + torch.arange(S)) % 3 < 2),
        }
        scores = {
            "soft cap": lambda: Score(soft_cap=3.0),
            "alibi": lambda: Score(alibi_slopes=self.sinks.detach().exp()),
            "bias": lambda: Score(bias=(torch.arange(T)[:, None] - torch.arange(S)).float() / 10),
            "sinks": lambda: Score(sinks=self.sinks),
        }
        mask = masks[self.feature]() if self.feature in masks else None
        score = scores[self.feature]() if self.feature in scores else None
        dropout = 0.5 if self.feature == "dropout" else 0.0
        return flash_attention(q, k, v, mask=mask, score=score, dropout=dropout)


FEATURES = ("none", "causal", "window", "documents", "allowed", "soft cap", "alibi", "bias", "sinks", "dropout")


def exported_arguments(T: int) -> tuple[Tensor, ...]:
    q, k, v = (x.detach() for x in qkv(T=T, S=T, dtype=torch.float32))
    return q, k, v, (torch.arange(T) >= T // 3).long().expand(2, T)


@pytest.mark.parametrize("feature", FEATURES)
def test_exports_with_a_dynamic_length(feature):
    module, T = Exported(feature), torch.export.Dim("T", min=2, max=4096)
    shapes = ({2: T}, {2: T}, {2: T}, {1: T})
    program = torch.export.export(module, exported_arguments(9), dynamic_shapes=shapes)
    assert [node.target for node in program.graph.nodes].count(library.attention) == 1
    for length in (9, 23):
        args = exported_arguments(length)
        torch.manual_seed(0)
        ours = program.module()(*args)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, module(*args))


def test_exports_packed_documents_of_any_number():
    class Packed(nn.Module):
        def forward(self, q, k, v, cu_q, cu_k):
            return flash_attention_packed(q, k, v, cu_q, cu_k, causal=True)

    total, count = torch.export.Dim("total", min=2, max=4096), torch.export.Dim("count", min=3, max=99)
    leaves, cu_seqlens = packed((3, 4), (3, 4), dtype=torch.float32)
    shapes = ({0: total}, {0: total}, {0: total}, {0: count}, {0: count})
    program = torch.export.export(Packed(), (*leaves, *cu_seqlens), dynamic_shapes=shapes)
    leaves, cu_seqlens = packed((3, 0, 8), (3, 0, 8), dtype=torch.float32)
    for ours, expected in zip(program.module()(*leaves, *cu_seqlens), Packed()(*leaves, *cu_seqlens), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("where", [inside, outside])
def test_fake_and_meta_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(where, kind):
    leaves, args = arguments(9, where)
    expected = run(where, leaves, args, dropout=0.1)
    if kind == "fake":
        with FakeTensorMode():
            got = run(where, *arguments(9, where), dropout=0.1)
    else:
        leaves = [torch.empty_like(x, device="meta", requires_grad=True) for x in leaves]
        *tensors, bias, sinks = leaves
        ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
        args = [*tensors, bias, sinks, ids]
        if where is outside:
            mask = Mask(documents=Documents.from_ids(ids), allowed=bias.detach() < 1.5)
            args = [*tensors, mask, Score(bias=bias, sinks=sinks)]
        got = run(where, leaves, args, dropout=0.1)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert got[0].stride() == expected[0].stride()


def test_fake_packed_documents_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        leaves, cu_seqlens = packed((3, 4), (5, 6), dtype=torch.float16)
        output, lse = flash_attention_packed(*leaves, *cu_seqlens, output_dtype=torch.float32)
        assert output.shape == (7, 6, 5) and lse.shape == (6, 7) and output.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize("compiled", [False, True])
def test_bias_and_sinks_stay_fp32_under_autocast(compiled):
    leaves, args = arguments(9, inside)
    function = torch.compile(inside, fullgraph=True, backend="aot_eager") if compiled else inside
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = function(*args)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    gradients = torch.autograd.grad(output.float().sum(), leaves)
    assert all(x.dtype == torch.float32 for x in gradients)
    q, k, v = (x.detach().bfloat16() for x in args[:3])
    same, _ = inside(q, k, v, *args[3:])
    torch.testing.assert_close(output, same)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("where", [inside, outside])
def test_the_kernels_compile_whole_and_once_for_all_lengths(where, dropout):
    def on_gpu(T):
        made = [x.detach().cuda().requires_grad_(x.is_floating_point()) for x in arguments(T, inside)[1]]
        *tensors, bias, sinks, ids = made
        if where is inside:
            return made[:5], made
        mask = Mask(window=(None, 0), documents=Documents.from_ids(ids), allowed=bias.detach() < 1.5)
        return made[:5], [*tensors, mask, Score(soft_cap=4.0, bias=bias, sinks=sinks)]

    compiled = torch.compile(where, fullgraph=True)  # whose generator is not torch's own
    for T, stance in ((70, "default"), (90, "default"), (120, "fail_on_recompile"), (310, "fail_on_recompile")):
        leaves, args = on_gpu(T)
        with torch.compiler.set_stance(stance):
            ours = run(compiled, leaves, args, dropout=dropout)
            expected = run(where, leaves, args, dropout=dropout)
        if dropout:
            assert all(x.isfinite().all() for x in [ours[0], *ours[2:]])
            expected, ours = expected[1:2], ours[1:2]
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["flash", "naive"])
def test_the_compiler_multiplies_no_index_by_a_number_that_32_bits_do_not_hold(implementation):
    """As its indices are on a GPU, where such a kernel does not compile, or wraps around."""
    x = torch.randn(3, 2, 8, 4)
    dropped = torch.compile(lambda x: flash_attention(x, x, x, dropout=0.5, implementation=implementation))
    _, codes = run_and_get_code(dropped, x)
    lines = [line.strip() for code in codes for line in code.splitlines()]
    assert any("randint64" in line for line in lines), "nothing is drawn here"
    assert not [line for line in lines if re.search(r"\d{10}L+\)?\s*\*\s*\(?x\d", line)]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["flash", "naive"])
def test_a_compiled_batch_drops_elements_of_its_own_in_each_row(implementation):
    eye = torch.eye(64, device="cuda").expand(3, 2, 64, 64)
    zeros = torch.zeros_like(eye)
    function = partial(flash_attention, dropout=0.5, implementation=implementation)
    kept = torch.compile(function, fullgraph=True)(zeros, zeros, eye) > 0
    assert 0.45 < kept.float().mean() < 0.55
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Inductor's own first one
def test_inductors_cuda_graphs_draw_new_elements_to_drop():
    eye = torch.eye(64, device="cuda").expand(1, 2, 64, 64)
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, dropout=0.5), fullgraph=True, mode="reduce-overhead"
    )
    zeros = torch.zeros_like(eye)
    masks = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        masks.append((compiled(zeros, zeros, eye) > 0).clone())
    for a, b in zip(masks, masks[1:], strict=False):
        assert 0.4 < (a == b).float().mean().item() < 0.6 and 0.4 < a.float().mean().item() < 0.6
