"""Every row of the launch tables compiles for its architecture, without a GPU, and without spilling more than is known.

In a process of its own, without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions cannot be compiled: run with TRITON_INTERPRET=0", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_train.ops.kernels.backward import dkdv_kernel, dq_kernel
from flash_train.ops.kernels.forward import forward_kernel
from flash_train.ops.kernels.tables import DIRECTIONS, Launch, lookup

KERNELS = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel}
ARCHITECTURES = {"sm_80": (80, False), "sm_90": (90, True), "sm_100": (100, True)}
# bytes of stack a thread, Triton 3.7.1 (another version allots registers otherwise); (64, 64, 4, 2) was the fastest on
# an H200 in spite of them
STACK = {
    ("sm_90", "dkdv", 128): 96,
    ("sm_90", "dkdv", 256): 160,
    ("sm_90", "dq", 256): 320,
    ("sm_80", "forward", 64): 16,
    ("sm_80", "dq", 64): 16,
}
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def compiled(direction: str, size: int, launch: Launch, target: int, dtype: str, descriptor: bool):
    """The kernel for causal attention at this head size, strides divisible by 16."""
    kernel = KERNELS[direction]
    rows = dict(q=launch.block_t, do=launch.block_t, k=launch.block_s, v=launch.block_s)
    constants = dict(
        D=size, E=size, BLOCK_T=launch.block_t, BLOCK_S=launch.block_s, BLOCK_D=size, BLOCK_E=size, CAUSAL=True,
        DESCRIPTOR=descriptor, PRECISION="ieee", UPCAST=False, HEADS_TOGETHER=8,
    )  # fmt: skip
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
        elif name.endswith("_strides"):
            signature[name], values[index, 3] = ("i32", "i32", "i32", "constexpr"), 1
            attributes |= {(index, dimension): [["tt.divisibility", 16]] for dimension in range(3)}
        elif name in rows and descriptor:
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows[name]}, {size}]>"
        elif name in ("heads", "H", "G", "T", "S", "scale"):
            signature[name] = "fp32" if name == "scale" else "i32"
        else:
            signature[name] = "*fp32" if name in ("lse", "delta") else f"*{dtype}"
            attributes[index,] = [["tt.divisibility", 16]]
    options = dict(num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True)
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def stack_bytes(kernel) -> int:
    """What a thread keeps outside its registers, by cuobjdump (`n_regs` is unknown without a driver)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found, report
    return int(found[1])


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_compiles_and_fits(architecture, direction, size):
    target, descriptor = ARCHITECTURES[architecture]
    kernel = compiled(direction, size, lookup(architecture, direction, 2, size), target, "bf16", descriptor)
    assert kernel.metadata.shared <= SHARED_BYTES[architecture]
    if architecture != "sm_100" and triton.__version__ == "3.7.1":  # sm_100 was never run on: compiled only
        assert stack_bytes(kernel) <= STACK.get((architecture, direction, size), 0)
    if descriptor:
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"], "the tiles do not travel by the copy engine"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_fp32_compiles_and_multiplies_without_tf32(architecture, direction):
    launch = lookup(architecture, direction, 4, 64)
    kernel = compiled(direction, 64, launch, ARCHITECTURES[architecture][0], "fp32", False)
    assert kernel.metadata.shared <= SHARED_BYTES[architecture]
    assert "tf32" not in kernel.asm["ptx"]
