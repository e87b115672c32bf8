"""Every row of the Hopper backward's table compiles for sm_90, fits, spills next to nothing, keeps products in flight.

In a process of its own, without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions cannot be compiled: run with TRITON_INTERPRET=0", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from flash_train.ops.kernels.hopper.backward import hopper_backward_kernel
from flash_train.ops.kernels.hopper.backward_wide import hopper_wide_backward_kernel
from flash_train.ops.kernels.hopper.tables import BACKWARD, SHARED_BYTES
from tests.ops.ptxas import verdict
from tests.ops.test_hopper_ahead import tile

MASKS = ["full", "causal", "window"]
SPILLED = {
    64: ((128, 184, 232), (820, 848, 904), (260, 252, 308)),
    128: ((84, 104, 88), (252, 276, 328), (180, 188, 204)),
    256: ((204, 228, 244), (200, 228, 244), (880, 900, 912)),
}
"""Bytes a thread of full, causal and window: plain, with a soft cap, with documents; Triton 3.6.0 and 3.7.1, the
larger. Without a soft cap they are addresses and bounds, written before the loop: a step of width 64 reads some 15 of
them again."""
TARGET = GPUTarget("cuda", 90, 32)


def backward(mask: str, W: int, dtype: str = "bf16", soft_cap: bool = False, documents: bool = False):
    """The kernel as `hopper_backward` launches it."""
    kernel = hopper_backward_kernel if W < 256 else hopper_wide_backward_kernel
    row, names = BACKWARD[W], kernel.arg_names
    constants = dict(
        MASK=mask, DOCUMENTS=documents, BLOCK_T=row.block_t, W=W, STAGES=row.stages, SOFT_CAP=soft_cap,
        REGISTERS=row.registers, FEW_REGISTERS=row.few_registers,
    )  # fmt: skip
    queries, keys = tile(dtype, row.block_t, W, documents), tile(dtype, 64, W, documents)
    types = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr") | dict(
        **dict(near_q=queries, near_k=keys, near_v=keys, near_do=queries) if documents
        else dict.fromkeys(("near_q", "near_k", "near_v", "near_do"), "*i32"),
        q=queries, k=keys, v=keys, do=queries, starts=tile("bf16", row.block_t, 16, documents),
        sums=tile("fp32", 64, 64, documents), dq=tile(dtype, 64, 64, documents), dk=keys, dv=keys,
        counts="*i32", bounds="*i32", document="*i32", log2_scale="fp32", scale="fp32", inner="fp32",
    )  # fmt: skip
    source = GluonASTSource(kernel, types, {(names.index(n),): x for n, x in constants.items()})
    return triton.compile(source, target=TARGET, options=dict(num_warps=4, enable_fp_fusion=True))


@pytest.mark.parametrize("W", BACKWARD)
@pytest.mark.parametrize("what", ["plain", "soft cap", "documents"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_backward_compiles_with_few_spills_and_no_product_that_waits(mask, what, W):
    dtype = "fp16" if mask == "window" else "bf16"
    kernel = backward(mask, W, dtype, soft_cap=what == "soft cap", documents=what == "documents")
    said = verdict(kernel)
    assert kernel.metadata.shared <= SHARED_BYTES
    most = SPILLED[W][("plain", "soft cap", "documents").index(what)][MASKS.index(mask)]
    assert said.spilled <= most and said.warnings == []
    assert "setmaxnreg" in kernel.asm["ptx"], "no registers move from the producer to the consumers"


@pytest.mark.parametrize(("W", "a_step"), [(64, 64), (128, 32)])
def test_a_steps_exponentials_are_all_computed_while_its_second_product_runs(W, a_step):
    after_waits = backward("causal", W).asm["sass"].split("WARPGROUP.DEPBAR.LE gsb0, ")[1:]
    computed = [(part[:3], part.count("MUFU.EX2")) for part in after_waits]
    # of each warpgroup, behind the wait that leaves the second product and what its sums begin with running
    assert [x for x in computed if x[1]] == [("0x2", a_step), ("0x2", a_step)]
