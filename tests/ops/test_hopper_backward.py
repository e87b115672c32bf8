"""The Hopper backward: which tiles it visits, and on the CPU, product by product, its gradients."""

import itertools
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_train.ops import choice
from flash_train.ops.attention import Mask, Score, flash_attention_with_lse
from flash_train.ops.documents import Documents
from flash_train.ops.features import UNBOUNDED, Terms, split_heads
from flash_train.ops.kernels.hopper import backward, backward_wide, copies, derivative, places, rows, tables
from flash_train.ops.kernels.hopper.backward import hopper_backward_kernel
from flash_train.ops.kernels.hopper.backward_fetch import Numbers
from flash_train.ops.kernels.hopper.backward_wide import hopper_wide_backward_kernel
from flash_train.ops.kernels.hopper.derivative import hopper_backward
from flash_train.ops.kernels.hopper.places import blocks_before, query_tiles, shared_tiles
from flash_train.ops.kernels.launch import run
from tests.ops.gluon import run_on_cpu, with_nan
from tests.ops.test_hopper import DOCUMENTS, tables_of, visible


def call(function: Any, *args):
    """A function of `places` as Python has it, and those that it calls."""
    names = {name: x for name, x in vars(places).items()}
    for name in ("query_tiles", "shared_tiles", "blocks_before"):
        body = vars(vars(places)[name])["fn"]
        names[name] = types.FunctionType(body.__code__, names)
    return names[function.__name__](*args)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_the_query_tiles_of_a_block_are_those_that_see_it_and_the_unmasked_ones_see_it_whole(mask):
    block_t, block_s = 4, 6
    bounds = {"full": [(UNBOUNDED, UNBOUNDED)], "causal": [(UNBOUNDED, 0)]}.get(
        mask, list(itertools.product((0, 1, 3, 9, UNBOUNDED), (0, 2, 7, UNBOUNDED)))
    )
    for T, S, (left, right), top_left in itertools.product((1, 4, 7, 12, 21), (1, 5, 6, 13), bounds, (False, True)):
        shift = 0 if top_left else S - T
        seen = visible(T, S, left, right, shift)
        n = Numbers(1, 1, 1, T, S, left, right, shift, 1.0, 1.0, 1.0, False, 8, 1, 0, 0)
        for block in range(-(-S // block_s)):
            start, full, full_end, end = call(query_tiles, block, n, block_t, block_s, mask)
            keys = seen[:, block * block_s : (block + 1) * block_s]
            assert 0 <= start <= full <= full_end <= end
            assert set(range(start, end)) == {t // block_t for t in keys.any(1).nonzero().flatten().tolist()}
            within = (block + 1) * block_s <= S  # keys behind the last one have to be hidden from all
            whole = [i for i in range(start, end) if within and keys[i * block_t : (i + 1) * block_t].all()]
            assert list(range(full, full_end)) == whole
            assert mask == "window" or full_end == end
            earlier, later = call(shared_tiles, block, n, block_t, block_s, mask)
            ranges = [call(query_tiles, x, n, block_t, block_s, mask) for x in range(-(-S // block_s))]
            for i in range(start, end):
                seen_by = [x for x, (first, _, _, last) in enumerate(ranges) if first <= i < last]
                assert call(blocks_before, block, i, n, block_t, block_s, mask) == seen_by.index(block)
                assert (i < earlier) == (block > seen_by[0]) and (i >= later) == (block < seen_by[-1])


@pytest.mark.parametrize(("D", "E", "reason"), [(128, 64, None), (192, 256, None), (60, 64, "multiples of 8, not 60")])
def test_what_the_backward_does_not_take_it_says(D, E, reason, monkeypatch):
    q, v = (torch.empty(1, 2, 3, size, dtype=torch.bfloat16) for size in (D, E))
    monkeypatch.setattr(choice, "_triton_obstacle", lambda q, v, asked_by_name: None)
    monkeypatch.setattr(choice, "_nvidia_capability", lambda device: choice.HOPPER)
    monkeypatch.setattr(choice, "_not_run_yet", lambda: None)
    monkeypatch.setattr(choice, "HOPPER_RAN_ON", frozenset({"some version"}))
    for name in ("flash", "hopper"):
        runs, why = choice.choose_implementation(name, q, q, v, Terms(1.0), backward=True)
        assert runs == ("hopper" if reason is None else "triton")
        assert why is None if reason is None else why is not None and reason in why


def check_on_the_cpu(q, k, v, mask, scale, monkeypatch, soft_cap=None, deterministic=False, joint=False):
    """`hopper_backward` with its kernel run by `run_on_cpu`, against the tiled path; uninitialised memory is NaN."""
    (B, H, T, _), E = q.shape, v.shape[3]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, lse = flash_attention_with_lse(
        *leaves, mask=mask, score=Score(soft_cap=soft_cap), scale=scale, implementation="tiled"
    )
    do, dl = torch.randn(B, H, T, E), torch.randn(H, B, T).transpose(0, 1)
    expected = torch.autograd.grad((output, lse), leaves, (do, dl))

    def run_here(kernel, device, programs, launch, key, *args):
        module = {hopper_backward_kernel: backward, hopper_wide_backward_kernel: backward_wide}.get(kernel)
        if module is None:
            return run(kernel, device, programs, launch, key, *args)
        for program in range(programs):
            run_on_cpu(module, kernel, program, args)

    monkeypatch.setattr(derivative, "run", run_here)
    for module in (copies, derivative, rows):
        monkeypatch.setattr(module, "empty", with_nan)
    left, right = (UNBOUNDED if x is None else x for x in mask.window or (None, None))
    right, cap = 0 if mask.causal else right, soft_cap or 0.0
    terms = Terms(scale, left=left, right=right, top_left=mask.alignment == "top_left", soft_cap=cap,
                  deterministic=deterministic, **tables_of(mask.documents))  # fmt: skip
    saved = [x.detach() for x in (do, dl, q, k, v, output, lse)]
    results = hopper_backward(*saved, terms=terms, joint=joint)
    assert all(x.is_contiguous() for x in results)
    if joint:
        results = split_heads(results[0], H)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("mask", "D", "deterministic"),
    [
        (Mask(), 128, True), (Mask(causal=True), 64, True), (Mask(window=(30, 5)), 256, True),
        (Mask(causal=True, alignment="top_left"), 64, False),
    ],
    ids=["full", "causal", "window", "top left"],
)  # fmt: skip
@pytest.mark.parametrize("documents", DOCUMENTS, ids=["long", "short", "packed"])
def test_on_the_cpu_the_gradients_of_each_document_are_as_if_it_stood_alone(
    documents, mask, D, deterministic, monkeypatch
):
    """NaN in rows that are nobody's reaches nobody."""
    torch.manual_seed(0)
    (B, T), S = documents.query_document.shape, documents.key_document.shape[1]
    q, k, v = torch.randn(B, T, 4, D).transpose(1, 2), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D)
    if S == 305:
        k[:, :, 293:], v[:, :, 293:], q[:, :, 301:] = (float("nan"),) * 3
    mask = replace(mask, documents=documents)
    check_on_the_cpu(q, k, v, mask, 0.2, monkeypatch, deterministic=deterministic)


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(70, 3))], ids=str)
def test_programs_wait_for_those_with_earlier_keys_which_have_earlier_numbers(D, mask, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 300, D), torch.randn(1, 2, 290, D), torch.randn(1, 2, 290, D)
    check_on_the_cpu(q, k, v, mask, 0.2, monkeypatch, deterministic=True)


@pytest.mark.parametrize("enough", [1, 10])
@pytest.mark.parametrize("D", [64, 256])
def test_programs_that_share_a_key_heads_queries_have_the_gradients_together(D, enough, monkeypatch):
    monkeypatch.setattr(tables, "ENOUGH", enough)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 12, 140, D), torch.randn(1, 2, 150, D), torch.randn(1, 2, 150, D)
    check_on_the_cpu(q, k, v, Mask(causal=True), 0.2, monkeypatch, deterministic=True)


def test_a_group_is_split_under_a_mask_into_the_fewest_programs_that_are_enough():
    def split(programs, group, **bounds):
        return tables.programs_a_head(programs, group, Terms(1.0, **bounds))

    assert [split(128, group, right=0) for group in (1, 4, 6, 32)] == [1, 4, 6, 8]
    assert [split(programs, 8, left=100) for programs in (1, 256, 511, 512, 1024)] == [8, 4, 4, 2, 1]
    assert split(1, 32) == 1


@pytest.mark.parametrize(("D", "E"), [(64, 40), (24, 128), (192, 256)])
@pytest.mark.parametrize(
    ("T", "S", "mask", "soft_cap"),
    [
        (150, 301, Mask(), None),
        (301, 150, Mask(causal=True), 2.0),  # the first rows see nothing
        (130, 301, Mask(causal=True, alignment="top_left"), None),  # nobody sees the last keys
        (300, 290, Mask(window=(70, 3)), 5.0),
        (290, 301, Mask(window=(70, 3)), None),
        (1, 1, Mask(causal=True), None),
    ],
    ids=str,
)
def test_on_the_cpu_the_gradients_are_those_of_the_tiled_path(T, S, mask, soft_cap, D, E, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, T, 4, D).transpose(1, 2), torch.randn(2, 2, S, D), torch.randn(2, 2, S, E)
    scale = 0.3 if D < 128 else 0.15  # scores of about the same size
    check_on_the_cpu(q, k, v, mask, scale, monkeypatch, soft_cap)


def test_where_all_scores_are_very_low_the_rows_behind_the_last_key_add_nothing(monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.full((1, 1, 70, 64), 0.5), torch.full((1, 1, 70, 64), -4.0), torch.randn(1, 1, 70, 64)
    check_on_the_cpu(q, k + 0.01 * torch.randn_like(k), v, Mask(), 1.0, monkeypatch)  # exp(-lse) is infinite


@pytest.mark.parametrize("enough", [1, 1000], ids=["one program a head", "shared heads"])
@pytest.mark.parametrize("documents", [None, Documents.from_ids(torch.arange(130).expand(2, 130) // 50)], ids=["", "3"])
@pytest.mark.parametrize("D", [64, 256])
def test_gradients_of_one_tensor_are_written_into_one(D, documents, enough, monkeypatch):
    """Rows that see nothing among them."""
    monkeypatch.setattr(tables, "ENOUGH", enough)
    torch.manual_seed(0)
    q, k, v = split_heads(torch.randn(2, 130, 8, D), 4)
    mask = Mask(window=(20, 5), documents=documents) if D == 64 else Mask(causal=True, documents=documents)
    check_on_the_cpu(q.clone(), k.clone(), v.clone(), mask, 0.2, monkeypatch, deterministic=True, joint=True)
