"""What ptxas says of a compiled kernel, without a GPU."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia.compiler import get_ptxas


class Verdict(NamedTuple):
    registers: int
    spilled: int
    """Bytes that a thread stores outside its registers."""
    warnings: list[str]
    """C75xx: that it makes asynchronous products wait for one another."""


def verdict(kernel: Any) -> Verdict:
    """Of a kernel that `triton.compile` made for sm_90."""
    more = ["--regAllocOptLevel=2"] if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else []
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.asm["ptx"])
        command = [get_ptxas(90).path, *more, "-v", "--gpu-name=sm_90a", source, "-o", binary]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and spilled, said
    return Verdict(int(registers[1]), int(spilled[1]), re.findall(r".*C75\d\d.*", said))
