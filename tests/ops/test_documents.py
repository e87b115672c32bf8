"""Packed documents: each as if it stood alone, whatever its neighbours hold, and nothing read on the host of a GPU."""

import math

import pytest
import torch
import triton

from flash_train.ops import documents
from flash_train.ops.attention import (
    Documents,
    Mask,
    Score,
    flash_attention_packed,
    flash_attention_with_lse,
)
from flash_train.ops.kernels.documents import packed_documents
from tests.ops.tensors import KERNELS, finite, outputs_and_gradients, packed, qkv

QUERIES, KEYS = (5, 0, 7, 1, 3), (8, 4, 0, 1, 11)
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=(2, 1)),
    "top left": Mask(causal=True, alignment="top_left"),
}


def lying_open(output, lse):
    """A packed result as the batch of one that `outputs_and_gradients` expects."""
    return output.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def whole(name, mask, cu_seqlens, score=None):
    return lambda q, k, v: lying_open(
        *flash_attention_packed(q, k, v, *cu_seqlens, mask=mask, score=score, implementation=name)
    )


def alone(name, mask, lengths_q, lengths_k, score=None):
    """The documents one by one, their results one behind the other."""

    def call(q, k, v):
        results = []
        for parts in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
            batch = [x.transpose(0, 1).unsqueeze(0) for x in parts]
            results.append(flash_attention_with_lse(*batch, mask=mask, score=score, implementation=name))
        return tuple(torch.cat(x, dim=2) for x in zip(*results, strict=True))

    return call


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["tiled", "naive"])
def test_packed_documents_give_what_each_gives_alone(name, mask):
    leaves, cu_seqlens = packed(QUERIES, KEYS, dtype=torch.float64 if name == "naive" else torch.float32)
    ours = outputs_and_gradients(whole(name, mask, cu_seqlens), leaves)
    expected = outputs_and_gradients(alone(name, mask, QUERIES, KEYS), leaves)
    for a, b in zip(ours, expected, strict=True):
        if name == "tiled":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)


def test_scores_enter_each_document_as_if_it_stood_alone():
    leaves, cu_seqlens = packed(QUERIES, KEYS)
    score = Score(soft_cap=3.0, alibi_slopes=torch.linspace(0.1, 1, 6), sinks=torch.randn(6))
    ours = outputs_and_gradients(whole("tiled", MASKS["causal"], cu_seqlens, score), leaves)
    expected = outputs_and_gradients(alone("tiled", MASKS["causal"], QUERIES, KEYS, score), leaves)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def test_bias_and_allowed_lie_over_the_whole_pack():
    leaves, cu_seqlens = packed((4, 3), (5, 6))
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(6, 7, 11, generator=generator, dtype=torch.float64).requires_grad_()
    allowed = torch.rand(7, 11, generator=generator) < 0.7
    results = []
    for name in ("tiled", "naive"):
        output, lse = flash_attention_packed(
            *leaves, *cu_seqlens, mask=Mask(allowed=allowed), score=Score(bias=bias), implementation=name
        )
        results.append([output, lse, *torch.autograd.grad(output.sin().sum(), [*leaves, bias])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert (results[0][-1][:, :4, 5:] == 0).all() and (results[0][-1][:, 4:, :5] == 0).all()


@pytest.mark.parametrize(("name", "device"), [("tiled", "cpu"), ("naive", "cpu"), KERNELS])
def test_a_document_without_keys_gives_zero_and_minus_infinity(name, device):
    leaves, cu_seqlens = packed((2, 3, 0, 2), (4, 0, 3, 1), 2, 1, dtype=torch.float32, device=device)
    output, lse = flash_attention_packed(*leaves, *cu_seqlens, implementation=name)
    assert (output[2:5] == 0).all() and (lse[:, 2:5] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(output.sum(), leaves)
    assert (dq[2:5] == 0).all() and (dk[4:7] == 0).all() and (dv[4:7] == 0).all()
    assert output.isfinite().all() and all(x.isfinite().all() for x in (dq, dk, dv))


POISONED = (
    pytest.mark.parametrize(("name", "device"), [("tiled", "cpu"), KERNELS]),
    pytest.mark.parametrize("poison", [math.nan, math.inf]),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # numpy's, in Triton's interpreter
)


def poisoned(test):
    for mark in POISONED:
        test = mark(test)
    return test


@poisoned
def test_what_lies_behind_the_last_document_harms_nothing_and_gets_zeros(name, device, poison):
    leaves, cu_seqlens = packed((5, 0, 3), (8, 4, 2), 2, 1, tail=4, dtype=torch.float32, device=device)
    clean = outputs_and_gradients(whole(name, MASKS["causal"], cu_seqlens), leaves)
    for x in leaves:
        x.detach()[-4:] = poison
    dirty = outputs_and_gradients(whole(name, MASKS["causal"], cu_seqlens), leaves)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    output, _, *gradients = dirty
    assert (output[:, :, -4:] == 0).all() and all((x[-4:] == 0).all() for x in gradients)


@poisoned
def test_a_neighbour_that_holds_no_numbers_harms_nothing(name, device, poison):
    lengths = (5, 4, 3)
    leaves, cu_seqlens = packed(lengths, lengths, 2, 1, dtype=torch.float32, device=device)

    def outer(q, k, v):
        output, lse = whole(name, MASKS["causal"], cu_seqlens)(q, k, v)
        return torch.cat([output[:, :, :5], output[:, :, 9:]], 2), torch.cat([lse[..., :5], lse[..., 9:]], 2)

    clean = outputs_and_gradients(outer, leaves)
    for x in leaves:
        x.detach()[5:9] = poison
    dirty = outputs_and_gradients(outer, leaves)
    assert all(torch.equal(a, b) for a, b in zip(clean[:2], dirty[:2], strict=True))
    for a, b in zip(clean[2:], dirty[2:], strict=True):
        assert torch.equal(a[:5], b[:5]) and torch.equal(a[9:], b[9:])


@poisoned
def test_a_bias_that_is_no_number_outside_a_document_harms_nothing(name, device, poison):
    lengths = (5, 4, 3)
    leaves, cu_seqlens = packed(lengths, lengths, 2, 1, dtype=torch.float32, device=device)
    bias = torch.randn(2, 12, 12, device=device)
    own = torch.zeros(12, 12, dtype=torch.bool, device=device)
    own[:5, :5] = own[9:, 9:] = True
    results = []
    for outside in (0.0, poison):
        x = bias.masked_fill(~own, outside).requires_grad_()
        output, _ = flash_attention_packed(*leaves, *cu_seqlens, causal=True, score=Score(bias=x), implementation=name)
        kept = torch.cat([output[:5], output[9:]]).sin().sum()
        *gradients, dbias = torch.autograd.grad(kept, [*leaves, x])
        results.append([*(torch.cat([y[:5], y[9:]]) for y in (output, *gradients)), dbias[:, own]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_ids_are_documents_by_their_runs():
    q, k, v = leaves = qkv(B=2, T=9, S=9)
    del q, k, v
    ids = torch.tensor([[7, 7, 7, 7, 7, 0, 0, 7, 7], [3, 3, 1, 1, 1, 1, 1, 1, 1]])
    number = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 4, 4, 4, 4, 4]])
    seen = (number[:, None, :, None] == number[:, None, None, :]) & torch.ones(9, 9).tril().bool()
    by_ids, by_mask = (
        outputs_and_gradients(lambda q, k, v, m=mask: flash_attention_with_lse(q, k, v, mask=m), leaves)
        for mask in (Mask(causal=True, documents=ids), Mask(allowed=seen))
    )
    for ours, expected in zip(by_ids, by_mask, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ids_of_any_integer_type_make_the_same_documents(dtype):
    ids = torch.tensor([[0, 0, 2], [2, 1, 1]])
    ours, expected = Documents.from_ids(ids.to(dtype)), Documents.from_ids(ids)
    assert expected.bounds[:4].tolist() == [[0, 2, 0, 2], [2, 3, 2, 3], [0, 1, 0, 1], [1, 3, 1, 3]]
    for name in ("bounds", "query_document", "key_document"):
        assert torch.equal(getattr(ours, name), getattr(expected, name))


def test_prepared_documents_serve_every_layer():
    q, k, v = qkv(B=2, T=9, S=9)
    ids = torch.tensor([[7, 7, 7, 7, 7, 0, 0, 7, 7], [3, 3, 1, 1, 1, 1, 1, 1, 1]])
    one, other = (flash_attention_with_lse(q, k, v, mask=Mask(documents=x)) for x in (ids, Documents.from_ids(ids)))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (1, 1)])
def test_documents_of_empty_batches_and_lengths(B, T):
    q, k, v = qkv(B=B, T=T, S=T)
    output, lse = flash_attention_with_lse(q, k, v, mask=Mask(causal=True, documents=torch.zeros(B, T).long()))
    output.sum().backward()
    assert output.shape == (B, 6, T, 5) and lse.shape == (B, 6, T) and q.grad is not None


@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((), ()), ((0, 0), (0, 0)), ((0,), (5,)), ((5,), (0,))])
def test_packs_of_nothing(lengths_q, lengths_k):
    leaves, cu_seqlens = packed(lengths_q, lengths_k)
    output, lse = flash_attention_packed(*leaves, *cu_seqlens, causal=True)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert (output == 0).all() and (lse == -math.inf).all() and all((x == 0).all() for x in gradients)


@pytest.mark.gpu
def test_offsets_on_a_gpu_are_never_read_on_the_host():
    leaves, cu_seqlens = packed((100, 0, 77), (33, 60, 88), D=64, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(2, 50, dtype=torch.int64, device="cuda")
    batch = [x.requires_grad_() for x in qkv(B=2, T=50, S=50, D=64, device="cuda", dtype=torch.bfloat16)]

    def step():
        output, lse = flash_attention_packed(*leaves, *cu_seqlens, causal=True, dropout=0.1)
        (output.float().sum() + finite(lse).sum()).backward()
        output, lse = flash_attention_with_lse(*batch, mask=Mask(documents=ids, window=(9, 0)))
        (output.float().sum() + finite(lse).sum()).backward()

    step()  # the kernels are loaded, which waits for the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_torchs_deterministic_mode_takes_documents():
    leaves, cu_seqlens = packed((100, 0, 77), (33, 60, 88), D=64, device="cuda", dtype=torch.bfloat16)
    batch = [x.requires_grad_() for x in qkv(B=2, T=50, S=50, D=64, device="cuda", dtype=torch.bfloat16)]
    torch.use_deterministic_algorithms(True)
    try:
        output, lse = flash_attention_packed(*leaves, *cu_seqlens, causal=True, dropout=0.1)
        (output.float().sum() + finite(lse).sum()).backward()
        mask = Mask(documents=torch.zeros(2, 50, dtype=torch.int64, device="cuda"))
        flash_attention_with_lse(*batch, mask=mask)[0].float().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_offsets_on_a_gpu_that_lie_outside_the_tensors_are_cut_to_them():
    leaves, cu_seqlens = packed((100, 77), (33, 88), D=64, device="cuda", dtype=torch.bfloat16)
    expected, _ = flash_attention_packed(*leaves, *cu_seqlens)
    far = torch.tensor([0, 0, 10**6], device="cuda")
    output, _ = flash_attention_packed(*leaves, *(x + far for x in cu_seqlens))
    assert torch.equal(output, expected)


@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="its interpreter reads loop bounds as NumPy refuses")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("cu_seqlens_q", "cu_seqlens_k", "T", "S"),
    [
        ([0, 3, 3, 10], [0, 0, 4, 6], 12, 6),
        ([0], [0], 3, 2),
        ([0, 0, 0], [0, 5, 300], 1, 300),
        ([0, 600], [0, 290], 600, 299),
        (list(range(301)), list(range(0, 602, 2)), 300, 600),
        ([0, 5, 99], [0, 99, 99], 7, 4),
    ],
)
def test_one_kernel_makes_the_tables_of_a_pack(cu_seqlens_q, cu_seqlens_k, T, S, dtype):
    offsets = torch.tensor(cu_seqlens_q, dtype=dtype), torch.tensor(cu_seqlens_k, dtype=dtype)
    for ours, expected in zip(packed_documents(*offsets, T, S), documents._packed(*offsets, T, S), strict=True):
        assert torch.equal(ours, expected) and ours.dtype == expected.dtype


@pytest.mark.parametrize("what", ["a neighbour", "the tail"])
def test_a_second_derivative_learns_nothing_of_what_others_hold(what):
    leaves, cu_seqlens = packed((2, 2), (2, 2)) if what == "a neighbour" else packed((2, 0), (2, 0), tail=2)
    for x in leaves:
        x.data[2:] = math.nan
    output, _ = flash_attention_packed(*leaves, *cu_seqlens)
    (gradient,) = torch.autograd.grad(output[:2].square().sum(), leaves[0], create_graph=True)
    for x in torch.autograd.grad(gradient[:2].square().sum(), leaves):
        assert x[:2].isfinite().all() and (x[:2] != 0).any()


def test_offsets_that_nobody_reads_begin_at_0():
    q = torch.randn(6, 2, 8)
    compiled = torch.compile(
        lambda q, cu_seqlens: flash_attention_packed(q, q, q, cu_seqlens, cu_seqlens)[0],
        backend="aot_eager",
        fullgraph=True,
    )
    whole = torch.tensor([0, 6])
    torch.testing.assert_close(compiled(q, whole + torch.tensor([2, 0])), compiled(q, whole))
