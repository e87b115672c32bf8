"""What every test relies on. Without a GPU the kernels run in Triton's interpreter, chosen before its first import."""

import fcntl
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# wandb keeps the mode that it found when a process first used it, whatever is said later.
os.environ["WANDB_MODE"] = "offline"
# A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Of several test processes on one GPU: what asks for the fixture `whole_gpu` waits until it is alone there."""
    if not torch.cuda.is_available() or not item.get_closest_marker("gpu"):
        return (yield)
    with (Path(tempfile.gettempdir()) / f"flash_train_gpu_{os.getuid()}.lock").open("w") as file:
        alone = "whole_gpu" in getattr(item, "fixturenames", ())
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)
