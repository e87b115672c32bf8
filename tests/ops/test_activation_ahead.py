"""The activations' kernels compile without a GPU, in registers, with wide reads and two special instructions a number.

In a process of its own, without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import os
import re
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions cannot be compiled: run with TRITON_INTERPRET=0", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_train.ops.activation_linear import ACTIVATIONS
from flash_train.ops.kernels.activation import LAUNCH, activation_kernel, derivative_kernel
from tests.ops.ptxas import verdict

KERNELS = {"forward": (activation_kernel, True), "both": (derivative_kernel, True), "dx": (derivative_kernel, False)}
A_THREAD = LAUNCH.block_s // (32 * LAUNCH.warps)


def compiled(which: str, activation: str, dtype: str = "bf16", target: GPUTarget | None = None, *, F: str = "i32"):
    """The kernel for addresses and a row length that are multiples of 16."""
    kernel, output = KERNELS[which]
    fixed: dict[str, Any] = dict(ACTIVATION=activation, OUTPUT=output, FAST=target is None, BLOCK=LAUNCH.block_s)
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name], values[index,] = "constexpr", fixed[name]
            continue
        signature[name] = {"F": F, "per_row": "i32"}.get(name, f"*{dtype}")
        if name != "per_row":
            attributes[index,] = [["tt.divisibility", 16]]
    options = dict(num_warps=LAUNCH.warps, num_stages=LAUNCH.stages, enable_fp_fusion=True)
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target or GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_element_costs_two_special_instructions_and_travels_in_sixteen_bytes(activation, which, dtype):
    for F in ("i32", "i64"):
        kernel = compiled(which, activation, dtype, F=F)
        ptx, found = kernel.asm["ptx"], verdict(kernel)
        assert found.spilled == 0 and found.registers <= 64
        assert len(re.findall(r"\b(?:ex2|rcp)\.approx\.ftz", ptx)) == 2 * A_THREAD and "div.full" not in ptx
        accesses = re.findall(r"(?:ld|st)\.global\S*", ptx)
        assert accesses and all(access.endswith(".v4.b32") for access in accesses)


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpus_of_others_compile_it_with_a_plain_division(activation, which):
    compiled(which, activation, target=GPUTarget("hip", "gfx942", 64))
