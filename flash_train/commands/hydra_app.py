"""From a command line to plain values: composing, error messages in one sentence, and one process per job of a sweep.

Every console script but flash-snapshot is a task (plain configuration, run folder, overrides) -> exit code, handed to
`launch`.
Nothing here imports torch: help, completion and a misspelled key are answered at once.
"""

import argparse
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flash_train.commands.overrides import check_groups, check_keys, merge, nearest, parse
from flash_train.commands.sweep import (
    Row,
    SweepFolder,
    check_started_once,
    check_tasks,
    conclude_sweep,
    read_records,
    run_job,
    write_record,
    write_table,
)
from flash_train.comparison.text import quoted
from flash_train.config import config_root, group_options, register

Task = Callable[[dict[str, Any], Path, list[str]], int]
Recall = Callable[[str], list[str]]

# Under this variable Hydra raises what it would otherwise print with a stack trace and advice of its own.
_FULL_ERROR = "HYDRA_FULL_ERROR"
# Names that Hydra knows once a plugin is installed, by a word in them.
_PLUGINS = {"submitit": "flash_train[slurm]", "optuna": "flash_train[optuna]"}


class ExitCode(IntEnum):
    """What a command tells its caller."""

    OK = 0
    FAILURE = 1
    BAD_INPUT = 2
    OUT_OF_MEMORY = 3
    INTERRUPTED = 130
    TERMINATED = 143


def launch(task: Task, *, config_name: str, module: str, recall: tuple[str, Recall] | None = None) -> NoReturn:
    """Compose the configuration `config_name` from `sys.argv`, run `task` on it, and exit with its code.

    Args:
        task: gets the resolved configuration as plain values, the run folder, and the overrides as they were typed.
        config_name: a file of `conf/`.
        module: the command's module, which each job of `-m` runs in a process of its own.
        recall: a key (`resume_from`) and what returns the overrides of the earlier run that its value points to.
    """
    wanted = os.environ.get(_FULL_ERROR)
    try:
        with _environment(_FULL_ERROR, "1"):
            register()
            parser = get_args_parser()
            parser.error = _refuse_option
            arguments = parser.parse_intermixed_args()  # overrides before and after -m
            if not (arguments.shell_completion or arguments.help or arguments.hydra_help):
                _prepare(arguments, recall)
            code = _compose_and_run(_Job(task, config_name, module, arguments, wanted))
    except KeyboardInterrupt as interrupt:
        code = ExitCode.TERMINATED if interrupt.args else ExitCode.INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.FAILURE
    except (ValueError, HydraException, OmegaConfBaseException, OSError, YAMLError) as error:
        if wanted == "1":
            raise
        complain(config_name, _one_sentence(error))
        code = ExitCode.BAD_INPUT
    sys.exit(code)


def _refuse_option(message: str) -> NoReturn:
    """Instead of argparse's, which prints every option of Hydra first."""
    raise ValueError(f"{message}; overrides have no dashes, as in recipes=demo, and --help tells what there is")


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def complain(config_name: str, sentence: str) -> None:
    """One line on stderr, under the name of the command that composes `config_name`."""
    print(f"flash-{config_name}: {sentence}", file=sys.stderr)


def _prepare(arguments: argparse.Namespace, recall: tuple[str, Recall] | None) -> None:
    """Check the overrides before Hydra reads them, and put those of an earlier run before them."""
    given = parse(arguments.overrides)
    check_groups(given, _groups(arguments), sweep=arguments.multirun)
    for override in given:
        if recall is not None and override.key_or_group == recall[0] and override.value():
            if arguments.multirun:
                raise ValueError(f"{recall[0]} recalls the command line of one run; leave out -m, once for each")
            arguments.overrides = merge(recall[1](str(override.value())), arguments.overrides)
    if arguments.multirun:
        check_started_once(os.environ)
    target = f"{SweepFolder.__module__}.{SweepFolder.__qualname__}"
    arguments.overrides.append(f"++hydra.callbacks.sweep._target_={target}")


def _groups(arguments: argparse.Namespace) -> dict[str, list[str]]:
    return group_options(*([Path(arguments.config_dir)] if arguments.config_dir else []))


class _Job:
    """What Hydra calls with each composed configuration. Of a sweep, a launcher may have it pickled and called on
    another machine, so that what its jobs did is told by their records alone."""

    def __init__(
        self, task: Task, config_name: str, module: str, arguments: argparse.Namespace, full_error: str | None
    ) -> None:
        self.task = task
        self.config_name = config_name
        self.module = module
        self.arguments = arguments
        self.full_error = full_error
        self.code = ExitCode.OK
        self.sweep = secrets.token_hex(8)

    def __call__(self, config: DictConfig) -> float | None:
        """The validation loss of a sweep's job, for a sweeper that seeks the lowest; None where there is none.

        It raises nothing but what interrupts it: Hydra would print its own lines around an exception.
        """
        settings = HydraConfig.get()
        folder, overrides = Path(settings.runtime.output_dir), [str(text) for text in settings.overrides.task]
        with _environment(_FULL_ERROR, self.full_error):
            if settings.mode == RunMode.MULTIRUN:
                row = Row(sweep=self.sweep, number=settings.job.num, overrides=tuple(overrides), folder=str(folder))
                return self._run_apart(config, row, Path(settings.sweep.dir).absolute())
            self.code = self._run(config, folder, overrides)
            return None

    def _run(self, config: DictConfig, folder: Path, overrides: list[str]) -> int:
        try:
            return self.task(_plain(config, self.arguments), folder, overrides)
        except (ValueError, OmegaConfBaseException) as error:
            complain(self.config_name, _one_sentence(error))
            return ExitCode.BAD_INPUT
        except Exception:
            traceback.print_exc()
            return ExitCode.FAILURE

    def _run_apart(self, config: DictConfig, row: Row, sweep_folder: Path) -> float | None:
        try:
            check_tasks(_plain(config, self.arguments), HydraConfig.get().launcher)
            row = run_job(self._command(row), row, sweep_folder=sweep_folder)
        except (ValueError, OmegaConfBaseException, OSError) as error:
            text = _one_sentence(error)
            complain(self.config_name, text)
            row = replace(row, status="failed", exit_code=ExitCode.BAD_INPUT, error=text)
            with suppress(OSError):
                write_record(row, sweep_folder)
        with suppress(OSError):  # the disk may be full; the next jobs may need less of it
            write_table(read_records(sweep_folder, self.sweep), sweep_folder)
        if row.status != "ok":
            return None
        if row.validation_loss is None and "BasicSweeper" not in str(HydraConfig.get().sweeper.get("_target_")):
            complain(
                self.config_name,
                f"a sweeper that seeks needs a validation loss, and job {row.number} has none; "
                "set validate_every=<at most trainer.max_steps> and trainer.limit_val_batches",
            )
        return row.validation_loss

    def _command(self, row: Row) -> list[str]:
        """The same job as a command of its own."""
        swept = ("mode", "run", "sweep", "launcher", "sweeper", "callbacks")
        own = tuple(f"hydra{mark}{name}" for mark in "./" for name in swept)
        kept = [str(text) for text in HydraConfig.get().overrides.hydra if not str(text).lstrip("+~").startswith(own)]
        command = [sys.executable, "-m", self.module, *row.overrides, *kept, f"hydra.run.dir={quoted(row.folder)}"]
        if self.arguments.config_dir:
            command += ["--config-dir", self.arguments.config_dir]
        return [*command, "hydra.mode=RUN"]


def _compose_and_run(job: _Job) -> int:
    setbase("1.3")
    root, arguments = str(config_root() / "conf"), job.arguments
    SweepFolder.found = None
    try:
        # hydra.main reads sys.argv itself, where the overrides of an earlier run do not stand.
        _run_hydra(arguments, get_args_parser(), job, config_path=root, config_name=job.config_name)
    except HydraException:
        check_keys(parse(arguments.overrides), _groups(arguments), _keys(arguments, root, job.config_name))
        raise
    finally:
        if SweepFolder.found is not None:
            job.code = conclude_sweep(SweepFolder.found, job.sweep)
    return job.code


def _plain(config: DictConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration as resolved plain values. Raises ValueError on a top-level key that no command reads."""
    primaries = [OmegaConf.load(file) for file in (config_root() / "conf").glob("*.yaml")]
    known = {*_groups(arguments), *(str(key) for primary in primaries for key in primary)} - {"defaults", "hydra"}
    for key in config:
        if key not in known:
            raise ValueError(f"there is no {str(key)!r} (set in a recipe?); {nearest(str(key), known)}")
    for override in parse(arguments.overrides):
        if override.is_delete() and override.key_or_group not in config and "." not in override.key_or_group:
            raise ValueError(f"{override.key_or_group} cannot be taken away; where a group may be empty, choose none")
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} has no default; give {error.full_key}=...") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _keys(arguments: argparse.Namespace, root: str, config_name: str) -> list[str]:
    """Every dotted name of the configuration that the chosen groups make, without the other overrides."""
    groups = _groups(arguments)
    chosen = [
        override.input_line or ""
        for override in parse(arguments.overrides)
        if override.key_or_group in groups and not override.is_sweep_override()
    ]
    more = [f"hydra.searchpath=['file://{Path(arguments.config_dir).resolve()}']"] if arguments.config_dir else []
    with hydra.initialize_config_dir(root, version_base="1.3"):
        config = hydra.compose(config_name, overrides=[*chosen, *more])
    return list(_dotted(config))


def _dotted(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            child = node[key]
            if isinstance(child, DictConfig):
                yield from _dotted(child, f"{prefix}{key}.")


def _one_sentence(error: BaseException) -> str:
    """Hydra's and OmegaConf's messages run over several lines: the first says what is wrong, unless it is empty."""
    text = str(error).strip() or str(error.__cause__ or type(error).__name__).strip()
    if isinstance(error, YAMLError):
        text = " ".join(line.strip() for line in text.splitlines())
    if isinstance(error, MissingConfigException):
        missing, options = error.missing_cfg_file or "", list(error.options or [])
        group, _, name = missing.rpartition("/")
        plugin = next((word for word in _PLUGINS if word in missing and not any(word in each for each in options)), "")
        if plugin:
            text = f"{missing} comes with a package that is not installed; pip install '{_PLUGINS[plugin]}'"
        elif options:
            text = f"{group} has no {name!r} (set in a recipe?); {nearest(name, options)}"
    if isinstance(error.__cause__, OSError) and text.startswith("Unable to configure handler"):
        error = error.__cause__  # of the log in the run folder
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"cannot write {error.filename}: {error.strerror}"
    return text.splitlines()[0]
