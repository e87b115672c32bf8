"""The Hopper kernels: which tiles they visit, what they take, and on a GPU of that kind the answers."""

import itertools
from dataclasses import fields, replace

import pytest
import torch

from flash_train.ops import choice
from flash_train.ops.attention import (
    Mask,
    Score,
    choose_implementation,
    flash_attention,
    flash_attention_packed,
    flash_attention_qkv,
    flash_attention_with_lse,
)
from flash_train.ops.documents import Documents
from flash_train.ops.features import UNBOUNDED, Terms, split_heads
from flash_train.ops.kernels.hopper import copies, forward
from flash_train.ops.kernels.hopper.forward_fetch import Numbers
from flash_train.ops.kernels.hopper.places import key_tile, key_tiles
from tests.ops.cases import Case, inputs
from tests.ops.errors import check, results
from tests.ops.gluon import run_on_cpu, with_nan

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def tables_of(documents):
    """Of `Terms`."""
    return {} if documents is None else {f.name: getattr(documents, f.name) for f in fields(documents)}


def visible(T: int, S: int, left: int, right: int, shift: int) -> torch.Tensor:
    """[T, S]: the rule, pair by pair."""
    beside, keys = torch.arange(T)[:, None] + shift, torch.arange(S)
    return (keys >= beside - left) & (keys <= beside + right)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_the_key_tiles_of_a_block_are_those_that_it_sees_and_the_unmasked_ones_are_seen_whole(mask):
    """Before those comes a key that each query sees, if it sees any: its first maximum."""
    block_t, block_s = 6, 4
    bounds = {"full": [(UNBOUNDED, UNBOUNDED)], "causal": [(UNBOUNDED, 0)]}.get(
        mask, list(itertools.product((0, 1, 3, 9, UNBOUNDED), (0, 2, 7, UNBOUNDED)))
    )
    for T, S, (left, right), top_left in itertools.product((1, 5, 6, 13), (1, 4, 7, 12, 21), bounds, (False, True)):
        shift = 0 if top_left else S - T
        seen = visible(T, S, left, right, shift)
        n = Numbers(1, 1, 1, T, S, left, right, shift, 1.0, 1.0, 0, 0)
        for block in range(-(-T // block_t)):
            tiles = vars(key_tiles)["fn"](block, n, block_t, block_s, mask)
            end, last, first, count = tiles
            rows = seen[block * block_t : (block + 1) * block_t]
            visited = [vars(key_tile)["fn"](i, tiles, mask) for i in range(count)]
            assert sorted(visited) == list(range(end - count, end)) and min(visited) >= 0
            assert last >= 1 and first >= 0 and last + first <= count
            touched = {key // block_s for key in rows.any(0).nonzero().flatten().tolist()}
            assert touched <= set(visited) and (touched == set(visited) or not touched or not rows.any(1).all())
            for tile in visited[last + first :]:
                assert (tile + 1) * block_s <= S and rows[:, tile * block_s : (tile + 1) * block_s].all()
            cut = [key for tile in visited[: last + first] for key in range(tile * block_s, (tile + 1) * block_s)]
            assert rows[:, [key for key in cut if key < S]].any(1).equal(rows.any(1))
            assert mask == "window" or (first == 0 and visited == sorted(visited, reverse=True))
            assert mask != "full" or last == 1


@pytest.mark.parametrize(("D", "E", "programs"), [(64, 40, 3), (128, 24, 1000), (24, 256, 2)])
@pytest.mark.parametrize(
    ("T", "S", "mask", "soft_cap"),
    [
        (150, 301, Mask(), None),
        (301, 150, Mask(causal=True), 2.0),  # the first rows see nothing
        (130, 301, Mask(causal=True, alignment="top_left"), None),
        (300, 290, Mask(window=(70, 3)), 5.0),
        (290, 520, Mask(window=(5, 0), causal=True), None),
        (1, 1, Mask(causal=True), None),
    ],
    ids=str,
)
def test_on_the_cpu_product_by_product_the_answers_are_the_tiled_paths(
    T, S, mask, soft_cap, D, E, programs, monkeypatch
):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, T, 4, D).transpose(1, 2), torch.randn(2, 2, S, D), torch.randn(2, 2, S, E)
    compare_on_the_cpu(q, k, v, mask, soft_cap, programs, monkeypatch)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(300, 200))], ids=str)
def test_a_score_far_above_the_first_tiles_maximum_is_not_lost(mask, monkeypatch):
    """In some tiles of a program, and in none of its other ones."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 450, 64), torch.randn(2, 2, 450, 64), torch.randn(2, 2, 450, 64)
    k[1, 0, 3] *= 40.0
    assert (q[1, 0] @ k[1, 0, 3]).max() * 0.3 > 4 * 44
    q[0, 2, 400, 7] = float("nan")
    compare_on_the_cpu(q, k, v, mask, None, 2, monkeypatch)


DOCUMENTS = [
    Documents.from_ids(torch.tensor([[0] * 40 + [7] * 1 + [2] * 150 + [3] * 9, [4] * 200])),
    Documents.from_ids((torch.arange(130) % 5 == 0).cumsum(0).view(2, 65)),  # of 5 tokens each
    # nobody's rows at the ends of both, a document without keys, one without queries
    Documents.from_cu_seqlens(
        torch.tensor([0, 5, 133, 133, 260, 260, 301]), torch.tensor([0, 140, 150, 150, 150, 280, 293]), 321, 305
    ),
]


@pytest.mark.parametrize(
    ("mask", "D", "soft_cap", "programs"),
    [
        (Mask(), 128, None, 3), (Mask(causal=True), 64, 2.0, 1000), (Mask(window=(30, 5)), 256, None, 1000),
        (Mask(causal=True, alignment="top_left"), 64, None, 3),
    ],
    ids=["full", "causal", "window", "top left"],
)  # fmt: skip
@pytest.mark.parametrize("documents", DOCUMENTS, ids=["long", "short", "packed"])
def test_on_the_cpu_each_document_is_as_if_it_stood_alone(documents, mask, D, soft_cap, programs, monkeypatch):
    """NaN in rows that are nobody's reaches nobody."""
    torch.manual_seed(0)
    (B, T), S = documents.query_document.shape, documents.key_document.shape[1]
    q, k, v = torch.randn(B, T, 4, D).transpose(1, 2), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D)
    if S == 305:
        k[:, :, 293:], v[:, :, 293:], q[:, :, 301:] = (float("nan"),) * 3
    compare_on_the_cpu(q, k, v, replace(mask, documents=documents), soft_cap, programs, monkeypatch)


def compare_on_the_cpu(q, k, v, mask, soft_cap, programs, monkeypatch):
    score = Score(soft_cap=soft_cap)
    expected = flash_attention_with_lse(q, k, v, mask=mask, score=score, scale=0.3, implementation="tiled")

    def run_here(kernel, device, count, launch, key, *args):
        for program in range(count):
            run_on_cpu(forward, kernel, program, args, count, _beside=lambda x, l: x[:, None])

    monkeypatch.setattr(forward, "run", run_here)
    monkeypatch.setattr(forward, "multiprocessors", lambda device: programs)
    for module in (forward, copies):
        monkeypatch.setattr(module, "empty", with_nan)
    left, right = (UNBOUNDED if x is None else x for x in mask.window or (None, None))
    right, cap = 0 if mask.causal else right, soft_cap or 0.0
    terms = Terms(0.3, left=left, right=right, top_left=mask.alignment == "top_left", soft_cap=cap,
                  **tables_of(mask.documents))  # fmt: skip
    for ours, theirs in zip(forward.hopper_forward(q, k, v, terms), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(bias=torch.empty(1)), "a bias"),
        (dict(allowed=torch.empty(1)), "a boolean mask"),
        (dict(alibi_slopes=torch.empty(1)), "ALiBi"),
        (dict(sinks=torch.empty(1)), "sinks"),
        (dict(seed=torch.empty(1)), "dropout"),
        (dict(output_dtype=torch.float32), "another output dtype"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_hopper_kernels_do_not_take_goes_to_the_portable_ones_with_the_reason(change, reason, monkeypatch):
    q = torch.empty(1, 2, 3, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(choice, "_triton_obstacle", lambda q, v, asked_by_name: None)
    monkeypatch.setattr(choice, "_nvidia_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "_not_run_yet", lambda: None)
    monkeypatch.setattr(choice, "HOPPER_RAN_ON", frozenset({"some version"}))
    assert choose_implementation("flash", q, q, q, Terms(1.0), backward=True) == ("hopper", None)
    assert choose_implementation("hopper", q, q, q, Terms(1.0)) == ("hopper", None)
    message = f"the Hopper kernels do not take {reason}"
    assert choose_implementation("flash", q, q, q, Terms(1.0, **change)) == ("triton", message)
    with pytest.raises(ValueError, match=f"implementation='hopper': {message}; implementation='flash' takes"):
        choose_implementation("hopper", q, q, q, Terms(1.0, **change))


def test_the_hopper_kernels_say_which_gpu_dtype_head_size_and_version_they_want(monkeypatch):
    q = torch.empty(1, 2, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="run on a GPU, and these tensors are on cpu"):
        choose_implementation("hopper", q, q, q)
    monkeypatch.setattr(choice, "_triton_obstacle", lambda q, v, asked_by_name: None)
    with pytest.raises(ValueError, match="compute capability 9.0, and this one has 8.0"):
        choose_implementation("hopper", q, q, q)
    monkeypatch.setattr(choice, "_nvidia_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="take fp16 and bf16, not torch.float32"):
        choose_implementation("hopper", q.float(), q.float(), q.float())
    with pytest.raises(ValueError, match="multiples of 8, not 63"):
        choose_implementation("hopper", q, q, q[..., :63])
    monkeypatch.setattr(choice, "HOPPER_RAN_ON", frozenset())
    assert choose_implementation("flash", q, q, q) == ("triton", None)  # nothing is known to have run
    monkeypatch.setattr(choice, "HOPPER_RAN_ON", frozenset({"3.5.9"}))
    name, reason = choose_implementation("flash", q, q, q)
    assert (
        name == "triton" and reason is not None and reason.startswith("the Hopper kernels have run with Triton 3.5.9")
    )


@pytest.mark.parametrize(("T", "D", "right", "asked", "runs"), [
    (512, 128, 0, "flash", "hopper"), (2048, 64, 0, "flash", "hopper"), (1024, 64, 0, "flash", "triton"),
    (1024, 64, 0, "hopper", "hopper"), (512, 64, UNBOUNDED, "flash", "hopper"), (511, 64, UNBOUNDED, "flash", "triton"),
])  # fmt: skip
def test_flash_takes_the_faster_of_the_two_forwards(T, D, right, asked, runs, monkeypatch):
    monkeypatch.setattr(choice, "_triton_obstacle", lambda q, v, asked_by_name: None)
    monkeypatch.setattr(choice, "_nvidia_capability", lambda device: choice.HOPPER)
    monkeypatch.setattr(choice, "_not_run_yet", lambda: None)
    q = torch.empty(1, 1, T, D, dtype=torch.bfloat16)
    assert choose_implementation(asked, q, q, q, Terms(1.0, right=right)) == (runs, None)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("D", "E"), [(64, 64), (128, 128), (256, 256), (192, 128), (64, 256), (40, 24)])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 6, 2, 301, 301, 0, 0),
        Case(2, 6, 2, 301, 301, 0, 0, causal=True),
        Case(1, 3, 3, 129, 515, 0, 0, causal=True, layout="heads first"),
        Case(1, 4, 1, 515, 129, 0, 0, causal=True, layout="expanded"),
        Case(2, 2, 1, 640, 577, 0, 0, window=(100, 3), layout="sliced"),
        Case(1, 2, 2, 1500, 1500, 0, 0, causal=True, window=(200, None)),
        Case(1, 4, 2, 301, 333, 0, 0, causal=True, soft_cap=3.0),
        Case(3, 2, 2, 1, 1, 0, 0, causal=True),
        Case(2, 4, 2, 651, 651, 0, 0, causal=True, documents="ids"),
        Case(2, 4, 1, 300, 300, 0, 0, documents="ids", layout="heads first"),
        Case(1, 4, 2, 1301, 1333, 0, 0, causal=True, documents="packed", layout="sliced"),
        Case(1, 4, 2, 1301, 1203, 0, 0, window=(100, 3), documents="packed", soft_cap=3.0),
    ],
    ids=str,
)
def test_the_answers_are_as_exact_as_the_portable_kernels(case, D, E, dtype):
    check(inputs(case._replace(D=D, E=E), dtype, "cuda"), implementation="hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_programs_that_walk_are_as_exact_and_lose_no_score_far_above_the_others(D, causal, far, dtype, monkeypatch):
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 5)
    x = inputs(Case(2, 4, 2, 651 + far, 651 + far, D, D, causal=causal), dtype, "cuda")
    if far:
        with torch.no_grad():
            x.k[1, 0, 3] *= 100.0
    check(x, implementation="hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_hundred_runs_of_the_forward_give_the_same_bits(D):
    q = torch.randn(4, 8, 777, D, device="cuda", dtype=torch.bfloat16)
    first = flash_attention(q, q, q, causal=True, implementation="hopper")
    assert all(torch.equal(first, flash_attention(q, q, q, causal=True, implementation="hopper")) for _ in range(100))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(300, 40))], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_thirty_deterministic_backwards_give_the_same_bits_and_no_program_waits_for_ever(D, mask):
    """With more programs than the GPU holds at once."""
    q, k, v, do, *_ = inputs(Case(2, 16, 8, 2100, 2077, D, D), torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = flash_attention(*leaves, mask=mask, deterministic=True, implementation="hopper")
    first = torch.autograd.grad(output, leaves, do, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(output, leaves, do, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("window", [None, (100, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", ["", "packed"])
def test_a_deterministic_backward_is_as_exact(D, causal, window, documents):
    B = 1 if documents else 2
    case = Case(B, 4, 2, 651, 600, D, D, causal=causal, window=window, documents=documents, deterministic=True)
    check(inputs(case, torch.bfloat16, "cuda"), implementation="hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D", [64, 128, 256])
def test_thirty_deterministic_backwards_of_documents_give_the_same_bits(D):
    lengths = torch.tensor([0, 700, 1, 130, 64, 900, 33, 5, 5, 5, 400], device="cuda")
    offsets = lengths.cumsum(0).int()
    q, k, v, do = (torch.randn(2300, 16, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, _ = flash_attention_packed(
        q, k, v, offsets, offsets, mask=Mask(causal=True), deterministic=True, implementation="hopper"
    )
    first = torch.autograd.grad(output, leaves, do, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(output, leaves, do, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@on_hopper
def test_what_they_do_not_take_is_refused_by_name():
    q = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not take ALiBi"):
        flash_attention(q, q, q, score=Score(alibi_slopes=torch.ones(2, device="cuda")), implementation="hopper")
    assert results(inputs(Case(1, 2, 2, 8, 8, 64, 64), torch.bfloat16, "cuda"), implementation="hopper")
    assert flash_attention(q, q, q, mask=Mask(window=(3, 3)), implementation="hopper").isfinite().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("G", [6, 2])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(300, 40))], ids=str)
def test_gradients_written_into_one_tensor_have_the_bits_of_those_apart(mask, documents, D, G):
    """The second and third time as calls done again."""
    ids = torch.arange(1300, device="cuda").expand(2, -1) // 250 if documents else None
    mask = replace(mask, documents=ids)
    for _ in range(3):
        qkv = torch.randn(2, 1300, 6 + 2 * G, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        do = torch.randn(2, 6, 1300, D, device="cuda", dtype=torch.bfloat16)
        joint = flash_attention_qkv(qkv, 6, mask=mask, deterministic=True, implementation="hopper")
        apart = flash_attention(*split_heads(qkv, 6), mask=mask, deterministic=True, implementation="hopper")
        ours, theirs = (torch.autograd.grad(x, qkv, do)[0] for x in (joint, apart))
        assert torch.equal(joint, apart) and torch.equal(ours, theirs) and ours.is_contiguous()
