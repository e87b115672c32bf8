"""Where a run ran: what has to be known to repeat it, as plain values."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flash_train.config import config_root


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, commit and allocator settings. Memory is in bytes; what cannot be known is None."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "lightning": _version("lightning"),
        "flash_train": _version("flash_train"),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git_commit": _commit(config_root()),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        **_describe_device(device),
    }


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device_name": _processor(), "driver": None, "total_memory_bytes": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device_name": properties.name,
        "driver": _driver(),
        "total_memory_bytes": properties.total_memory,
        "device_count": torch.cuda.device_count(),
    }


def _processor() -> str:
    """The CPU's model, which Python itself does not know on Linux."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)  # without importing it
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0].strip() if version.exists() else None


def _commit(root: Path) -> str | None:
    """The commit of a checkout, marked if files differ from it; None for an installed package."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}-modified" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return answer.stdout.strip()
