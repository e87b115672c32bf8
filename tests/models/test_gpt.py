import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flash_train.models.architecture import architecture
from flash_train.models.gpt import GPT
from flash_train.modules.attention import SelfAttention
from flash_train.ops.features import Documents

BATCH, LENGTH, VOCABULARY, WIDTH, DEPTH, HEADS, KV_HEADS = 2, 37, 59, 48, 3, 6, 2
ON_CPU = ("flash", "tiled", "sdpa", "sdpa_math", "naive_reversed")
GPT2: dict = {"vocabulary_size": VOCABULARY, "context_length": 41, "width": WIDTH, "depth": DEPTH, "heads": HEADS}
LLAMA: dict = GPT2 | {"kv_heads": KV_HEADS, "positions": "rotary", "norm": "rms", "feed_forward": "swiglu"}
EVERYTHING: dict = LLAMA | {"qk_norm": True, "tied_embeddings": False, "bias": True, "hidden_size": 70}
FEATURED: dict = EVERYTHING | {
    "positions": "alibi",
    "window": [9, None],
    "soft_cap": 7.0,
    "logit_soft_cap": 5.0,
    "sinks": True,
}
KINDS = pytest.mark.parametrize(
    "arguments", [GPT2, LLAMA, EVERYTHING, FEATURED], ids=["gpt2", "llama", "everything", "featured"]
)
KINDS_OF_SDPA = pytest.mark.parametrize("arguments", [GPT2, LLAMA, EVERYTHING], ids=["gpt2", "llama", "everything"])


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


def make_documents(tokens: Tensor) -> Tensor:
    """Ids of runs that begin at every seventh token or so: of several lengths, 1 among them."""
    return (tokens % 7 == 0).cumsum(1)


def loss_and_gradients(model: GPT, *, packed: bool = False, length: int = LENGTH) -> list[Tensor]:
    tokens = make_tokens(length).to(model.token_embedding.weight.device)
    logits = model(tokens, make_documents(tokens) if packed else None)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    parameters = list(model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def error(values: list[Tensor], exact: list[Tensor]) -> float:
    """The largest distance of a tensor from the exact one, each in units of the exact one's norm."""
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(values, exact, strict=True))


@KINDS_OF_SDPA
@pytest.mark.parametrize("implementation", ON_CPU)
def test_implementations_agree_in_loss_and_gradients_within_what_naive_loses(
    arguments: dict, implementation: str
) -> None:
    exact = loss_and_gradients(make(arguments | {"implementation": "naive"}).double())
    naive = loss_and_gradients(make(arguments | {"implementation": "naive"}))
    ours = loss_and_gradients(make(arguments | {"implementation": implementation}))
    assert error(ours, exact) <= 2 * error(naive, exact) < 1e-4


@pytest.mark.parametrize("implementation", ["flash", "tiled", "naive_reversed"])
@pytest.mark.parametrize("arguments", [GPT2, FEATURED], ids=["gpt2", "featured"])
def test_implementations_agree_on_what_sdpa_refuses(arguments: dict, implementation: str) -> None:
    exact = loss_and_gradients(make(arguments | {"implementation": "naive"}).double(), packed=True)
    naive = loss_and_gradients(make(arguments | {"implementation": "naive"}), packed=True)
    ours = loss_and_gradients(make(arguments | {"implementation": implementation}), packed=True)
    assert error(ours, exact) <= 2 * error(naive, exact) < 1e-4
    with pytest.raises(ValueError, match="'sdpa' does not take .*; use 'flash' or 'naive'"):
        loss_and_gradients(make(arguments | {"implementation": "sdpa"}), packed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [GPT2, LLAMA, FEATURED], ids=["gpt2", "llama", "featured"])
def test_the_kernels_train_packed_documents_as_exactly_as_naive_does(arguments: dict) -> None:
    def gradients(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        return loss_and_gradients(make(arguments | {"implementation": implementation}).to("cuda", dtype), packed=True)

    exact = gradients("naive", torch.float64)
    ours, naive = (error(gradients(name, torch.bfloat16), exact) for name in ("triton", "naive"))
    assert ours <= 2 * naive


@pytest.mark.parametrize("implementation", ["flash", "naive"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_the_logits_of_a_packed_document_are_those_of_the_document_alone(positions: str, implementation: str) -> None:
    model = make(LLAMA | {"positions": positions, "window": [5, None], "implementation": implementation}).double()
    tokens = make_tokens()
    ids = make_documents(tokens)
    packed, alone = model(tokens, ids), torch.zeros(BATCH, LENGTH, VOCABULARY, dtype=torch.float64)
    assert ids.max() >= 4 and not torch.isclose(packed, model(tokens)).all()
    for row in range(BATCH):
        for document in ids[row].unique():
            own = ids[row] == document
            alone[row, own] = model(tokens[row : row + 1, own])[0]
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(model(tokens, Documents.from_ids(ids)), packed)


@pytest.mark.parametrize(("window", "reach"), [(4, 12), ([4, 0], 8), ([4, None], LENGTH)])
def test_a_position_reaches_as_far_back_as_the_windows_of_the_layers_together(
    window: int | list[int | None], reach: int
) -> None:
    model, tokens = make(GPT2 | {"window": window}).double(), make_tokens()
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCABULARY
    differs = ~torch.isclose(model(tokens), model(changed), rtol=0, atol=1e-12).all(dim=-1)
    assert differs[:, 3 : 3 + reach + 1].all() and not differs[:, 3 + reach + 1 :].any()


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
    arguments = arguments | {"implementation": implementation, "dropout": 0.3, "attention_dropout": 0.2}
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


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "arguments",
    [
        GPT2,
        FEATURED | {"checkpointing": "block"},
        LLAMA | {"checkpointing": "selective", "vocabulary_multiple": 16},
        LLAMA | {"checkpointing": "activation"},
    ],
    ids=["gpt2", "featured", "selective", "activation"],
)
def test_a_model_compiles_into_one_graph(arguments: dict, packed: bool) -> None:
    torch.compiler.reset()
    model = make(arguments | {"depth": 2})
    expected = loss_and_gradients(model, packed=packed)
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(model, packed=packed), expected)
    loss_and_gradients(model, packed=packed, length=29)  # a second length makes T symbolic
    with torch.compiler.set_stance("fail_on_recompile"):
        loss_and_gradients(model, packed=packed, length=31)


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


@pytest.mark.parametrize(
    "arguments", [GPT2, LLAMA, LLAMA | {"checkpointing": "activation"}], ids=["gpt2", "llama", "activation"]
)
def test_flops_are_those_that_pytorch_counts(arguments: dict) -> None:
    model = build(arguments | {"implementation": "naive"})
    with FlopCounterMode(display=False) as counter:
        model(make_tokens()).sum().backward()
    # The formula charges norms like matrices; the counter sees matrix products alone.
    norms = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 1)
    assert counter.get_total_flops() == BATCH * LENGTH * (model.flops_per_token(LENGTH) - 6 * norms)


def test_flops_count_as_many_keys_as_a_layer_s_window_has() -> None:
    full, windowed = build(GPT2), build(GPT2 | {"window": [9, None]})
    keys_less = 2 * (LENGTH - 10)  # in the first and the third of three layers
    assert full.flops_per_token(LENGTH) - windowed.flops_per_token(LENGTH) == 12 * WIDTH * keys_less
    assert full.flops_per_token(8) == windowed.flops_per_token(8)


def test_flops_do_not_depend_on_the_implementation() -> None:
    assert len({build(GPT2 | {"implementation": name}).flops_per_token(37) for name in ("naive", "sdpa", "flash")}) == 1


@pytest.mark.parametrize("padding", [{}, {"vocabulary_multiple": 64}])
def test_logits_are_under_their_soft_cap_and_its_model_is_another(padding: dict) -> None:
    plain, capped = make(GPT2 | padding), make(GPT2 | padding | {"logit_soft_cap": 0.7})
    logits = capped(make_tokens())
    torch.testing.assert_close(logits, 0.7 * torch.tanh(plain(make_tokens()) / 0.7))
    assert logits.shape[-1] == VOCABULARY and plain(make_tokens()).abs().max() > 0.7
    found, expected = architecture(capped), architecture(plain)
    assert found == expected | {"logit_soft_cap": 0.7} and capped.flops_per_token(37) == plain.flops_per_token(37)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "heads must divide width, got heads=5 and width=48: choose a width of 50"),
        ({"kv_heads": 4}, "kv_heads must divide heads, got kv_heads=4 and heads=6"),
        ({"heads": 16, "positions": "rotary"}, "head_size must be even, got 3: choose another number of heads"),
        ({"positions": "sine"}, "positions must be one of learned, rotary, alibi, got 'sine'"),
        ({"window": [9, -1]}, r"window must be a whole number .* got \[9, -1\]: \[1023, None\] alternates"),
        ({"window": []}, r"window must be a whole number from 0 to 1073741823, None, or a list of them, got \[\]"),
        ({"window": 3.0}, r"window must be a whole number .* got 3.0: \[1023, None\] alternates"),
        ({"window": torch.tensor(3)}, r"window must be a whole number .* got tensor\(3\): "),
        ({"window": {3}}, r"window must be a whole number .* got \{3\}: "),
        ({"window": "3"}, r"window must be a whole number .* got '3': "),
        ({"window": [True, None]}, r"window must be a whole number .* got \[True, None\]: "),
        ({"window": 2**30}, "window must be a whole number from 0 to 1073741823, .* got 1073741824: "),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"feed_forward": "relu"}, "feed_forward must be one of gelu, gelu_tanh, swiglu, got 'relu'"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a number above 0, got 0.0: leave it out for the usual one"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap must be a number above 0, got 0.0: leave it out for the usual one"),
        ({"rotary_base": -1}, "rotary_base must be a number above 0, got -1: leave it out for the usual one"),
        ({"checkpointing": "layer"}, "checkpointing must be one of none, activation, block, selective, got 'layer'"),
        ({"implementation": "fast"}, "implementation must be one of flash, .*, got 'fast'"),
        ({"depth": 0}, "depth must be a positive integer, got 0"),
        ({"vocabulary_size": 0}, "vocabulary_size must be a positive integer, got 0"),
        ({"context_length": -3}, "context_length must be a positive integer, got -3"),
        ({"dropout": 1.5}, r"dropout must be a number in \[0, 1\), got 1.5: 0 drops nothing"),
        ({"attention_dropout": None}, r"attention_dropout must be a number in \[0, 1\), got None: 0 drops nothing"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(GPT2 | arguments)


@KINDS
def test_a_sequence_beyond_the_context_is_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="no longer than context_length=41, got 42 tokens: shorten it"):
        build(arguments)(make_tokens(42))


def test_documents_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"each of the tokens \[2, 37\] on cpu an id, got \[2, 36\] on cpu: make them"):
        build(GPT2)(make_tokens(), make_documents(make_tokens(36)))


def test_documents_of_another_class_are_refused() -> None:
    ids: Any = make_documents(make_tokens()).tolist()
    with pytest.raises(TypeError, match="documents must be a .* tensor of ids or Documents, got list: make one with"):
        build(GPT2)(make_tokens(), ids)


def test_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="tied_embeddings must be True or False, got str no; make one with bool"):
        build(GPT2 | {"tied_embeddings": "no"})


def test_tokens_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\], got shape \(37,\)"):
        build(GPT2)(make_tokens()[0])
