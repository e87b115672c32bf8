"""Precision and memory levers as overrides."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from flash_train.commands.objects import set_memory_budget
from flash_train.commands.train import main
from flash_train.models.gpt import GPT
from tests.commands.conftest import SHORT, Command


@pytest.mark.parametrize(
    "levers",
    [
        ("precision=fp32", "checkpointing=selective", "vocabulary_multiple=100", "loss.z_loss=1e-4"),
        ("precision=bf16_true", "checkpointing=block", "checkpointing.every=2", "optimizer.foreach=true"),
        ("precision=bf16_mixed", "checkpointing=activation", "checkpointing.every=2"),
        (
            "precision=bf16_mixed",
            "precision.residual=bf16",
            "checkpointing=selective",
            "loss=chunked",
            "loss.z_loss=1e-4",
        ),
        ("precision=bf16_masters", "precision.fp32_gradients=true", "callbacks=[default,ema]"),
    ],
    ids=lambda levers: ",".join(levers[:2]),
)
def test_every_precision_that_a_cpu_has_trains_with_every_lever(
    command: Command, tmp_path: Path, levers: tuple[str, ...]
) -> None:
    answer = command(main, *SHORT, *levers)
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [loss for _, loss in found["loss_curve"]] == pytest.approx([5.4, 5.4], abs=0.5)
    assert found["memory"]["predicted_bytes"] > 0


def test_the_memory_of_a_whole_loss_with_a_z_loss_and_capped_logits_is_predicted(
    command: Command, tmp_path: Path
) -> None:
    wide = ("vocabulary_size=5000", "loss.z_loss=1e-4", "model.logit_soft_cap=30")
    assert command(main, *SHORT, *wide).code == 0
    memory = json.loads((tmp_path / "run" / "result.json").read_text())["memory"]
    assert memory["predicted_bytes"] == pytest.approx(memory["peak_allocated_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("levers", "text"),
    [
        (("precision=fp16_mixed",), "fp16 needs a GPU: on a CPU Lightning would take bf16 in its place"),
        (("precision=fp32", "precision.residual=bf16"), "precision.residual=bf16 needs a model that computes in bf16"),
        (("precision=fp32", "precision.fp8=rowwise"), "precision.fp8 goes with bf16, got precision.lightning=32-true"),
        (
            ("precision=bf16_masters", "optimizer=muon"),
            "master_weights needs an optimizer that keeps them, and .*muon tak",
        ),
        (("precision=fp32", "+precision.master_weights=true"), "master_weights are of weights in half precision, got"),
        (("precision=bf16_true", "+precision.fp32_gradients=true"), "fp32_gradients needs fp32 master weights; choose"),
        (("+optimizer.master_weights=true",), "optimizer.master_weights follows from .*see precision=bf16_masters"),
        (("compile.memory_budget=0.8",), "compile.memory_budget is the compiler's; give compile=on with it"),
        (("compile=on", "compile.memory_budget=2"), "a share of the activations from 0 to 1, got 2"),
        (
            ("checkpointing.granularity=layer",),
            "checkpointing must be one of none, activation, block, selective, got 'layer'",
        ),
        (("checkpointing=block", "checkpointing.every=0"), "checkpoint_every must be a positive integer, got 0"),
        (("loss.z_loss=-1e-4",), "loss.z_loss must be a finite number from 0 on, got -0.0001; 1e-4 is usual"),
        (("loss.z_loss=inf",), "loss.z_loss must be a finite number from 0 on, got inf"),
        (("loss.z_loss=much",), "loss.z_loss must be float, got 'much'"),
        (("vocabulary_multiple=0",), "vocabulary_multiple must be a positive integer, got 0"),
        (("+model.half_residual=true",), "model.half_residual follows from other settings .*precision.residual=bf16"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(command: Command, levers: tuple[str, ...], text: str) -> None:
    answer = command(main, *SHORT, *levers)
    lines = [line for line in answer.err.splitlines() if line.startswith("flash-train: ")]
    assert answer.code == 2 and len(lines) == 1 and "Traceback" not in answer.err
    assert re.search(text, lines[0]), lines


def test_a_run_with_masters_resumes_with_them_alone(command: Command) -> None:
    assert command(main, *SHORT, "precision=bf16_masters").code == 0
    answer = command(main, "resume_from=run", "trainer.max_steps=3", "precision=bf16_mixed")
    assert answer.code == 2 and "Traceback" not in answer.err
    assert "the run keeps its weights in fp32 masters, and precision.lightning=bf16-mixed would go on" in answer.err
    answer = command(main, "resume_from=run", "trainer.max_steps=3")
    assert answer.code == 0, answer.err


def test_fp8_is_refused_where_torchao_or_the_gpu_is_missing(command: Command) -> None:
    answer = command(main, *SHORT, "precision=fp8", "model.width=64")
    assert answer.code == 2 and ("fp8 needs torchao" in answer.err or "fp8 needs a GPU of" in answer.err)


def test_the_compiler_keeps_what_its_memory_budget_lets_it() -> None:
    kept = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        [output] = [node for node in graph.graph.nodes if node.op == "output"]
        values = [node.meta["val"] for node in output.args[0] if node.op != "placeholder"]
        kept.append(sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor)))
        return make_boxed_func(graph)

    for budget in (1.0, 0.5):
        torch.compiler.reset()
        set_memory_budget({"enabled": True, "memory_budget": budget})
        model = GPT(vocabulary_size=64, context_length=256, width=64, depth=1, heads=4)
        model.compile(
            backend=aot_autograd(
                fw_compiler=count,
                bw_compiler=lambda graph, inputs: make_boxed_func(graph),
                partition_fn=min_cut_rematerialization_partition,
            )
        )
        model(torch.randint(64, (2, 256))).sum().backward()
    set_memory_budget({"enabled": False, "memory_budget": 0.5})
    assert kept[1] < 0.6 * kept[0] and torch._functorch.config.activation_memory_budget == 1.0
