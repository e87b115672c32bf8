"""`flash-prepare`: token shards out of texts, for `data=tokens`."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash_train.commands.claim import alone_in
from flash_train.commands.hydra_app import ExitCode, complain, launch

MODULE = "flash_train.commands.prepare"
_SECONDS_BETWEEN_LINES = 10

_TYPES: dict[str, Any] = {
    "paths": str | list[str],
    "output": str,
    "validation": float | str | list[str],
    "tokenizer": str,
    "vocabulary_size": int | None,
    "separator": str | None,
    "format": str | None,
    "field": str,
    "split": str | None,
    "document_end": str | None,
    "shard_bytes": int,
    "processes": int | None,
}


def prepare(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Prepare what `config` describes; the exit code."""
    from flash_train.commands.construct import check_arguments
    from flash_train.training.data.corpus import Corpus, WorkerDied, build_corpus
    from flash_train.training.data.corpus.inputs import Reading

    check_arguments({name: config[name] for name in _TYPES}, _TYPES, key="")
    processes = len(os.sched_getaffinity(0)) if config["processes"] is None else config["processes"]
    if processes < 1:
        raise ValueError(f"processes must be a positive number or null, got {processes}; set processes=1")
    validation = config["validation"]
    corpus = Corpus(
        paths=_listed(config["paths"]),
        validation=float(validation) if isinstance(validation, int | float) else _listed(validation),
        tokenizer=config["tokenizer"],
        vocabulary_size=config["vocabulary_size"],
        separator=config["separator"],
        reading=Reading(config["format"], config["field"], config["split"], config["document_end"]),
        shard_bytes=config["shard_bytes"],
    )
    output = Path(config["output"]).expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with alone_in(output, what="preparation", key="output"), _progress() as report:
            dataset = build_corpus(corpus, output, processes=processes, report=report)
    except WorkerDied as error:
        complain("prepare", str(error))
        return ExitCode.FAILURE
    except OSError as error:  # a full disk as well: what is finished stays
        complain("prepare", f"cannot write {error.filename or output}: {error.strerror}; give another output=")
        return ExitCode.BAD_INPUT
    _print(dataset, output)
    return ExitCode.OK


def _listed(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage; where there is no terminal, a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(highlight=False)
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()]
    tasks: dict[str, Any] = {}
    last = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:

        def report(stage: str, done: int, total: int) -> None:
            nonlocal last
            if stage not in tasks:  # what an earlier run has done says nothing of this one's speed
                tasks[stage] = progress.add_task(stage, total=total, completed=done)
            progress.update(tasks[stage], completed=done)
            if not console.is_terminal and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                console.print(f"{stage}: {done:,} of {total:,} bytes of text", soft_wrap=True)

        yield report


def _print(dataset: dict[str, Any], output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{output}: {dataset['tokenizer']}, a vocabulary of {dataset['vocabulary_size']:,}")
    for title in ("split", "documents", "tokens", "bytes per token", "shards"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for split, parts in dataset["splits"].items():
        documents, tokens, size = (sum(part[key] for part in parts) for key in ("documents", "tokens", "bytes"))
        table.add_row(split, f"{documents:,}", f"{tokens:,}", f"{size / tokens:.2f}", str(len(parts)))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"flash-train data=tokens data.paths={output}", markup=False, soft_wrap=True)


def main() -> None:
    launch(prepare, config_name="prepare", module=MODULE)


if __name__ == "__main__":
    main()
