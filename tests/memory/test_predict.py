"""A prediction is what happens."""

import contextlib
import csv
import doctest
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_train.diagnostics.probe import probe_memory
from flash_train.memory import cuda_rules, predict
from flash_train.memory.advice import memory_advice
from flash_train.memory.cards import CARDS, GIB
from flash_train.memory.fakes import Fakes
from flash_train.memory.live import LiveBytes
from flash_train.memory.predict import Predictor, predict_peak
from flash_train.memory.step import FakeStep
from flash_train.models.gpt import GPT
from flash_train.modules.attention import SelfAttention
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw
from tests.memory.toys import Foreign, Language, adam, take_real_steps, tokens

RUNS = Path(__file__).parents[2] / ".assets" / "h200-long-context.csv"


@pytest.mark.parametrize("implementation", ["naive", "sdpa", "tiled"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("change", [{}, {"accumulate": 3}, {"gradient_clip": 1.0}, {"checkpointing": "block"}])
def test_on_a_cpu_every_phase_and_category_is_exact(
    implementation: str, precision: str, change: dict[str, Any]
) -> None:
    batch = tokens()
    module = Language(implementation, change.pop("checkpointing", "none"))
    predicted = predict_peak(module, batch, optimizer=adam, precision=precision, device="cpu", **change)
    real = take_real_steps(
        module, batch, adam, autocast=precision == "bf16-mixed", accumulate=change.get("accumulate", 1),
        clip=change.get("gradient_clip"),
    ).peaks()  # fmt: skip
    for phase, peak in predicted.phases.items():
        assert (peak.size, peak.categories) == (real[phase].size, real[phase].categories), phase


def test_true_half_precision_is_exact() -> None:
    batch, module = tokens(), Language("naive")
    predicted = predict_peak(module, batch, optimizer=adam, precision="bf16-true", device="cpu")
    real = take_real_steps(module.to(torch.bfloat16), batch, adam).peaks()
    assert {name: peak.size for name, peak in predicted.phases.items()} == {n: p.size for n, p in real.items()}


def test_a_foreign_lightning_module_is_exact_and_stays_as_it_was() -> None:
    module, batch = Foreign(), (torch.randint(101, (2, 19)), torch.randint(101, (2, 19)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    predicted = predict_peak(module, batch, device="cpu")
    assert module.losses == [] and module._trainer is None
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with pytest.warns(UserWarning, match="trainer"):
        real = take_real_steps(module, batch, adam).peaks()
    # two scalars more: the list of losses has its first from the step before
    assert {n: p.size for n, p in real.items()} == pytest.approx(
        {n: p.size for n, p in predicted.phases.items()}, abs=8
    )
    idle = [block for peak in predicted.phases.values() for block in peak.blocks if block.shape == (1000,)]
    assert {block.category for block in idle} == {"parameters"}, "a parameter without a gradient has no state"


def h200_runs() -> list[dict[str, str]]:
    rows = list(csv.DictReader(RUNS.read_text().splitlines()))
    return [row for row in rows if row["repeat"] == "1" and row["arm"] in ("naive", "sdpa", "flash")]


@pytest.mark.parametrize("row", h200_runs(), ids=lambda row: f"{row['arm']}-{row['length']}")
def test_on_an_h200_every_phase_above_a_gibibyte_was_within_a_fifth_of_a_per_cent(row: dict[str, str]) -> None:
    length = int(row["length"])
    rows = 16384 // length
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(vocabulary_size=50304, context_length=length, width=768, depth=12, heads=12,
                    implementation=row["arm"])  # fmt: skip
        batch = {name: torch.empty(rows, length, dtype=torch.int64) for name in ("inputs", "targets")}
    module = LanguageModel(model, optimizer=partial(adamw, lr=6e-4, fused=True))
    predicted = predict_peak(module, batch, precision="bf16-mixed", card=CARDS["h200"])
    if row["status"] == "oom":
        assert predicted.needed(0.0) > CARDS["h200"].memory
        return
    for phase, size in predicted.allocated.items():
        measured = int(row[f"{phase}_peak_allocated_bytes"])
        assert size == pytest.approx(measured, rel=0.002), phase
    assert predicted.peak == pytest.approx(int(row["peak_allocated_bytes"]), rel=0.0003)


@pytest.mark.parametrize(
    "implementation, precision, peak",
    [("naive", "bf16-true", 8), ("naive", "bf16-mixed", 16), ("naive", "32-true", 16), ("sdpa", "bf16-true", 0)],
)
def test_bytes_for_each_score_are_those_measured_on_an_h200(implementation: str, precision: str, peak: int) -> None:
    """One layer's core: what a T twice as long adds beyond twice, for each of the scores that it adds."""
    heads = 2

    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SelfAttention(24, heads, implementation=implementation)

        def training_step(self, batch):
            return self.attention(batch).float().square().mean()

    predictor = Predictor(Core(), optimizer=lambda m: torch.optim.SGD(m.parameters()), precision=precision)
    short, long = (predictor(torch.empty(1, length, 24)) for length in (4096, 8192))
    more = heads * (8192**2 - 2 * 4096**2)

    def quadratic(what) -> float:
        return (what(long) - 2 * what(short)) / more

    mask = 1 / heads if peak else 0  # one byte a pair, which the heads share
    assert quadratic(lambda p: p.phases["backward"].size) == pytest.approx(peak + mask, abs=0.01)


def test_naive_grows_with_the_square_of_t_and_flash_with_t() -> None:
    def second_difference(implementation: str) -> int:
        predictor = Predictor(Language(implementation), optimizer=adam, precision="bf16-mixed")
        sizes = [predictor(tokens(1, length)).requested for length in range(2048, 4097, 512)]
        first = [b - a for a, b in zip(sizes, sizes[1:], strict=False)]
        second = {b - a for a, b in zip(first, first[1:], strict=False)}
        assert min(first) > 0 and len(second) == 1, "one polynomial of the second degree"
        return second.pop()

    assert second_difference("naive") > 2 * 512**2 * (2 * 6 + 10)
    assert second_difference("flash") == 0


def test_what_a_step_adds_to_its_gradients_in_place_is_no_micro_batch() -> None:
    class Noisy(nn.Linear):
        add: Any

        def training_step(self, batch):
            return self(batch).square().mean()

        def configure_gradient_clipping(self, optimizer, value, algorithm):
            for parameter in self.parameters():
                self.add(parameter.grad, torch.randn_like(parameter))

    class ByOne(Noisy):
        add = staticmethod(lambda total, part: total.add_(part))

    class ByMany(Noisy):
        add = staticmethod(lambda total, part: torch._foreach_add_([total], [part]))  # pyright: ignore

    one, many = (predict_peak(kind(1500, 1500), torch.empty(8, 1500), optimizer=adam) for kind in (ByOne, ByMany))
    assert one.allocated == many.allocated


def test_accumulation_keeps_the_gradients_through_the_backward() -> None:
    module = Language("sdpa")
    gradients = sum(4 * p.numel() for p in module.parameters())
    once, often = (predict_peak(module, tokens(), optimizer=adam, accumulate=n, device="cpu") for n in (1, 4))
    assert often.phases["forward"].size - once.phases["forward"].size <= 4
    begin = {n: p.phases["backward"].categories["gradients"] for n, p in (("once", once), ("often", often))}
    assert begin["once"] < begin["often"] == gradients


def test_an_operator_of_anybody_s_declares_its_workspace() -> None:
    sizes = {}
    for name, card in (("a100_80gb", CARDS["a100_80gb"]), ("h200", CARDS["h200"])):
        predicted = predict_peak(Language("flash"), tokens(), optimizer=adam, precision="bf16-mixed", card=card)
        found = [e for e in predicted.phases["backward"].blocks if e.category == "workspaces"]
        sizes[name] = predicted
        assert len(found) <= 1
    q = torch.empty(3, 2, 37, 12, dtype=torch.bfloat16)
    operator: Any = torch.ops.flash_train.attention_backward.default
    declared = operator.workspace_bytes
    rest = (q, q, q, None, False, 1.0)
    assert declared((8, 0), q, None, q, *rest) == 4 * 3 * 2 * 37
    assert declared((9, 0), q, None, q, *rest) == 3 * 2 * (4 * 40 * 12 + 32 * 128 + 4 * 2)
    assert sizes["h200"].cublas == 64 * 2**20


def test_rms_norm_keeps_its_input_and_a_number_a_row_on_a_gpu() -> None:
    kept: list[tuple[int, ...]] = []
    with cuda_rules.cuda_rules((9, 0)), FakeTensorMode():
        norm, x = nn.RMSNorm(24), torch.empty(5, 7, 24, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda y: (kept.append(tuple(y.shape)), y)[1], lambda y: y):
            gradients = torch.autograd.grad(norm(x).sum(), [x, norm.weight])
    assert sorted(kept) == [(5, 7, 1), (5, 7, 24), (24,)]
    assert [g.shape for g in gradients] == [x.shape, norm.weight.shape]


def test_dropout_keeps_a_byte_for_each_element_on_a_gpu() -> None:
    class Dropping(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(64, 64, bias=False), nn.Dropout(p)

        def training_step(self, batch):
            return self.dropout(self.linear(batch)).sum()

    without, half = (predict_peak(Dropping(p), torch.empty(512, 64), optimizer=adam) for p in (0.0, 0.5))
    kept = [prediction.phases["backward"].categories["activations"] for prediction in (without, half)]
    assert kept[1] - kept[0] == 512 * 64


def test_the_rules_are_gone_afterwards() -> None:
    predict_peak(Language("naive"), tokens(), optimizer=adam, precision="bf16-mixed")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1).dtype == torch.bfloat16
    assert nn.functional.dropout(torch.ones(8), 1.0).sum() == 0


def test_a_prediction_does_not_mind_where_it_is_asked_for() -> None:
    usual = predict_peak(Language("naive"), tokens(), optimizer=adam, precision="bf16-mixed")
    with torch.no_grad(), FakeTensorMode():
        elsewhere = predict_peak(Language("naive"), tokens(), optimizer=adam, precision="bf16-mixed")
    assert {n: p.size for n, p in elsewhere.phases.items()} == {n: p.size for n, p in usual.phases.items()}


def test_a_compiled_model_is_predicted_as_an_eager_one() -> None:
    module = Language("sdpa")
    eager = predict_peak(module, tokens(), optimizer=adam, precision="bf16-mixed").peak
    module.model.compile()
    assert predict_peak(module, tokens(), optimizer=adam, precision="bf16-mixed").peak == eager


def test_a_prediction_and_all_that_it_is_asked_takes_one_fake_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    run = FakeStep._run
    monkeypatch.setattr(FakeStep, "_run", lambda self, batch, live: (steps.append(batch), run(self, batch, live))[1])
    predicted = predict_peak(Language("flash"), tokens(), optimizer=adam, accumulate=4)
    assert predicted.replay is not None and predicted.replay.reserved() >= predicted.peak >= predicted.smooth
    assert len(steps) == 1


def test_a_card_s_share_and_the_peak_add_up() -> None:
    predicted = predict_peak(Language("sdpa"), tokens(), optimizer=adam, precision="bf16-mixed", card=CARDS["h200"])
    assert sum(predicted.categories.values()) == predicted.peak
    assert predicted.rounding > 0
    assert predicted.needed(0.04) == round(predicted.smooth * 1.04) + predicted.context
    assert predicted.needed(0) == predicted.peak + predicted.context
    assert CARDS["h200"].memory > 139 * GIB


class Reading(Language):
    def training_step(self, batch):
        return super().training_step(batch) * batch["inputs"].max().item()


class Masking(Language):
    def training_step(self, batch):
        inputs = batch["inputs"]
        return super().training_step(batch) + inputs[inputs > 3].sum()


class Silent(nn.Linear):
    def training_step(self, batch):
        return None


class Many(nn.Linear):
    def training_step(self, batch):
        return self.weight.sum(0)


class Lazy(nn.LazyLinear):
    def training_step(self, batch):
        return self(batch["inputs"].float()).mean()


class Exporting(Language):
    def training_step(self, batch):
        return super().training_step(batch) * len(np.asarray(batch["inputs"]))


class Graph(Language):
    def __init__(self, neighbours: torch.Tensor) -> None:
        super().__init__("naive")
        self.register_buffer("neighbours", neighbours)


class Locked(Language):
    def __init__(self) -> None:
        super().__init__("naive")
        self.lock = threading.Lock()


class Recurrent(nn.LSTM):
    def training_step(self, batch):
        return self(batch["inputs"].float()[..., None])[0].mean()


class ByHand(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    "module, arguments, text",
    [
        (nn.Linear(2, 2), {}, r"module must have a training_step\(batch\) .* Linear has none: wrap it"),
        (Language("naive"), {"optimizer": None}, r"Language has no configure_optimizers: give optimizer=lambda"),
        (
            Language("naive"),
            {"optimizer": lambda m: [adam(m), adam(m)]},
            r"one optimizer, got \[AdamW, AdamW\]: return",
        ),
        (ByHand(), {}, r"ByHand has automatic_optimization=False"),
        (Reading("naive"), {}, r"training_step must not depend on .*, and aten._local_scalar_dense.default does"),
        (
            Masking("naive"),
            {},
            r"training_step must not depend on the values of tensors, and aten.nonzero.default does",
        ),
        (
            Language("naive"),
            {"optimizer": lambda m: torch.optim.LBFGS(m.parameters())},
            r"LBFGS takes as many as it likes",
        ),
        (Exporting("naive"), {}, r"training_step must not depend on .*, and Tensor.__array__ does"),
        (Silent(2, 2), {}, r"training_step must return the loss, .*, got NoneType"),
        (Many(2, 2), {}, r"training_step must return the loss, .*, got a tensor of shape \[2\]:"),
        (Lazy(2), {}, r"know the shapes of its parameters, and weight waits for a first batch: run one through it"),
        (Language("naive"), {"precision": "bf16"}, r"precision must be one of 32-true, .*, got 'bf16'"),
        (Language("naive"), {"accumulate": 0}, r"accumulate must be a number of micro-batches from 1 on, got 0"),
        (Language("naive"), {"gradient_clip": -1.0}, r"gradient_clip must be a positive norm or None .*, got -1.0"),
        (
            Graph(torch.eye(4).to_sparse()),
            {},
            r"a tensor must be dense to be predicted, got one of layout torch.sparse_coo",
        ),
        (
            Locked(),
            {},
            r"module must be one that copy.deepcopy copies, and Locked is not \(cannot pickle '_thread.lock'",
        ),
        (Recurrent(1, 4, batch_first=True), {}, r"what an LSTM keeps for its backward, .* probe_memory measures it"),
        (Language("naive"), {"gradient_clip": "norm"}, r"gradient_clip must be a positive norm or None .*, got 'norm'"),
        (Language("naive"), {"device": "mps"}, r"device must be cuda or cpu, got 'mps'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(module, arguments, text) -> None:
    with pytest.raises(ValueError, match=text):
        predict_peak(module, tokens(), **{"optimizer": adam, **arguments})


@pytest.mark.parametrize(
    "batch", [torch.eye(8).to_sparse(), torch.nested.nested_tensor([torch.ones(8)], layout=torch.jagged)]
)
def test_a_batch_that_is_not_dense_is_refused(batch: torch.Tensor) -> None:
    for ask in (predict_peak, memory_advice):
        with pytest.raises(ValueError, match="a tensor must be dense to be predicted, got one of layout"):
            ask(Options(lambda self, batch: self(batch).sum()), batch, optimizer=adam)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD([nn.Parameter(torch.ones(1))])])
def test_an_optimizer_is_made_by_a_function_of_the_module(optimizer: Any) -> None:
    with pytest.raises(TypeError, match="optimizer must be a function .*: give optimizer=lambda module"):
        predict_peak(Language("naive"), tokens(), optimizer=optimizer)


class Naming(Language):
    """As written by somebody with a GPU, who logs a number."""

    def training_step(self, batch):
        loss = super().training_step({name: tensor.cuda() for name, tensor in batch.items()})
        self.seen = f"{loss.item()} {loss:.2f}"
        return loss * torch.ones((), device="cuda") + torch.zeros(1).to("cuda:0").sum()


def test_code_that_names_a_gpu_and_reads_its_loss_is_predicted() -> None:
    plain, naming = (predict_peak(make("naive"), tokens(), optimizer=adam) for make in (Language, Naming))
    assert 0 <= naming.peak - plain.peak <= 6 * 512


class Drawing(Language):
    def __init__(self) -> None:
        super().__init__("naive")
        self.generator = torch.Generator()

    def training_step(self, batch):
        return super().training_step(batch) + torch.rand(1000, generator=self.generator).mean()


def test_a_generator_of_random_numbers_is_left_where_it_was() -> None:
    module = Drawing()
    before = module.generator.get_state()
    assert predict_peak(module, tokens(), optimizer=adam).peak > 0
    assert torch.equal(module.generator.get_state(), before)


class Options(nn.Linear):
    def __init__(self, step: Any) -> None:
        super().__init__(8, 8)
        self.training_step = step.__get__(self)


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch: self(batch).sum(),
        lambda self, batch, index: self(batch)[index].sum(),
        lambda self, batch, *, scale=2.0: scale * self(batch).sum(),
        lambda self, batch, **options: self(batch).sum(),
        lambda self, *arguments: self(arguments[0])[arguments[1]].sum(),
    ],
    ids=["batch", "index", "keyword", "keywords", "arguments"],
)
def test_a_training_step_gets_an_index_where_lightning_gives_one(step: Any) -> None:
    module, batch = Options(step), torch.ones(4, 8)
    assert predict_peak(module, batch, optimizer=adam, device="cpu").peak > 0
    assert probe_memory(module, batch, optimizer=adam(module)).peak.measured > 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_as_small_as_they_are(kind: Any) -> None:
    class Sparse(nn.Embedding):
        def training_step(self, batch):
            return self(batch).sum()

    module, batch = Sparse(5000, 64, sparse=True), torch.randint(5000, (2, 3))
    predicted = predict_peak(module, batch, optimizer=lambda m: kind(m.parameters()), device="cpu")
    real = probe_memory(module, batch, optimizer=kind(module.parameters()))
    assert predicted.peak == pytest.approx(real.peak.measured, abs=16384)  # the table has 1.3 MB


def test_a_tensor_on_a_gpu_that_comes_about_all_the_same_is_an_error_and_not_the_end() -> None:
    fakes = Fakes()
    with fakes, pytest.raises(ValueError, match="must make its tensors where its batch is, and .* makes one on cuda:0"):
        torch.empty(1, device="cuda")


@pytest.mark.parametrize(
    "make, states",
    [
        (lambda p: torch.optim.SGD(p, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, capturable=True), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True, fused=True), 3),
        (lambda p: torch.optim.Adafactor(p), 0),
    ],
)
def test_an_optimizer_s_state_is_counted(make, states) -> None:
    module = Language("sdpa")
    predicted = predict_peak(module, tokens(), optimizer=lambda m: make(m.parameters()), device="cpu")
    parameters = sum(4 * p.numel() for p in module.parameters())
    held = predicted.phases["forward"].categories["optimizer state"]
    assert states * parameters <= held < (states + 0.1) * parameters + 4 * 100


def test_the_docstring_s_example_is_true() -> None:
    assert doctest.testmod(predict).failed == 0 and doctest.testmod(predict).attempted >= 4


def test_a_class_is_no_module() -> None:
    with pytest.raises(TypeError, match="module must be an nn.Module, got type: give the module"):
        predict_peak(Language, tokens(), optimizer=adam)  # pyright: ignore[reportArgumentType]


def test_autocast_s_lists_are_names_that_torch_registers_for_cuda() -> None:
    registered = cuda_rules._registered("AutocastCUDA")
    for names in (cuda_rules.LOWER, cuda_rules.PROMOTED, cuda_rules.FP32_UNLESS_TOLD):
        assert names <= registered, names - registered
    assert len(cuda_rules.LOWER | cuda_rules.PROMOTED | cuda_rules.FP32_UNLESS_TOLD) < len(registered) - 40, (
        "the others are fp32's"
    )


@pytest.mark.parametrize(
    "function, dtype",
    [
        (lambda x: torch.softmax(x, -1), torch.float32),
        (lambda x: torch.softmax(x, -1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda x: nn.functional.layer_norm(x, (8,)), torch.float32),
        (lambda x: x.pow(2), torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: nn.functional.gelu(x), torch.bfloat16),
        (lambda x: x.float() @ x.float(), torch.bfloat16),
        (lambda x: torch.einsum("ij,jk->ik", x.float(), x), torch.bfloat16),
        (lambda x: torch.addcmul(x, x.float(), x), torch.float32),
        (lambda x: torch.cat([x, x]), torch.bfloat16),
    ],
)
def test_autocast_chooses_as_on_cuda(function, dtype) -> None:
    """The types in torch's table of CUDA operators (the page on automatic mixed precision)."""
    with cuda_rules.cuda_rules((8, 0)), FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(torch.empty(8, 8, dtype=torch.bfloat16)).dtype == dtype


@pytest.mark.parametrize(
    "backends, capability, dtype, groups, operator",
    [
        (None, (8, 0), torch.bfloat16, 2, "flash_attention"),
        (None, (9, 0), torch.bfloat16, 2, "cudnn_attention"),
        (None, (9, 0), torch.float32, 4, "efficient_attention"),
        (None, (9, 0), torch.float32, 2, "efficient_attention" if torch.__version__ >= "2.14" else "bmm"),
        ([SDPBackend.EFFICIENT_ATTENTION], (8, 0), torch.bfloat16, 4, "efficient_attention"),
        ([SDPBackend.MATH], (8, 0), torch.bfloat16, 2, "bmm"),
    ],
)
def test_sdpa_takes_the_back_end_that_it_takes_on_a_gpu(backends, capability, dtype, groups, operator) -> None:
    chosen = sdpa_kernel(backends) if backends else contextlib.nullcontext()
    with cuda_rules.cuda_rules(capability), FakeTensorMode(), LiveBytes(nn.Identity()) as live, chosen:
        live.enter("only")
        q = torch.empty(2, 4, 16, 64, dtype=dtype, requires_grad=True)
        kv = torch.empty(2, groups, 16, 64, dtype=dtype)
        nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True).sum().backward()
        seen = {block.operation for _, block, _ in live._events}
    assert any(operator in name for name in seen), seen
