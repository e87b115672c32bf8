import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flash_train.models.gpt import GPT
from flash_train.modules.attention import SelfAttention

BATCH, LENGTH, VOCABULARY, WIDTH, DEPTH, HEADS, KV_HEADS = 2, 37, 59, 48, 3, 6, 2
ON_CPU = ("flash", "tiled", "sdpa", "sdpa_math", "naive_reversed")
GPT2: dict = {"vocabulary_size": VOCABULARY, "context_length": 41, "width": WIDTH, "depth": DEPTH, "heads": HEADS}
LLAMA: dict = GPT2 | {"kv_heads": KV_HEADS, "positions": "rotary", "norm": "rms", "feed_forward": "swiglu"}
EVERYTHING: dict = LLAMA | {"qk_norm": True, "tied_embeddings": False, "bias": True, "hidden_size": 70}
KINDS = pytest.mark.parametrize("arguments", [GPT2, LLAMA, EVERYTHING], ids=["gpt2", "llama", "everything"])


def build(arguments: dict) -> GPT:
    return GPT(**arguments)


def make(arguments: dict) -> GPT:
    torch.manual_seed(0)
    model = build(arguments)
    with torch.no_grad():  # initial weights are so small that attention is all but uniform; these are not
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def make_tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: GPT) -> list[Tensor]:
    tokens = make_tokens()
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    parameters = list(model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def error(values: list[Tensor], exact: list[Tensor]) -> float:
    """The largest distance of a tensor from the exact one, each in units of the exact one's norm."""
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(values, exact, strict=True))


@KINDS
@pytest.mark.parametrize("implementation", ON_CPU)
def test_implementations_agree_in_loss_and_gradients_within_what_naive_loses(
    arguments: dict, implementation: str
) -> None:
    exact = loss_and_gradients(make(arguments | {"implementation": "naive"}).double())
    naive = loss_and_gradients(make(arguments | {"implementation": "naive"}))
    ours = loss_and_gradients(make(arguments | {"implementation": implementation}))
    assert error(ours, exact) <= 2 * error(naive, exact) < 1e-4


def test_the_comparison_of_gradients_can_fail() -> None:
    exact = loss_and_gradients(make(LLAMA).double())
    forgetful = make(LLAMA)
    for module in forgetful.modules():
        if isinstance(module, SelfAttention):
            module.rotary = None
    assert error(loss_and_gradients(forgetful), exact) > 0.01


@KINDS
@pytest.mark.parametrize("implementation", ["naive", "flash"])
def test_block_checkpointing_stores_less_and_changes_nothing(arguments: dict, implementation: str) -> None:
    arguments = arguments | {"implementation": implementation, "dropout": 0.3}
    results, stored = [], []
    for checkpointing in ("none", "block"):
        model = make(arguments | {"checkpointing": checkpointing})
        sizes: dict[int, int] = {}

        def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(make_tokens())
        stored.append(sum(sizes.values()) - sum(p.untyped_storage().nbytes() for p in model.parameters()))
        torch.manual_seed(2)
        results.append(loss_and_gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert stored[1] < stored[0] / 3


@KINDS
def test_no_position_sees_the_future(arguments: dict) -> None:
    model, tokens = make(arguments).double(), make_tokens()
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.isclose(before[:, 20:], after[:, 20:]).all(dim=-1).any()


@KINDS
def test_a_model_made_on_the_meta_device_is_completed_in_place(arguments: dict) -> None:
    with torch.device("meta"):
        model = build(arguments)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert model(make_tokens().to("meta")).shape == (BATCH, LENGTH, VOCABULARY)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    expected = build(arguments)
    torch.manual_seed(3)
    expected.reset_parameters()
    assert torch.equal(model(make_tokens()), expected(make_tokens()))


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_stay_near_full_precision(arguments: dict, dtype: torch.dtype) -> None:
    model = make(arguments)
    exact = model(make_tokens())
    with torch.autocast("cpu", dtype=dtype):
        assert error([model(make_tokens())], [exact.double()]) < 8 * torch.finfo(dtype).eps
    assert error([copy.deepcopy(model).to(dtype)(make_tokens())], [exact.double()]) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("arguments", [GPT2, EVERYTHING | {"checkpointing": "block"}], ids=["gpt2", "everything"])
def test_a_model_compiles_into_one_graph(arguments: dict) -> None:
    torch.compiler.reset()
    model = make(arguments | {"depth": 2})
    expected = loss_and_gradients(model)
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(model), expected)
    model(make_tokens(29)).sum().backward()  # a second length makes T symbolic
    with torch.compiler.set_stance("fail_on_recompile"):
        model(make_tokens(31)).sum().backward()


def test_tied_embeddings_are_one_parameter_and_one_entry_of_the_state_dict() -> None:
    tied, untied = build(GPT2), build(GPT2 | {"tied_embeddings": False})
    assert untied.state_dict().keys() - tied.state_dict().keys() == {"head.weight"}
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    tied(tokens).sum().backward()
    assert tied.token_embedding.weight.grad is not None
    assert (tied.token_embedding.weight.grad != 0).any(dim=1).all()  # each row is used, as an output if not as an input


def test_embeddings_are_dropped_in_training_alone() -> None:
    model = build(GPT2 | {"dropout": 0.5})
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(make_tokens())
    model.eval()(make_tokens())
    assert 0.4 < (seen[0] == 0).double().mean().item() < 0.6
    assert not (seen[1] == 0).any()


@pytest.mark.parametrize("arguments", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_flops_are_those_that_pytorch_counts(arguments: dict) -> None:
    model = build(arguments | {"implementation": "naive"})
    with FlopCounterMode(display=False) as counter:
        model(make_tokens()).sum().backward()
    # The formula charges norms like matrices; the counter sees matrix products alone.
    norms = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 1)
    assert counter.get_total_flops() == BATCH * LENGTH * (model.flops_per_token(LENGTH) - 6 * norms)


def test_flops_do_not_depend_on_the_implementation() -> None:
    assert len({build(GPT2 | {"implementation": name}).flops_per_token(37) for name in ("naive", "sdpa", "flash")}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "heads must divide width, got heads=5 and width=48: choose a width of 50"),
        ({"kv_heads": 4}, "kv_heads must divide heads, got kv_heads=4 and heads=6"),
        ({"heads": 16, "positions": "rotary"}, "head_size must be even, got 3: choose another number of heads"),
        ({"positions": "alibi"}, "positions must be one of learned, rotary, got 'alibi'"),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"feed_forward": "relu"}, "feed_forward must be one of gelu, swiglu, got 'relu'"),
        ({"checkpointing": "layer"}, "checkpointing must be one of none, block, got 'layer'"),
        ({"implementation": "fast"}, "implementation must be one of flash, .*, got 'fast'"),
        ({"depth": 0}, "depth must be a positive integer, got 0"),
        ({"vocabulary_size": 0}, "vocabulary_size must be a positive integer, got 0"),
        ({"context_length": -3}, "context_length must be a positive integer, got -3"),
        ({"dropout": 1.5}, "dropout probability has to be between 0 and 1, but got 1.5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(GPT2 | arguments)


@KINDS
def test_a_sequence_beyond_the_context_is_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="no longer than context_length=41, got 42 tokens: shorten it"):
        build(arguments)(make_tokens(42))


def test_tokens_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\], got shape \(37,\)"):
        build(GPT2)(make_tokens()[0])
