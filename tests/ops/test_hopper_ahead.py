"""Every row of the Hopper kernels' tables compiles for sm_90, fits, spills nothing, keeps products in flight.

In a process of its own, without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions cannot be compiled: run with TRITON_INTERPRET=0", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flash_train.ops.kernels.hopper.forward import hopper_forward_kernel, owns_output
from flash_train.ops.kernels.hopper.tables import FORWARD, SHARED_BYTES
from tests.ops.ptxas import verdict


def tile(dtype: str, rows: int, columns: int, documents: bool = False) -> str:
    """A descriptor's type, as `shim.describe` makes it."""
    size = 4 if dtype == "fp32" else 2
    layout = gl.NVMMASharedLayout(min(128, size * columns), 8 * size, 5 if documents else 4)
    return f"tensordesc<{dtype}[{'1, ' * (3 if documents else 2)}{rows}, {columns}],{layout}>"


def forward(
    mask: str, D: int, E: int, dtype: str = "bf16", persistent: bool = False, soft_cap: bool = False,
    documents: bool = False,
):  # fmt: skip
    """The kernel as `hopper_forward` launches it."""
    row, names = FORWARD[max(D, E)], hopper_forward_kernel.arg_names
    constants = dict(
        MASK=mask, DOCUMENTS=documents, SOFT_CAP=soft_cap, BLOCK_S=row.block_s, D=D, E=E, CONSUMERS=row.consumers,
        STAGES=row.stages, PERSISTENT=persistent, FIXED_MAX=persistent and not documents and dtype == "bf16",
        OWN_OUTPUT=owns_output(row, D, E, persistent), REGISTERS=row.registers, FEW_REGISTERS=row.few_registers,
    )  # fmt: skip
    types = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr") | dict(
        q=tile(dtype, 64, D), k=tile(dtype, row.block_s, D), v=tile(dtype, row.block_s, E, documents),
        near=tile(dtype, row.block_s, E, True) if documents else "*fp32", output=tile(dtype, 64, E, documents),
        lse="*fp32", counter="*i32" if persistent else "*fp32", scale="fp32", inner="fp32",
        **dict.fromkeys(("bounds", "document"), "*i32" if documents else "*fp32"),
    )  # fmt: skip
    source = GluonASTSource(hopper_forward_kernel, types, {(names.index(n),): x for n, x in constants.items()})
    options = dict(num_warps=4, enable_fp_fusion=True)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(
    ("persistent", "soft_cap", "documents"),
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True)],
    ids=["plain", "walking", "soft cap", "documents"],
)
def test_the_forward_compiles_without_a_spill_or_a_product_that_waits(mask, sizes, persistent, soft_cap, documents):
    """Or, of documents, with the few numbers that are read once for each."""
    D, E = sizes
    dtype = "fp16" if mask == "window" and not persistent else "bf16"
    kernel = forward(mask, D, E, dtype, persistent, soft_cap, documents)
    said = verdict(kernel)
    assert kernel.metadata.shared <= SHARED_BYTES
    assert said.spilled <= (24 if documents else 0) and said.warnings == []
    assert "setmaxnreg" in kernel.asm["ptx"], "no registers move from the producer to the consumers"
