"""Every row of the launch tables compiles for its architecture, without a GPU, and without spilling more than is known.

In a process of its own, without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import itertools
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions cannot be compiled: run with TRITON_INTERPRET=0", allow_module_level=True)

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_train.ops import choice
from flash_train.ops.attention import Score, flash_attention
from flash_train.ops.features import UNBOUNDED, Terms
from flash_train.ops.kernels import backward, documents
from flash_train.ops.kernels import launch as launch_module
from flash_train.ops.kernels.backward import dkdv_kernel, dq_kernel
from flash_train.ops.kernels.bias import bias_kernel
from flash_train.ops.kernels.documents import packed_documents
from flash_train.ops.kernels.forward import forward_kernel
from flash_train.ops.kernels.launch import block_size, compiled_features
from flash_train.ops.kernels.tables import DIRECTIONS, Launch, lookup, smaller
from flash_train.ops.kernels.tiles import ALIGNMENT_TOLD, Constants, Numbers
from tests.ops.cases import inputs
from tests.ops.errors import results
from tests.ops.sweep_cases import TOGETHER, generate, names

KERNELS = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel, "bias": bias_kernel}
# the launch table's name, the compiler's target, `Constants.WIDTH` of half precision
ARCHITECTURES = {
    "sm_80": ("sm_80", GPUTarget("cuda", 80, 32), 8),
    "sm_89": ("sm_86", GPUTarget("cuda", 89, 32), 8),
    "sm_90": ("sm_90", GPUTarget("cuda", 90, 32), 0),
    "sm_100": ("sm_100", GPUTarget("cuda", 100, 32), 0),
    "sm_120": ("sm_86", GPUTarget("cuda", 120, 32), 8),
    "gfx942": ("gfx942", GPUTarget("hip", "gfx942", 64), 8),
}
# bytes of stack a thread, Triton 3.7.1 (another version allots registers otherwise); (64, 64, 4, 2) was the fastest on
# an H200 in spite of them
STACK = {
    ("sm_90", "dkdv", 128): 96,
    ("sm_90", "dkdv", 256): 160,
    ("sm_90", "dq", 256): 320,
    ("sm_80", "forward", 64): 16,
    ("sm_80", "dq", 64): 16,
}
SHARED_KIB = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
CAUSAL = Terms(1.0, right=0)
TENSOR = torch.empty(1, 1, 1, 1)
EVERYTHING = Terms(1.0, bias=TENSOR, seed=TENSOR, bounds=TENSOR, soft_cap=1.0)
MASKS = [Terms(1.0), CAUSAL, Terms(1.0, left=5), Terms(1.0, bounds=TENSOR)]


def compiled(kernel_name: str, size: int, launch: Launch, target: GPUTarget, dtype: str, width: int,
             terms: Terms = CAUSAL, dense: int = 0):  # fmt: skip
    """The kernel at this head size, its addresses divisible by 16."""
    kernel = KERNELS[kernel_name]
    block = block_size(size)
    constants = Constants(size, size, launch.block_t, launch.block_s, block, block, *compiled_features(terms, dense),
                          width, "ieee", False)  # fmt: skip
    rows = dict(q=launch.block_t, do=launch.block_t, k=launch.block_s, v=launch.block_s)
    types = dict(
        **dict.fromkeys(("scale", "soft_cap", "keep_scale"), "fp32"),
        **dict.fromkeys(("lse", "delta", "dbias", "bias", "slopes", "sinks"), "*fp32"),
        **dict.fromkeys(("q", "k", "v", "do", "output", "dq", "dk", "dv"), f"*{dtype}"),
        **dict.fromkeys(("bounds", "query_document", "key_document"), "*i32"),
        allowed="*u8",
        seed="*i64",
    )
    fixed = constants._asdict() | dict(ALL_ROWS=False, ALL_KEYS=False)
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = types.get(name, "i32")
        if name in fixed:
            signature[name], values[index,] = "constexpr", fixed[name]
        elif name.endswith("_strides") and width == 0 and name.removesuffix("_strides") in rows:
            signature[name], values[index,] = "constexpr", None
        elif name.endswith("_strides"):
            signature[name] = ("i32",) * 4
        elif name in rows and width == 0:
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows[name]}, {block}]>"
        elif signature[name].startswith("*") and name not in ALIGNMENT_TOLD:
            attributes[index,] = [["tt.divisibility", 16]]
    options = dict(num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True)
    return triton.compile(ASTSource(kernel, signature, values, attributes), target=target, options=options)


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
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_precision_compiles_and_fits(name, direction, size):
    row, target, width = ARCHITECTURES[name]
    kernel = compiled(direction, size, lookup(row, direction, 2, size), target, "bf16", width)
    assert kernel.metadata.shared <= SHARED_KIB[name] * 1024
    if name in ("sm_80", "sm_90") and triton.__version__ == "3.7.1":
        assert stack_bytes(kernel) <= STACK.get((name, direction, size), 0)
    if width == 0:
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"], "the tiles do not travel by the copy engine"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_fp32_compiles_and_multiplies_without_tf32(name, direction):
    row, target, _ = ARCHITECTURES[name]
    kernel = compiled(direction, 64, lookup(row, direction, 4, 64), target, "fp32", 4)
    assert kernel.metadata.shared <= SHARED_KIB[name] * 1024
    assert "tf32" not in kernel.asm["ptx"]


@pytest.mark.parametrize("kernel_name", KERNELS)
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120", "gfx942"])  # the compiler's four ways
def test_every_feature_at_once_compiles_and_fits_if_need_be_in_a_smaller_tile(name, kernel_name):
    row, target, width = ARCHITECTURES[name]
    launch = lookup(row, "dq" if kernel_name == "bias" else kernel_name, 2, 128)
    shared = []
    while launch and len(shared) < 4:
        kernel = compiled(
            kernel_name, 128, launch, target, "bf16", 8 if kernel_name == "bias" else width, EVERYTHING, 16
        )
        shared.append(kernel.metadata.shared)
        launch = None if shared[-1] <= SHARED_KIB[name] * 1024 else smaller(launch)
    assert shared[-1] <= SHARED_KIB[name] * 1024, f"bytes of shared memory, by tile: {shared}"


@pytest.mark.parametrize("terms", MASKS, ids=lambda terms: compiled_features(terms, 0)[0])
def test_every_kind_of_mask_compiles(terms):
    for direction in DIRECTIONS:
        row, target, width = ARCHITECTURES["sm_90"]
        compiled(direction, 64, lookup(row, direction, 2, 64), target, "bf16", width, terms)


def test_at_most_64_variants_stand_behind_all_features():
    choices: dict[str, Any] = dict(
        bias=(None, TENSOR), allowed=(None, TENSOR), alibi_slopes=(None, TENSOR), sinks=(None, TENSOR),
        seed=(None, TENSOR), bounds=(None, TENSOR), left=(UNBOUNDED, 5), right=(UNBOUNDED, 0, 5),
        top_left=(False, True), soft_cap=(0.0, 5.0), deterministic=(False, True),
    )  # fmt: skip
    all_terms = [Terms(1.0, **dict(zip(choices, x, strict=True))) for x in itertools.product(*choices.values())]
    features = {
        compiled_features(terms, dense)
        for terms in all_terms
        for dense in ((0,) if terms.bias is None and terms.allowed is None else (-1, 1, 16))
    }
    assert len(features) == 36


class NoDriver:
    """In place of Triton's: it has an architecture and no device."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Wanted:
    """What Triton would compile, where nothing is compiled or launched."""

    def __init__(self) -> None:
        self.kernels: dict[Any, set[str]] = {}
        """(kernel, types, constants) -> what else it would be compiled for"""
        self.by_key: dict[Any, set[str]] = {}
        """The launcher's key -> Triton's"""
        self.key: Any = None

    def note(self, *, fn: Any, key: Any, compile: Any, **_: object) -> bool:
        kernel = fn.name, str(compile["signature"]), str(compile["constants"])
        self.kernels.setdefault(kernel, set()).add(str(compile["configs"]))
        self.by_key.setdefault(self.key, set()).add(str((fn.name, key)))
        return True

    def run(self, kernel: Any, device: torch.device, programs: int, launch: Launch, key: Any, *args: Any) -> None:
        self.key = key, launch
        RUN(kernel, device, programs, launch, key, *args)


RUN = launch_module.run


@pytest.fixture
def wanted(monkeypatch):
    wanted = Wanted()
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", wanted.note)
    for module in (launch_module, backward, documents):
        monkeypatch.setattr(module, "run", wanted.run)
    monkeypatch.setattr(launch_module, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(launch_module, "_has_copy_engine", lambda device: True)
    monkeypatch.setattr(choice, "_triton_obstacle", lambda q, v, asked_by_name: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver())
    return wanted


def test_lengths_strides_addresses_and_values_share_a_kernel_and_what_does_not_is_in_the_launchers_key(wanted):
    for case, dtype, seed in (generate(name) for name in names("full", 0, 15 * TOGETHER)):
        results(inputs(case, dtype, "cpu", seed), implementation="triton")
    assert {name for name, _, _ in wanted.kernels} == {f"{name}_kernel" for name in ("delta", *KERNELS)}
    assert [kernel for kernel, others in wanted.kernels.items() if len(others) > 1] == []
    assert [key for key, theirs in wanted.by_key.items() if len(theirs) > 1] == []


def test_a_bias_slopes_and_sinks_of_another_dtype_or_address_have_another_key(wanted):
    q = torch.randn(2, 4, 32, 64, dtype=torch.bfloat16)
    for dtype, skip, place in itertools.product(
        (torch.float32, torch.bfloat16), (0, 1), ("bias", "alibi_slopes", "sinks")
    ):
        shape = {"bias": (4, 32, 32)}.get(place, (4,))
        x = torch.randn(4096 + 1, dtype=dtype)[skip:][: math.prod(shape)].view(shape)
        tensors: dict[str, Any] = {place: x}
        flash_attention(q, q, q, score=Score(**tensors), implementation="triton")
    assert all(len(theirs) == 1 for theirs in wanted.by_key.values())
    # slopes and sinks, which become fp32, at two addresses; a bias in two dtypes at two addresses
    assert len(wanted.by_key) == 2 + 2 + 4


def test_packed_documents_have_their_tables_kernel_by_the_types_and_addresses_of_the_offsets(wanted):
    for dtype in (torch.int32, torch.int64):
        offsets = torch.arange(9, dtype=dtype)
        for x in (offsets, offsets[1:], offsets[2:]):
            packed_documents(x, offsets[: len(x)], 11, 13)
    assert len(wanted.by_key) == 4 and all(len(theirs) == 1 for theirs in wanted.by_key.values())


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_take_their_numbers_and_constants_in_the_order_in_which_launchers_give_them(kernel):
    names = tuple(kernel.arg_names)
    for fields in (Numbers._fields, Constants._fields):
        start = names.index(fields[0])
        assert names[start : start + len(fields)] == fields
    assert names[names.index("bias") :][:10] == (
        "bias", "bias_strides", "allowed", "allowed_strides", "slopes", "sinks", "seed", "bounds", "query_document",
        "key_document",
    )  # fmt: skip
