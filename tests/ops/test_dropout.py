"""Dropout: what is struck out looks like chance, and is a function of seed, head and positions alone."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flash_train.ops.attention import Mask, flash_attention, flash_attention_packed, flash_attention_with_lse
from flash_train.ops.derivatives import attend
from flash_train.ops.dropout import keep_mask
from flash_train.ops.features import NO_SCORE, SEED_STEP, Terms, flatten
from flash_train.ops.tiled import tiled_attention
from tests.ops.tensors import KERNELS, outputs_and_gradients, packed, qkv

SIGMAS = 4.5
"""Of a normal variable beyond which a test fails: one in 150,000, were the seeds not fixed."""


def blank(B, H, T, S, device="cpu"):
    """q, k, v of which attention's output is p itself, all p being equal."""
    eye = torch.eye(S, device=device).expand(B, 1, S, S)
    return torch.zeros(B, H, T, 1, device=device), torch.zeros(B, 1, S, 1, device=device), eye


def kept(B, H, T, S, dropout, *, seed=0, name="tiled", device="cpu"):
    """[B, H, T, S] boolean, read from attention's output."""
    torch.manual_seed(seed)
    return flash_attention(*blank(B, H, T, S, device), dropout=dropout, implementation=name) > 0


def seeded(seeds, H, T, S, dropout) -> Terms:
    """`Terms` of a plain call, with a seed for each row of the batch."""
    q, k, _ = blank(len(seeds), H, T, 1)
    terms = flatten(q, k.expand(-1, -1, S, 1), Mask(), NO_SCORE, scale=1.0, dropout=dropout)
    return terms._replace(seed=torch.tensor(seeds))


def deviation(x, p):
    """How many sigmas the share of True lies from p."""
    return abs(x.double().mean().item() - p) / math.sqrt(p * (1 - p) / x.numel())


@pytest.fixture(scope="module")
def half():
    return kept(2, 3, 251, 256, 0.5)


@pytest.mark.parametrize("dropout", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_share_that_stays_is_what_was_asked_for(dropout):
    assert deviation(kept(2, 3, 251, 256, dropout), 1 - dropout) < SIGMAS


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_rows_columns_heads_and_seeds_are_uncorrelated(dropout):
    seeds = [0, 1, 2, 2**31, 2**32, 2**62 + 1, -1, SEED_STEP]
    x = keep_mask(seeded(seeds, 5, 61, 67, dropout), 5, 61, 67).double()
    x = (x - (1 - dropout)) / math.sqrt(dropout * (1 - dropout))  # [seeds, H, T, S]
    for dimension in range(4):
        vectors = x.movedim(dimension, 0).flatten(1)
        n = vectors.shape[1]
        first, second = torch.triu_indices(len(vectors), len(vectors), 1)
        squares = n * ((vectors @ vectors.T)[first, second] / n).square()  # each chi-square of one degree of freedom
        assert abs(squares.mean().item() - 1) < SIGMAS * math.sqrt(2 / squares.numel()), f"dimension {dimension}"
        assert squares.max().item() < SIGMAS**2 + 2 * math.log(squares.numel()), f"dimension {dimension}"


def test_no_position_is_dropped_more_often_than_another():
    """The first token of a causal model sees one key only."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    counts = keep_mask(seeded(seeds, 3, 37, 41, 0.5), 3, 37, 41).sum(0).double()
    sigmas = (counts - 250).abs() / math.sqrt(125)
    assert sigmas.max() < SIGMAS + 0.5, f"{counts.flatten()[sigmas.argmax()]} of 500, at {sigmas.argmax()}"


def test_rows_and_columns_hold_binomial_numbers(half):
    for dimension in (2, 3):
        counts, n = half.sum(dimension).double(), half.shape[dimension]
        chi_square = ((counts - n / 2).square() / (n / 4)).sum().item()
        assert abs(chi_square - counts.numel()) < SIGMAS * math.sqrt(2 * counts.numel())


def test_neighbours_and_corners_of_rectangles_are_independent(half):
    """A mask that factors into rows and columns passes every test of pairs; the four corners' parity shows it."""
    for d_t, d_s in ((0, 1), (1, 0), (1, 1), (0, 16), (16, 0), (64, 64)):
        a, b = half[:, :, : 251 - d_t, : 256 - d_s], half[:, :, d_t:, d_s:]
        assert deviation(a == b, 0.5) < SIGMAS
        if d_t and d_s:
            c, d = half[:, :, d_t:, : 256 - d_s], half[:, :, : 251 - d_t, d_s:]
            assert deviation(a ^ b ^ c ^ d, 0.5) < SIGMAS


def test_the_test_of_corners_can_fail():
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.rand(n, generator=generator) < 0.5 for n in (251, 256))
    x = rows[:, None] ^ columns
    assert deviation(x[1:, 1:] ^ x[:-1, :-1] ^ x[1:, :-1] ^ x[:-1, 1:], 0.5) > 100


@pytest.mark.parametrize("distance", [2**16, 2**20, 2**20 + 64])
def test_positions_far_apart_are_no_copies_of_near_ones(distance):
    size = distance + 256
    terms = seeded([7], 1, 256, size, 0.5)
    near, far = (keep_mask(terms, 1, 256, size, columns=slice(x, x + 256)) for x in (0, distance))
    assert deviation(near == far, 0.5) < SIGMAS


@pytest.mark.parametrize("tile", [16, 64, 128, 512])
def test_the_same_elements_are_dropped_for_any_tile(tile):
    tensors = blank(2, 3, 97, 130)
    terms = seeded([7, 8], 3, 97, 130, 0.3)
    output, _ = tiled_attention(*tensors, terms, tile=tile)
    expected, _ = tiled_attention(*tensors, terms, tile=97)
    assert torch.equal(output > 0, expected > 0)


@pytest.mark.parametrize(("name", "device"), [("tiled", "cpu"), ("naive_reversed", "cpu"), KERNELS])
def test_every_implementation_drops_the_same_elements(name, device):
    ours, expected = (kept(2, 3, 37, 41, 0.3, name=x, device=device) for x in (name, "naive"))
    assert torch.equal(ours, expected)


@pytest.mark.gpu
def test_a_gpu_drops_what_a_cpu_drops():
    terms = seeded([7, -8], 3, 517, 256, 0.3)
    assert terms.seed is not None
    expected, _ = attend(*blank(2, 3, 517, 256), terms)
    output, _ = attend(*blank(2, 3, 517, 256, "cuda"), terms._replace(seed=terms.seed.cuda()))
    assert torch.equal(output.cpu() > 0, expected > 0)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_the_definitions_with_the_same_elements_dropped(causal):
    def run(name):
        torch.manual_seed(5)
        call = partial(flash_attention_with_lse, causal=causal, dropout=0.4, implementation=name)
        return outputs_and_gradients(call, qkv(T=70, S=41, D=8))

    for ours, expected in zip(run("tiled"), run("naive"), strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradcheck_and_gradgradcheck_pass():
    def call(q, k, v):
        torch.manual_seed(1)
        return flash_attention_with_lse(q, k, v, dropout=0.3)

    leaves = qkv(B=1, H=2, G=1, T=3, S=4, D=2)
    assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)


def test_the_log_sum_exp_knows_no_dropout_and_the_mean_is_the_undropped_output():
    q, k, v = (x.detach() for x in qkv(B=1))
    expected, lse = flash_attention_with_lse(q, k, v)
    torch.manual_seed(0)
    runs = [flash_attention_with_lse(q, k, v, dropout=0.5) for _ in range(400)]
    assert all(torch.equal(L, lse) for _, L in runs)
    outputs = torch.stack([output for output, _ in runs])
    sigma = outputs.std(0) / math.sqrt(len(runs))
    assert ((outputs.mean(0) - expected).abs() / sigma).max() < SIGMAS


def test_a_document_has_the_mask_of_a_batch_row_of_its_number():
    lengths = (5, 0, 8, 3)
    (q, k, v), offsets = packed(lengths, lengths)
    torch.manual_seed(2)
    output, _ = flash_attention_packed(q, k, v, *offsets, dropout=0.4)
    rows = [torch.zeros(4, 8, x.shape[1], 5, dtype=torch.float64) for x in (q, k, v)]
    for x, row in zip((q, k, v), rows, strict=True):
        for n, part in enumerate(x.split(lengths)):
            row[n, : lengths[n]] = part.detach()
    allowed = torch.arange(8) < torch.tensor(lengths)[:, None]
    torch.manual_seed(2)
    whole = flash_attention(*(x.transpose(1, 2) for x in rows), mask=Mask(allowed=allowed[:, None, None]), dropout=0.4)
    expected = torch.cat([whole[n, :, :length] for n, length in enumerate(lengths)], dim=1).transpose(0, 1)
    torch.testing.assert_close(output, expected)


def test_ids_of_one_row_have_the_mask_of_the_same_documents_packed():
    (q, k, v), offsets = packed((5, 8, 3), (5, 8, 3))
    ids = torch.tensor([[4] * 5 + [1] * 8 + [4] * 3])
    torch.manual_seed(2)
    expected, _ = flash_attention_packed(q, k, v, *offsets, dropout=0.4, causal=True)
    torch.manual_seed(2)
    batch = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    output = flash_attention(*batch, mask=Mask(causal=True, documents=ids), dropout=0.4)
    assert torch.equal(output[0].transpose(0, 1), expected)


def test_torchs_seed_repeats_a_call_and_the_next_call_differs():
    first = kept(1, 2, 31, 33, 0.5)
    second = flash_attention(*blank(1, 2, 31, 33), dropout=0.5) > 0
    assert torch.equal(kept(1, 2, 31, 33, 0.5), first)
    assert deviation(first == second, 0.5) < SIGMAS


def test_no_number_is_drawn_without_dropout():
    before = torch.get_rng_state()
    flash_attention(*blank(1, 2, 3, 4), dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_drops_the_same_elements_again(reentrant):
    leaves = qkv()

    def gradients(run):
        torch.manual_seed(4)
        return torch.autograd.grad(run(*leaves).sin().sum(), leaves)

    def block(q, k, v):
        return flash_attention(q * 2, k, v, dropout=0.5)

    def recomputed(*x):
        output = checkpoint(block, *x, use_reentrant=reentrant)
        torch.rand(7)  # the generator moves on
        return output

    if reentrant:  # which knows .backward() alone
        torch.manual_seed(4)
        recomputed(*leaves).sin().sum().backward()
        got = [x.grad for x in leaves if x.grad is not None]
    else:
        got = gradients(recomputed)
    for ours, expected in zip(got, gradients(block), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_one_mask_or_one_each_as_it_is_asked(randomness):
    q, k, v = (x.expand(5, *x.shape) for x in blank(2, 3, 31, 33))
    torch.manual_seed(0)
    x = torch.func.vmap(partial(flash_attention, dropout=0.5), randomness=randomness)(q, k, v) > 0
    for one in x[1:]:
        assert torch.equal(one, x[0]) if randomness == "same" else deviation(one == x[0], 0.5) < SIGMAS


def test_vmap_is_refused_where_it_may_not_draw():
    q, k, v = (x.expand(5, *x.shape) for x in blank(2, 3, 7, 9))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(partial(flash_attention, dropout=0.5))(q, k, v)
