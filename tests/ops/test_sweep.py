"""A sample of the sweep, the same in every run; SWEEP_SEED in the environment draws another."""

import os

import pytest
import torch
import triton

from flash_train.ops.choice import interpreting
from tests.ops.cases import Case, inputs
from tests.ops.errors import check, results
from tests.ops.sweep import DEFAULT_PROCESSES, Memory, Processes, attempt, run_case, sweep
from tests.ops.sweep_cases import generate, names

SEED = int(os.environ.get("SWEEP_SEED", "0"))
OLD_INTERPRETER = pytest.mark.skipif(
    triton.__version__.startswith("3.6."),
    reason="Triton 3.6's interpreter reads loop bounds in a way that NumPy 2.4 refuses and 2.3 warns of",
)


@pytest.mark.parametrize("name", names("small", SEED, 60))
def test_tiled_path(name):
    run_case(name, "cpu", "tiled")


@pytest.mark.skipif(not interpreting(), reason="the kernels are compiled here, for a GPU")
@OLD_INTERPRETER
@pytest.mark.parametrize("name", names("tiny", SEED, 25))
def test_kernels_in_the_interpreter(name):
    run_case(name, "cpu", "triton")


@pytest.mark.gpu
def test_kernels_on_the_gpu():
    outcomes = sweep(names("full", SEED, 300), "cuda", "triton", DEFAULT_PROCESSES)
    assert len(outcomes) == 300
    assert [x for x in outcomes if x.error is not None] == []


def test_a_case_is_made_from_its_name_alone_and_a_sample_has_every_feature():
    assert generate("full-7-123") == generate("full-7-123") != generate("full-7-124")
    cases = [generate(name)[0] for name in names("full", SEED, 400)]
    for field in Case._fields:
        assert len({getattr(case, field) for case in cases}) > 1, field


def breaking_task(name: str, device: str, implementation: str) -> float:
    if name == "b":
        os._exit(3)
    if name == "c":
        raise ValueError("no")
    return 0.5


def test_a_process_that_dies_costs_one_case_and_each_other_case_is_run():
    outcomes = Processes(breaking_task, [["a", "b", "c"], ["d"]], "cpu", "tiled").run(1)
    errors = {name: x.error for name, x in outcomes.items()}
    assert errors == {"a": None, "b": "the process died, exit code 3", "c": "ValueError: no", "d": None}


def test_memory_shows_a_write_beside_an_allocation():
    memory = Memory()
    x = memory.empty(torch.empty(0), 3, 5, dtype=torch.bfloat16)
    assert x.isnan().all() and x.shape == (3, 5)
    x.zero_()
    assert not memory.touched_outside()
    memory.empty(x, 7).as_strided((8,), (1,)).zero_()
    assert memory.touched_outside()


@pytest.mark.parametrize(
    "wrong",
    [dict(causal=True), dict(window=(30, None)), dict(alibi=True), dict(soft_cap=20.0), dict(dropout=0.01)],
    ids=str,
)
def test_the_budget_notices_a_feature_that_is_left_out(wrong, monkeypatch):
    case = Case(2, 6, 2, 37, 41, 24, 20)
    x = inputs(case._replace(**wrong), torch.bfloat16, "cpu")
    left_out = results(x._replace(case=case, alibi_slopes=None), implementation="tiled")
    monkeypatch.setattr("tests.ops.errors.results", lambda x, *, implementation, dtype=None: (
        left_out if implementation == "tiled" else results(x, implementation=implementation, dtype=dtype)
    ))  # fmt: skip
    with pytest.raises(AssertionError, match="dk: error .* allowed"):
        check(x, implementation="tiled")


def test_attempt_reports_what_went_wrong():
    def fail(name: str, device: str, implementation: str) -> float:
        raise AssertionError("dq: error 1, allowed 0")

    assert attempt(fail, "tiny-0-0", "cpu", "tiled").error == "AssertionError: dq: error 1, allowed 0"
