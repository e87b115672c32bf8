"""Nsight Compute's command line, `ncu`: a command run under it, and what it counted of each kernel."""

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_OPTIONS = (
    "--metrics", f"{READ},{WRITTEN}",
    "--clock-control", "none",  # bytes do not depend on it, and a shared GPU's clocks are not ours to set
    "--cache-control", "none",  # a kernel finds what the one before has left in the cache, as it does unobserved
    "--profile-from-start", "off",  # the command says when, by cudaProfilerStart and cudaProfilerStop
    "--target-processes", "application-only",  # a compiler that it starts needs no profiler
    "--nvtx", "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
)  # fmt: skip
_BYTES = {"byte": 1, "kbyte": 10**3, "mbyte": 10**6, "gbyte": 10**9, "tbyte": 10**12}
_ANNOTATION = "_Range:"
"""In the headings of the columns that tell which NVTX ranges were open."""


class CommandFailed(Exception):
    """The command that was to be observed did not end well."""


class Kernel(NamedTuple):
    """One launch, its bytes read from and written to the GPU's memory."""

    name: str
    ranges: str
    """The NVTX ranges that were open, as ncu writes them."""
    read: int
    written: int


def observe(command: Sequence[str], *, ncu: str, log: Path) -> str:
    """Run `command` under `ncu` (a name or a path) and return the table that it wrote into `log`.

    Raises:
        ValueError: there is no such program, or it cannot count.
        CommandFailed: `command` itself failed; what it printed stands in the terminal.
    """
    program = shutil.which(ncu)
    if program is None:
        raise ValueError(
            f"ncu={ncu} is no program on the PATH; Nsight Compute's command line counts the bytes: it lies in the CUDA "
            "toolkit's bin folder, and ncu=/path/to/ncu names it"
        )
    log.unlink(missing_ok=True)
    environment = {**os.environ, "LC_ALL": "C"}  # in other languages ncu may write 1.234,5
    code = subprocess.run([program, *_OPTIONS, "--log-file", str(log), *command], env=environment).returncode
    written = log.read_text(errors="replace") if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in written:
        raise ValueError(
            "ncu may not read this GPU's counters (ERR_NVGPUCTRPERM): run it as root, give a container the capability "
            "SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    errors = [line for line in written.splitlines() if line.startswith("==ERROR==")]
    if code != 0:
        why = f"; ncu says: {errors[0].removeprefix('==ERROR==').strip()}" if errors else ""
        raise CommandFailed(f"the process that ncu observed ended with exit code {code}{why}")
    return written


def read_kernels(table: str) -> list[Kernel]:
    """The kernels in a table of ncu's raw page as CSV: a row of headings, a row of units, a row for each launch.

    Lines around it (ncu's own begin with ==) and further columns are passed over. Raises ValueError where there is no
    such table, or no number of bytes in it.
    """
    lines = [line for line in table.splitlines() if line.strip() and not line.startswith("==")]
    rows = list(csv.reader(lines))
    start = next((n for n, row in enumerate(rows) if {"Kernel Name", READ, WRITTEN} <= set(row)), None)
    if start is None:
        said = [line for line in table.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
        why = said[0] if said else "it says nothing of why"
        raise ValueError(f"ncu wrote no table with Kernel Name, {READ} and {WRITTEN}: {why}")
    heads = rows[start]
    records = [dict(zip(heads, row, strict=True)) for row in rows[start + 1 :] if len(row) == len(heads)]
    units = next((record for record in records if not record["Kernel Name"]), {})
    return [
        Kernel(
            record["Kernel Name"],
            " ".join(value for head, value in record.items() if _ANNOTATION in head and value),
            *(_bytes(record[metric], units.get(metric, ""), metric) for metric in (READ, WRITTEN)),
        )
        for record in records
        if record["Kernel Name"]
    ]


def _bytes(number: str, unit: str, metric: str) -> int:
    factor = _BYTES.get(unit.lower())
    if factor is None:
        raise ValueError(f"ncu's unit of {metric} must be byte or a multiple like Mbyte, got {unit!r}")
    try:
        return round(float(number.replace(",", "")) * factor)
    except ValueError:
        raise ValueError(f"ncu gave no number of {metric}, but {number!r}; this GPU may have no such counter") from None


def passes(table: str) -> int:
    """How often ncu ran each kernel, at most: from the second time on it finds in the cache what it left there."""
    return max((int(count) for count in re.findall(r"^==PROF==.* (\d+) pass", table, re.MULTILINE)), default=1)
