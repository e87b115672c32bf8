"""The registered operators: torch's own checks, and who may save their results instead of running them again."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flash_train.ops import library
from flash_train.ops.attention import Mask, Score, flash_attention
from flash_train.ops.features import Terms, flatten
from tests.ops.tensors import qkv

H = 6


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_determinism_follows_torchs_switch_unless_it_is_asked_for(switch, asked):
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (library.attention, library.attention_backward):
                seen.append(Terms(*args[-len(Terms._fields) :]).deterministic)
            return func(*args, **(kwargs or {}))

    q, k, v = qkv()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(switch)
    try:
        with Watching():
            flash_attention(q, k, v, deterministic=asked).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [switch if asked is None else asked] * 2


def save_attention(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator is library.attention else CheckpointPolicy.PREFER_RECOMPUTE


SAVING = {
    "recomputed": (dict[str, object](), 2),
    "saved": (dict(context_fn=partial(create_selective_checkpoint_contexts, save_attention)), 1),
}


def block(q, k, v):
    return flash_attention(q.sin(), k, v.cos(), causal=True).sin()


@pytest.mark.parametrize(("options", "runs"), SAVING.values(), ids=SAVING)
def test_activation_checkpointing_may_save_the_operators_results(options, runs):
    leaves = qkv()
    expected = torch.autograd.grad(block(*leaves).sum(), leaves)
    with Counting() as mode:
        output = checkpoint(block, *leaves, use_reentrant=False, **options)
        gradients = torch.autograd.grad(output.sum(), leaves)
    assert mode.counts[library.attention] == runs and mode.counts[library.attention_backward] == 1
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(("options", "runs"), SAVING.values(), ids=SAVING)
def test_the_compilers_partitioner_may_save_them_too(options, runs):
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    leaves = qkv()
    compiled = torch.compile(
        lambda *x: checkpoint(block, *x, use_reentrant=False, **options), fullgraph=True, backend=backend
    )
    gradients = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    assert sum(graph.count(library.attention) for graph in graphs) == runs
    for a, b in zip(gradients, torch.autograd.grad(block(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


def terms(present: bool, q: Tensor, k: Tensor) -> Terms:
    """Every optional argument present, or absent."""
    if not present:
        return flatten(q, k, Mask(), Score(), scale=0.3, dropout=0.0)
    B, _, T, _ = q.shape
    generator = torch.Generator().manual_seed(0)
    bias, sinks = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((H, T, T), (H,)))
    mask = Mask(True, (5, 0), "top_left", torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]]), bias[0] < 1.5)
    score = Score(4.0, sinks.exp(), bias, sinks)
    given = flatten(
        q,
        k,
        mask,
        score,
        scale=0.3,
        dropout=0.2,
        output_dtype=torch.float32,
        deterministic=True,
        implementation="tiled",
    )
    return given._replace(**{name: getattr(given, name).clone().requires_grad_() for name in ("bias", "sinks")})


@pytest.mark.parametrize("present", [False, True], ids=["absent", "present"])
@pytest.mark.parametrize("operator", ["attention", "attention_backward", "attention_double_backward"])
def test_opcheck_passes_for_every_operator(operator, present):
    q, k, v = qkv(B=2, H=H, T=5, S=5, D=3, E=4)
    given = terms(present, q, k)
    output, lse = (x.detach() for x in library.attention(q, k, v, *given))
    do, dl = torch.randn_like(output), torch.randn_like(lse).requires_grad_() if present else None
    args = {
        "attention": (q, k, v, *given),
        "attention_backward": (do.requires_grad_(), dl, q, k, v, output, lse, present, *given),
        "attention_double_backward": (
            *(torch.randn_like(x) if present else None for x in (q, k, v)),
            torch.randn_like(given.bias) if given.bias is not None else None,
            torch.randn_like(given.sinks) if given.sinks is not None else None,
            *(do, dl, q, k, v, *given),
        ),
    }[operator]
    if operator == "attention_double_backward":  # it has no derivative
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    torch.library.opcheck(getattr(library, operator), args)
