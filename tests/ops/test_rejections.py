"""Everything that `flash_train.ops` refuses: each text names the rule, the value that breaks it, and the way out."""

# pyright: reportArgumentType=false, reportCallIssue=false
# what a type checker would refuse is refused at run time too

import math
from dataclasses import FrozenInstanceError

import numpy
import pytest
import torch

from flash_train.ops.attention import (
    Documents,
    Mask,
    Score,
    choose_implementation,
    flash_attention,
    flash_attention_packed,
    flash_attention_with_lse,
)
from flash_train.ops.partials import merge
from tests.ops.tensors import DEVICE, packed, qkv

B, H, G, T, S, D = 2, 6, 2, 7, 11, 5


def randn(*shape):
    return torch.randn(shape)


def call(**change):
    arguments = dict(q=randn(B, H, T, D), k=randn(B, G, S, D), v=randn(B, G, S, D)) | change
    return flash_attention_with_lse(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def call_packed(**change):
    leaves, cu_seqlens = packed([3, 4], [5, 2], dtype=torch.float32)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    arguments = dict(zip(names, leaves + cu_seqlens, strict=True)) | change
    return flash_attention_packed(*[arguments.pop(name) for name in names], **arguments)


def sdpa(name="sdpa_math", **options):
    q, k, v = qkv(dtype=torch.float32)
    return flash_attention(q, k, v, implementation=name, **options)


TENSORS = [
    (lambda: call(q=randn(3, 7, 5)), "[B, H, T, D], [B, G, S, D] and [B, G, S, E]", "[3, 7, 5]", "unsqueeze"),
    (lambda: call(v=randn(1, 1, 1, 1, 1)), "must be [B, H, T, D]", "[1, 1, 1, 1, 1]", "unsqueeze"),
    (lambda: call(q=randn(2, 7, 6, 5)), "query heads must be a multiple of key heads", "H=7 and G=2",
     ".transpose(1, 2)"),
    (lambda: call(v=randn(2, 2, 10, 5)), "must share B, G and S", "v [2, 2, 10, 5]", ".transpose(1, 2)"),
    (lambda: call(k=randn(2, 3, 11, 5)), "must share B, G and S", "k [2, 3, 11, 5]", ".transpose(1, 2)"),
    (lambda: call(q=randn(3, 6, 7, 5)), "and q's B", "q [3, 6, 7, 5]", ".transpose(1, 2)"),
    (lambda: call(k=randn(2, 2, 11, 4)), "must have one head size D", "5 and 4", "pad the smaller one"),
    (lambda: call(q=randn(2, 0, 7, 5)), "heads and head sizes must not be empty", "q [2, 0, 7, 5]",
     "B, T and S may be"),
    (lambda: call(v=randn(2, 2, 11, 0)), "heads and head sizes must not be empty", "v [2, 2, 11, 0]", "B, T and S may"),
    (lambda: call(q=randn(2, 6, 7, 5).bfloat16()), "share one dtype, fp16,", "torch.bfloat16, torch.float32",
     ".to(dtype)"),
    (lambda: call(**dict.fromkeys("qkv", torch.ones(1, 1, 1, 1, dtype=torch.int64))), "share one dtype", "int64",
     ".to("),
    (lambda: call(**dict.fromkeys("qkv", torch.ones(1, 1, 1, 1).to(torch.float8_e5m2))), "one dtype", "e5m2", ".to("),
    (lambda: call(**dict.fromkeys("qkv", torch.ones(1, 1, 1, 1).to(torch.complex64))), "one dtype", "complex64",
     ".to("),
    (lambda: call(v=torch.empty(2, 2, 11, 5, device="meta")), "lie on one device", "cpu, cpu and meta", ".to(device)"),
]  # fmt: skip
NUMBERS = [
    (lambda: call(scale=0.0), "scale must be positive and at most 1e+38", "got 0.0", "scale q instead"),
    (lambda: call(scale=-1), "scale must be positive and at most 1e+38", "got -1", "scale q instead"),
    (lambda: call(scale=math.nan), "scale must be positive and at most 1e+38", "got nan", "scale q instead"),
    (lambda: call(scale=math.inf), "scale must be positive and at most 1e+38", "got inf", "scale q instead"),
    (lambda: call(dropout=1.0), "dropout must be in [0, 1)", "got 1.0", "a zero output"),
    (lambda: call(dropout=-0.1), "dropout must be in [0, 1)", "got -0.1", "a zero output"),
    (lambda: call(dropout=math.nan), "dropout must be in [0, 1)", "got nan", "a zero output"),
    (lambda: call(output_dtype=torch.int32), "output_dtype must be fp16, bf16, fp32", "got torch.int32", "None is"),
    (lambda: call(output_dtype="float32"), "output_dtype must be fp16, bf16, fp32", "got float32", "None is"),
    (lambda: call(implementation="flsh"), "implementation must be one of flash, hopper, triton", "'flsh'", ""),
    (lambda: choose_implementation("flsh", *qkv()), "implementation must be one of flash, hopper", "'flsh'", ""),
    (lambda: call(implementation=None), "implementation must be one of flash, hopper, triton", "None", ""),
    (lambda: call(causal=True, mask=Mask()), "causal=True must agree with the mask", "causal=False",
     "Mask(causal=True"),
    (lambda: Score(soft_cap=math.nan), "soft_cap must be positive and at most 1e+38", "got nan", "None leaves scores"),
    (lambda: Score(soft_cap=math.inf), "soft_cap must be positive and at most 1e+38", "got inf", "None leaves scores"),
    (lambda: Score(soft_cap=0), "soft_cap must be positive and at most 1e+38", "got 0", "None leaves scores"),
    (lambda: Score(soft_cap=-2.0), "soft_cap must be positive and at most 1e+38", "got -2.0", "None leaves scores"),
]  # fmt: skip
MASKS = [
    (lambda: Mask(alignment="right"), "alignment must be one of bottom_right, top_left", "'right'", ""),
    (lambda: Mask(window=5), "window must be (left, right)", "got 5", "None in it is unbounded"),
    (lambda: Mask(window=(1, 2, 3)), "window must be (left, right)", "(1, 2, 3)", "None in it is unbounded"),
    (lambda: Mask(window=(-1, 0)), "must hold whole numbers from 0", "(-1, 0)", "None in it is unbounded"),
    (lambda: Mask(window=(2**30, 0)), "must hold whole numbers from 0", "(1073741824, 0)", "None in it is unbounded"),
    (lambda: Mask(window=(1.0, 0)), "must hold whole numbers from 0", "(1.0, 0)", "None in it is"),
    (lambda: Mask(window=(True, 0)), "must hold whole numbers from 0", "(True, 0)", "None in it is unbounded"),
    (lambda: Mask(window=("1", 0)), "must hold whole numbers from 0", "('1', 0)", "None in it is"),
    (lambda: Mask(allowed=randn(7, 11)), "allowed must be boolean", "torch.float32", "Score(bias=...)"),
    (lambda: Mask(allowed=torch.ones(7, 11).int()), "allowed must be boolean", "torch.int32", "Score(bias=...)"),
    (lambda: call(mask=Mask(allowed=torch.ones(S, T).bool())), "allowed must be broadcastable to [B, H, T, S]",
     "[2, 6, 7, 11], got [11, 7]", "unsqueeze"),
    (lambda: call(mask=Mask(allowed=torch.ones(B, T, S).bool())), "allowed must be broadcastable", "[2, 7, 11]",
     "[:, None]"),
    (lambda: call(mask=Mask(allowed=torch.ones(1, 1, 1, 1, 1).bool())), "allowed must be broad", "[1, 1, 1, 1, 1]",
     "uns"),
    (lambda: call(mask=Mask(allowed=torch.ones(T, S, device="meta").bool())), "allowed must lie on q's device, cpu",
     "meta",
     ".to(q.device)"),
    (lambda: call(mask=Mask(documents=torch.zeros(T))), "documents must be [B, T] integer ids", "[7] of torch.float32",
     "flash_attention_packed"),
    (lambda: call(mask=Mask(documents=torch.zeros(B, T))), "documents must be [B, T] integer ids", "[2, 7] of torch.fl",
     "flash_attention_packed"),
    (lambda: call(mask=Mask(documents=torch.ones(B, T).bool())), "must be [B, T] integer ids", "torch.bool", "packed"),
    (lambda: call(mask=Mask(documents=torch.zeros(B, T).long())), "a document", "[2, 7] and [2, 7]",
     "flash_attention_packed"),
    (lambda: call(mask=Mask(documents=torch.zeros(1, T).long())), "B=2 x T=7 queries", "[1, 7]",
     "flash_attention_packed"),
    (lambda: call(mask=Mask(documents=torch.zeros(B, T, device="meta").long())), "documents must lie on q's device",
     "meta",
     ".to(q.device)"),
]  # fmt: skip
SCORES = [
    (lambda: Score(bias=torch.ones(7, 11).bool()), "bias must be floating", "torch.bool", "Mask(allowed=...)"),
    (lambda: Score(bias=torch.ones(7, 11).long()), "bias must be floating", "torch.int64", ".float()"),
    (lambda: Score(sinks=torch.ones(6).long()), "sinks must be floating", "torch.int64", ".float()"),
    (lambda: Score(alibi_slopes=torch.ones(6).int()), "alibi_slopes must be floating", "torch.int32", ".float()"),
    (lambda: Score(alibi_slopes=randn(6).requires_grad_()), "alibi_slopes has no gradient", "requires one",
     "detach it"),
    (lambda: call(score=Score(bias=randn(11, 7))), "bias must be broadcastable to [B, H, T, S]", "[11, 7]",
     "unsqueeze"),
    (lambda: call(score=Score(bias=randn(6, 1))), "bias must be broadcastable to [B, H, T, S]", "[6, 1]", "[:, None]"),
    (lambda: call(score=Score(bias=torch.empty(1, device="meta"))), "bias must lie on q's device, cpu", "meta",
     ".to(q"),
    (lambda: call(score=Score(sinks=randn(2))), "sinks must be [H] = [6]", "got [2]", "x.expand(6)"),
    (lambda: call(score=Score(sinks=randn(2, 6))), "sinks must be [H] = [6]", "got [2, 6]", "x.expand(6)"),
    (lambda: call(score=Score(sinks=torch.empty(6, device="meta"))), "sinks must lie on q's device", "meta",
     ".to(q.dev"),
    (lambda: call(score=Score(alibi_slopes=torch.ones(()))), "alibi_slopes must be [H] = [6]", "got []", "x.expand(6)"),
    (lambda: call(score=Score(alibi_slopes=torch.empty(6, device="meta"))), "alibi_slopes must lie on", "meta",
     ".to(q"),
]  # fmt: skip
OFFSETS = [
    (lambda: call_packed(q=randn(1, 6, 7, 5)), "packed q must be [total, heads, head size]", "[1, 6, 7, 5]",
     "flash_att"),
    (lambda: call_packed(v=randn(7, 10)), "packed v must be [total, heads, head size]", "[7, 10]", "flash_attention"),
    (lambda: call_packed(mask=Mask(documents=torch.zeros(1, 7).long())), "documents must be None", "Tensor",
     "leave it out"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([0.0, 7.0])), "[N + 1] offsets, int32 or int64",
     "[2] of torch.float32",
     "cumsum"),
    (lambda: call_packed(cu_seqlens_k=torch.tensor([[0, 7]])), "cu_seqlens_k must be [N + 1] offsets", "[1, 2]",
     "cumsum"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([0, 7]).short()), "offsets, int32 or int64", "torch.int16",
     "cumsum"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([], dtype=torch.int64)), "must be [N + 1] offsets", "[0]", "cumsum"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([3, 4])), "must rise from 0", "[3, 4]", "of lengths, it is"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([0, 5, 4])), "must rise from 0", "[0, 5, 4]", "of lengths, it is"),
    (lambda: call_packed(cu_seqlens_k=torch.tensor([0, 5, 8])), "to at most the number of rows, 7", "[0, 5, 8]",
     "cumsum"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([-1, 0, 7])), "cu_seqlens_q must rise from 0", "[-1, 0, 7]",
     "cumsum"),
    (lambda: call_packed(cu_seqlens_q=torch.tensor([0, 7])), "must have one length", "[2] on cpu and [3]",
     "has its entry"),
    (lambda: call_packed(cu_seqlens_q=torch.empty(3, dtype=torch.int64, device="meta")), "cu_seqlens_q must lie on q's",
     "meta", ".to(q.device)"),
    (lambda: call_packed(cu_seqlens_k=torch.empty(3, dtype=torch.int64, device="meta")), "cu_seqlens_k must lie on q's",
     "meta", ".to(q.device)"),
    (lambda: call_packed(implementation="sdpa"), "", "'sdpa' returns no log-sum-exp", "use 'flash'"),
]  # fmt: skip
IMPLEMENTATIONS = [
    *((lambda name=name: call(implementation=name), "", f"{name!r} returns no log-sum-exp", "use 'flash', 'triton'")
      for name in ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "naive_reversed")),
    (lambda: sdpa("sdpa_cudnn"), "'sdpa_cudnn' needs a GPU", "on a CPU", "use 'sdpa' or 'sdpa_math'"),
    (lambda: sdpa("sdpa_efficient"), "'sdpa_efficient' needs a GPU", "on a CPU", "use 'sdpa' or 'sdpa_math'"),
    (lambda: sdpa(mask=Mask(window=(1, None))), "'sdpa_math' does not take", "a window", "use 'flash' or 'naive'"),
    (lambda: sdpa(mask=Mask(window=(None, 1))), "'sdpa_math' does not take", "a window", "use 'flash' or 'naive'"),
    (lambda: sdpa(mask=Mask(True, alignment="top_left")), "does not take", "top-left alignment", "use 'flash' or"),
    (lambda: flash_attention(*qkv(S=T), mask=Mask(documents=torch.zeros(B, T).int()), implementation="sdpa"),
     "'sdpa' does not take", "documents", "use 'flash' or 'naive'"),
    (lambda: sdpa(score=Score(soft_cap=1.0)), "does not take", "a soft cap", "use 'flash' or 'naive'"),
    (lambda: sdpa(score=Score(alibi_slopes=randn(6))), "does not take", "ALiBi", "use 'flash' or 'naive'"),
    (lambda: sdpa(score=Score(sinks=randn(6))), "does not take", "sinks", "use 'flash' or 'naive'"),
    (lambda: sdpa(causal=True, score=Score(bias=randn(7, 11))), "does not take", "a causal mask together with",
     "use 'fl"),
    (lambda: sdpa(mask=Mask(allowed=torch.ones(7, 11).bool()), score=Score(bias=randn(7, 11))), "does not take",
     "a bias together with allowed", "use 'flash' or 'naive'"),
    (lambda: sdpa("sdpa", dropout=0.5), "'sdpa' does not take", "dropout on a CPU", "use 'flash' or 'naive'"),
    (lambda: flash_attention(randn(B, H, T, D), randn(B, G, T, D), randn(B, G, T, 3), implementation="sdpa"),
     "'sdpa': torch's back end takes no", "q [2, 6, 7, 5]", "use 'sdpa_math' or 'flash'"),
    (lambda: choose_implementation("triton", *qkv(device=DEVICE)),
     "take fp16, bf16 and fp32", "not torch.float64", "'flash' takes"),
    (lambda: choose_implementation("triton", *qkv(D=257, dtype=torch.float32, device=DEVICE)),
     "take head sizes 1 to 256", "not 257",
     "'fl"),
    (lambda: choose_implementation("triton", *qkv(E=300, dtype=torch.float32, device=DEVICE)),
     "take head sizes 1 to 256", "not 300",
     "'fl"),
    (lambda: choose_implementation("triton", *(x.to("meta") for x in qkv())), "run on a GPU", "on meta",
     "'flash' takes"),
]  # fmt: skip
PARTS = [
    (lambda: merge([], []), "an lse for each of at least one output", "0 lses and 0 outputs",
     "flash_attention_with_lse"),
    (lambda: merge([randn(3, 2)], []), "an lse for each of at least one output", "0 lses and 1 outputs", "flash_att"),
    (lambda: merge([randn(3, 2), randn(2, 2)], [randn(3), randn(2)]), "of one shape", "[2, 2] and [2]", "pad rows"),
    (lambda: merge([randn(3, 2)], [randn(3, 2)]), "lses [...]", "[3, 2] and [3, 2]", "pad rows that a part lacks"),
    (lambda: merge([randn(3, 2), randn(3, 2).half()], [randn(3)] * 2), "of one dtype", "torch.float16", "cast or move"),
    (lambda: merge([randn(3, 2).int()], [randn(3)]), "floating outputs and lses", "torch.int32 and", "with .float()"),
    (lambda: merge([randn(3, 2)], [randn(3).long()]), "floating outputs and lses", "and torch.int64", "with .float()"),
    (lambda: merge([randn(3, 2)], [torch.empty(3, device="meta")]), "all on one device", "lse on meta", "cast or move"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "rule", "value", "way_out"),
    [
        pytest.param(*case, id=f"{index}: {case[1]}, {case[2]}")
        for index, case in enumerate(TENSORS + NUMBERS + MASKS + SCORES + OFFSETS + IMPLEMENTATIONS + PARTS)
    ],
)
def test_the_text_names_the_rule_the_value_and_the_way_out(function, rule, value, way_out):
    with pytest.raises(ValueError) as caught:
        function()
    text = str(caught.value)
    assert rule in text and value in text[text.index(rule) :], text
    assert way_out in text[text.index(value, text.index(rule)) :], text


CLASSES = [
    (lambda: call(q=numpy.zeros((2, 6, 7, 5))), "q must be a torch.Tensor, got ndarray; make one with torch.as_tensor"),
    (lambda: call(v=[1.0]), "v must be a torch.Tensor, got list; make one"),
    (lambda: call_packed(k=None), "k must be a torch.Tensor, got NoneType; make one"),
    (lambda: call_packed(cu_seqlens_q=[0, 3, 7]), "cu_seqlens_q must be a torch.Tensor, got list; make one"),
    (lambda: Documents.from_cu_seqlens(torch.tensor([0, 7]), (0, 7), 7, 7),
     "cu_seqlens_k must be a torch.Tensor, got t"),
    (lambda: Documents.from_ids([[0, 0]]), "documents must be a torch.Tensor, got list; make one"),
    (lambda: call(causal=1), "causal must be True or False, got int 1; make one with bool"),
    (lambda: call(causal=torch.tensor(True)), "causal must be True or False, got Tensor True; make one"),
    (lambda: Mask(causal="yes"), "causal must be True or False, got str yes; make one"),
    (lambda: call(deterministic="warn"), "deterministic must be True or False, got str warn; make one"),
    (lambda: call(scale="0.1"), "scale must be a number, got str 0.1; make one with float"),
    (lambda: call(scale=torch.tensor(0.1)), "scale must be a number, got Tensor .*; make one with float"),
    (lambda: call(scale=True), "scale must be a number, got bool True; make one"),
    (lambda: call(dropout=None), "dropout must be a number, got NoneType None; make one"),
    (lambda: call(dropout=True), "dropout must be a number, got bool True; make one"),
    (lambda: Score(soft_cap=True), "soft_cap must be a number, got bool True; make one"),
    (lambda: Score(soft_cap=torch.tensor(2.0)), "soft_cap must be a number, got Tensor .*; make one"),
    (lambda: call(mask=torch.ones(7, 11).bool()), r"mask must be a Mask, got Tensor; .* is Mask\(allowed=\.\.\.\)"),
    (lambda: call(score=torch.ones(7, 11)), r"score must be a Score, got Tensor; .* is Score\(bias=\.\.\.\)"),
    (lambda: Mask(documents=[[0, 0]]), r"documents must be a \[B, T\] tensor of ids or Documents, got list; make one"),
    (lambda: Mask(allowed=[[True]]), "allowed must be a torch.Tensor, got list; make one"),
    (lambda: Score(bias=1.0), "bias must be a torch.Tensor, got float; make one"),
    (lambda: Score(sinks=[1.0]), "sinks must be a torch.Tensor, got list; make one"),
    (lambda: merge([1.0], [randn(3)]), "each of the outputs must be a torch.Tensor, got float; make one"),
    (lambda: merge([randn(3, 2)], [None]), "each of the lses must be a torch.Tensor, got NoneType; make one"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "text"), CLASSES, ids=[text for _, text in CLASSES])
def test_an_argument_of_another_class_is_refused(function, text):
    with pytest.raises(TypeError, match=text):
        function()


def test_a_misspelled_option_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        call(dropout_p=0.1)


def test_records_cannot_be_changed_after_their_check():
    for record, name in (
        (Mask(), "window"),
        (Score(), "bias"),
        (Documents.from_ids(torch.zeros(1, 1).int()), "bounds"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, "anything")


def test_what_is_refused_is_refused_before_a_number_is_drawn():
    q, k, v = qkv()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="sinks must be"):
        flash_attention(q, k, v, dropout=0.5, score=Score(sinks=torch.ones(2)))
    assert torch.equal(torch.get_rng_state(), before)
