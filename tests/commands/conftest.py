"""Commands as a person types them, run in this process: torch is imported once for all of them."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

SHORT = (
    "recipes=overfit_tiny",
    "trainer.max_steps=2",
    "trainer.log_every_n_steps=1",
    "schedule.warmup_steps=1",
    "loggers=none",
    "hydra.run.dir=run",
)
"""A training run of two steps, in the folder `run`."""


@dataclass(frozen=True)
class Answer:
    """What a command told: its exit code and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path, cache: str, capfd: pytest.CaptureFixture) -> Iterator[Command]:
    """Runs `main` with a command line in an empty folder; whatever it leaves behind in the process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("WANDB_MODE", "offline")
    precision = torch.get_float32_matmul_precision()
    handlers = list(logging.getLogger().handlers)

    def run(main: Callable[[], object], *arguments: str) -> Answer:
        monkeypatch.setattr("sys.argv", ["flash-train", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        printed = capfd.readouterr()
        return Answer(int(exit.value.code or 0), printed.out, printed.err)

    yield run
    torch.set_float32_matmul_precision(precision)
    for handler in logging.getLogger().handlers:
        if handler not in handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
