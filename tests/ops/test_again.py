"""Calls done again: what the kernels are given, what is kept, and when nothing is."""

import sys
import weakref
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from flash_train.ops import kept, library
from flash_train.ops.attention import Mask, flash_attention, flash_attention_qkv, flash_attention_with_lse
from flash_train.ops.documents import Documents
from flash_train.ops.features import Terms
from flash_train.ops.kernels import again, launch
from flash_train.ops.kernels.hopper import forward
from flash_train.ops.kernels.tables import Launch


class Heard(list):
    """In place of Triton's launcher in C: what it was given, addresses in place of tensors."""

    def __call__(self, *args):
        if not triton.__version__.startswith("3.6."):  # it takes the kernel's arguments in one piece
            args = (*args[:-1], *args[-1])
        self.append([x.data_ptr() if isinstance(x, Tensor) else x for x in args])

    def addresses(self):
        flat = [y for start in self for x in start for y in (x if isinstance(x, tuple) else (x,))]
        return [x for x in flat if isinstance(x, int) and x > 2**40]

    def numbered(self):
        """Alike for all calls that do the same: addresses are numbered in the order in which they come."""
        numbers = {x: f"address {i}" for i, x in enumerate(dict.fromkeys(self.addresses()))}

        def renamed(x):
            return tuple(map(renamed, x)) if isinstance(x, tuple) else numbers.get(x, x)

        return [[renamed(x) for x in start] for start in self]


class Compiled:
    """In place of a compiled kernel: it has Triton's own launcher in Python, and `Heard` behind it."""

    function, packed_metadata = 7, (4, 1, 0)
    run: Any = None
    metadata: Any = None

    def __init__(self, heard):
        self.heard = heard

    def __getitem__(self, grid):
        def start(*args):
            element = next(iter(nvidia.TMA_DTYPE_DEVICE_TO_HOST))
            described = [
                dict(swizzle=3, elem_size=2, elem_type=element, block_size=x.block_shape, fp4_padded=False)
                for x in args
                if hasattr(x, "block_shape")
            ]
            kinds = {i: "tensordesc" if hasattr(x, "block_shape") else "i32" for i, x in enumerate(args)}
            self.metadata = SimpleNamespace(tensordesc_meta=described)
            self.run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
            vars(self.run).update(
                launch=nvidia.wrap_handle_tensordesc(self.heard, kinds, described), num_ctas=1, global_scratch_size=0,
                global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False,
                launch_pdl=False, arg_annotations="annotations", kernel_signature=b"signature",
            )  # fmt: skip
            self.run(*grid, STREAM, self.function, self.packed_metadata, None, None, None, *args)

        return start


STREAM = 11


class Kernels(defaultdict):
    """In place of `launch._COMPILED`: it has every kernel."""

    def get(self, key, default=None):
        return self[key]


@pytest.fixture(params=["hopper", "triton"])
def heard(request, monkeypatch):
    """On a GPU of compute capability 9.0 that starts nothing."""
    heard = Heard()
    names = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")
    utils = SimpleNamespace(**{name: lambda address, *rest: (address, str(rest)) for name in names})
    driver = SimpleNamespace(utils=utils, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(again, "_PLANS", {})
    monkeypatch.setattr(again, "_is_current", lambda device: True)
    monkeypatch.setattr(launch, "_COMPILED", Kernels(lambda: Compiled(heard)))
    monkeypatch.setattr(launch, "_FITTING", {})
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(launch, "_has_copy_engine", lambda device: True)
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 5)
    monkeypatch.setattr(library, "_chosen", lambda q, k, v, terms, backward=False: request.param)
    return heard


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dO, each stored as [B, T, H, D]."""
    q, k, v, do = (torch.randn(2, 300, 3, 64, dtype=dtype) for _ in range(4))
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    return q, k, v, do.transpose(1, 2)


def packs(number: int, *, alike: bool = False) -> Documents:
    """Two rows of 300 tokens, each so many documents; not for queries and keys in the same tensor, or so."""
    ids = (torch.arange(300) * number // 300).expand(2, -1).contiguous()
    found = Documents.from_ids(ids)
    return found if alike else replace(found, bounds=found.bounds[: 2 * number], key_document=ids.int())


WHAT: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {}],
    "more documents": [dict(documents=packs(3)), dict(documents=packs(70))],
    "documents of queries and keys": [dict(documents=packs(3, alike=True)), dict(documents=packs(3, alike=True))],
    "dropout": [dict(dropout=0.5), dict(dropout=0.5)],
}


def call(q, k, v, do, *, documents=None, dropout=0.0):
    output, lse = flash_attention_with_lse(
        q, k, v, mask=Mask(causal=True, documents=documents), dropout=dropout, implementation="triton"
    )
    return output, lse, *torch.autograd.grad((output, lse), (q, k, v), (do, torch.ones_like(lse)))


@pytest.fixture
def all_alive(monkeypatch):
    """All that is allocated, so that no address comes twice."""
    alive = []
    for name in ("empty", "empty_strided", "zeros"):
        allocate = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *x, f=allocate, **more: alive.append(f(*x, **more)) or alive[-1])


@pytest.mark.usefixtures("all_alive")
@pytest.mark.parametrize("what", WHAT)
def test_done_again_a_call_starts_the_same_kernels_on_its_own_tensors(heard, what):
    first, second = tensors(), tensors()
    results = call(*first, **WHAT[what][0])
    expected = heard.numbered()
    heard.clear()
    repeated = call(*second, **WHAT[what][1])
    assert len(again._PLANS) == 2 and len(heard) == len(expected) >= 3
    assert heard.numbered() == expected
    given = [{x.data_ptr() for x in vars(each["documents"]).values()} if "documents" in each else set()
             for each in WHAT[what]]  # fmt: skip
    assert {x.data_ptr() for x in second} | given[1] <= set(heard.addresses())
    assert all({x.data_ptr(), x.untyped_storage().data_ptr()} & set(heard.addresses()) for x in repeated)
    assert not ({x.data_ptr() for x in (*first, *results)} | given[0]) & set(heard.addresses())
    assert [(x.shape, x.stride(), x.dtype) for x in repeated] == [(x.shape, x.stride(), x.dtype) for x in results]


def test_done_again_a_call_takes_few_steps_of_python(heard):
    def steps(function):
        count = 0

        def note(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            return function(), count
        finally:
            sys.setprofile(None)

    q, k, v, do = tensors()
    counts = []
    for _ in range(2):
        output, forward = steps(lambda: flash_attention(q, k, v, causal=True, implementation="triton"))
        _, backward = steps(lambda x=output: torch.autograd.grad(x, (q, k, v), do))
        counts.append((forward, backward))
    assert counts[1][0] <= 75 and counts[1][1] <= 90, counts


def test_a_launcher_does_nothing_to_a_tensor_but_allocate_it_and_give_it_to_kernels(heard):
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.name().partition("::")[2])
            return func(*args, **kwargs or {})

    seen = set()
    q, k, v, do = (x.detach() for x in tensors())
    with Operators():
        output, lse = library._attend(q, k, v, Terms(1.0))
        library._derive(do, lse, q, k, v, output, lse, Terms(1.0))
        views = {"empty.memory_format", "zeros", "transpose.int"}
        assert {"empty.memory_format"} < seen <= views
        if library._chosen(q, k, v, Terms(1.0)) == "hopper":
            library._derive(do, lse, q, k, v, output, lse, Terms(1.0), joint=True)
            assert seen <= {*views, "split_with_sizes"}


@pytest.mark.usefixtures("all_alive")
@pytest.mark.parametrize("heard", ["hopper"], indirect=True)
@pytest.mark.parametrize(("heads", "documents"), [(3, None), (2, None), (2, packs(3))], ids=["group", "", "documents"])
def test_done_again_a_backward_writes_into_one_new_tensor(heard, heads, documents):
    """Kernels begin to write inside it, where it has the keys' and values' gradients."""
    whole = heads + 2 * (1 if heads == 3 else 2)
    alive, parts = [], []
    for _ in range(2):
        qkv = torch.randn(2, 300, whole, 64, dtype=torch.bfloat16, requires_grad=True)
        output = flash_attention_qkv(qkv, heads, mask=Mask(causal=True, documents=documents))
        (gradient,) = torch.autograd.grad(output, qkv, torch.ones_like(output))
        alive.append((qkv, output, gradient))
        assert gradient.shape == qkv.shape and gradient.is_contiguous()
        row = gradient.element_size() * 64
        before = 0 if documents is None else 64 * whole * row
        firsts = 0, heads, (heads + whole) // 2
        begins = {gradient.data_ptr() + head * row - before for head in firsts}
        assert begins <= set(heard.addresses())
        parts.append(heard.numbered())
        heard.clear()
    assert len(again._PLANS) == 2 and parts[0] == parts[1]


@pytest.mark.parametrize("what", ["an address between", "a copied input", "fp32"])
def test_a_call_that_is_not_of_its_geometry_alone_is_not_kept(heard, what):
    q, k, v, _ = tensors(torch.float32 if what == "fp32" else torch.bfloat16)
    if what == "an address between":
        x = torch.randn(1 + q.numel(), dtype=q.dtype)[1:]
        k = x.view(2, 300, 3, 64).transpose(1, 2).requires_grad_()
    elif what == "a copied input":
        k = k.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    flash_attention_with_lse(q, k, v, implementation="triton")
    assert not again._PLANS and heard


def test_a_tensor_given_twice_is_not_taken_for_two(heard):
    (q, k, v, _), (x, y, z, _) = tensors(), tensors()
    for given in ((q, q, v), (x, y, z), (q, q, v), (x, y, x)):
        heard.clear()
        flash_attention_with_lse(*given, implementation="triton")
        assert {x.data_ptr() for x in given} <= set(heard.addresses())
        assert not {x.data_ptr() for x in (q, k, v, x, y, z)} - {x.data_ptr() for x in given} & set(heard.addresses())
    assert len(again._PLANS) == 3


def test_nothing_is_held_alive_and_no_number_of_lengths_fills_the_memory(heard, monkeypatch):
    monkeypatch.setattr(kept, "LARGEST_NUMBER", 3)
    freed = []
    for T in range(10, 20):
        x = [torch.randn(1, T, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        weakref.finalize(x[0], freed.append, T)
        flash_attention_with_lse(*x, implementation="triton")
        del x
    assert len(freed) == 10 and len(again._PLANS) <= 3


def test_whoever_listens_to_launches_hears_of_every_one(heard, monkeypatch):
    x = tensors()[:3]
    flash_attention_with_lse(*x, implementation="triton")
    unheard = []
    monkeypatch.setattr(again, "_carry_out", lambda *_: unheard.append(1) or (x[0], x[0]))
    flash_attention_with_lse(*x, implementation="triton")
    assert len(unheard) == 1
    hooks: Any = knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        flash_attention_with_lse(*x, implementation="triton")
    finally:
        hooks.remove(print)
    assert len(unheard) == 1


@pytest.mark.parametrize(
    "given",
    [dict(causal=1), dict(scale=True), dict(dropout=False), dict(deterministic=0), dict(implementation=["flash"])],
)
def test_what_is_refused_is_refused_after_the_like_of_it_was_taken(given: dict[str, Any]):
    q = torch.randn(1, 2, 3, 4)
    taken: dict[str, Any] = dict(causal=True, scale=1.0, dropout=0.0, deterministic=False, implementation="flash")
    flash_attention(q, q, q, **taken)
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(given))} must be"):
        flash_attention(q, q, q, **taken | given)
    with pytest.raises(ValueError, match="q must be dense"):
        flash_attention(q.to_sparse(), q, q, **taken)


def test_a_kept_call_is_not_done_again_at_an_address_that_is_no_multiple_of_16_bytes(heard):
    q, k, v, _ = tensors()
    flash_attention_with_lse(q, k, v, implementation="triton")
    heard.clear()
    skewed = torch.randn(1 + q.numel(), dtype=q.dtype)[1:].view(2, 300, 3, 64).transpose(1, 2)
    assert skewed.stride() == k.stride() and len(again._PLANS) == 1
    flash_attention_with_lse(q, skewed, v, implementation="triton")
    assert heard and skewed.data_ptr() not in heard.addresses()


def test_zeros_are_zeros_when_a_call_is_done_again(heard, monkeypatch):
    def count(x, terms):
        counter = launch.zeros(x, 5, dtype=torch.int32)
        launch.run(None, x.device, 1, Launch(1, 1, 1, 1), "count", x, counter)
        return (counter,)

    x = torch.zeros(16, dtype=torch.bfloat16)
    again.repeat(count, (x,), Terms(1.0))
    monkeypatch.setattr(torch, "empty_strided", lambda shape, strides, **kind: torch.ones(shape, dtype=kind["dtype"]))
    assert again.repeat(count, (x,), Terms(1.0))[0].tolist() == [0] * 5 and len(heard) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "triton"])
@pytest.mark.parametrize("shape", [(1, 128, 12, 64), (8, 500, 12, 64), (2, 77, 3, 128)])  # the second: programs walk
def test_on_a_gpu_done_again_a_call_gives_what_it_gives_first(implementation, shape):
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")

    def results(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        poison = [torch.full((2**n,), float("nan"), device="cuda") for n in range(6, 24)]
        del poison  # so that memory that is not written is NaN
        output, lse = flash_attention_with_lse(*leaves, causal=True, implementation=implementation)
        return output, lse, *torch.autograd.grad((output, lse), leaves, (do, torch.randn_like(lse)))

    again._PLANS.clear()
    expected = results(1)
    again._PLANS.clear()
    results(0)
    kept = dict(again._PLANS)
    repeated = results(1)
    assert len(kept) == 2 and kept == again._PLANS
    for name, x, y in zip(("output", "lse", "dq", "dk", "dv"), repeated, expected, strict=True):
        if implementation == "hopper" and name == "dq":  # summed in any order
            torch.testing.assert_close(x, y)
        else:
            assert torch.equal(x, y), name
