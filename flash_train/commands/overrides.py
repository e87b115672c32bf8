"""What is wrong with a command line, in one sentence with the nearest valid names; and how two command lines merge."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

GATHERING = frozenset(("callbacks", "loggers"))
"""Groups whose choices stand side by side, each under a name of its own, so that a list of them is one choice."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the valid names that look like `name`, or all of them if none does."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not close:
        # A key that is right but stands elsewhere: max_steps for trainer.max_steps.
        last = name.rpartition(".")[2]
        close = [known for known in names if known.rpartition(".")[2] == last][:3]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose one of {', '.join(names)}" if names else "there is nothing to choose from"


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's own reading of each override. Raises ValueError that names the first one it cannot read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            raise ValueError(_unreadable(text)) from error
    for override, text in zip(parsed, overrides, strict=True):
        override.input_line = text
    return parsed


def _unreadable(text: str) -> str:
    if "=" not in text:
        return f"{text!r} is not an override; write key=value or group=name, for example recipes=demo"
    key, _, value = text.partition("=")
    return f"cannot read the value of {text!r}; put special characters in quotes, as in '{key}=\"{value}\"'"


def check_groups(overrides: Sequence[Override], groups: Mapping[str, Sequence[str]], *, sweep: bool) -> None:
    """Refuse what Hydra would merge silently or answer at length. Raises ValueError.

    Args:
        overrides: the parsed command line.
        groups: every group with its choices.
        sweep: whether `-m` was given, so that a comma separates jobs.
    """
    for override in overrides:
        if override.key_or_group in groups and override.is_add():
            written = (override.input_line or "").lstrip("+")
            raise ValueError(f"{override.key_or_group} has a choice already; write {written}, without the +")
        if override.key_or_group in groups and override.package is None and not override.is_delete():
            _check_choice(override, groups[override.key_or_group], sweep=sweep)


def _check_choice(override: Override, choices: Sequence[str], *, sweep: bool) -> None:
    group, value = override.key_or_group, override.value()
    if isinstance(value, list) and group not in GATHERING:
        listed = ",".join(str(item) for item in value)
        raise ValueError(
            f"{group}={_spelled(override)} would merge these into one; compare them with flash-compare, or run one "
            f"after the other with -m {group}={listed}"
        )
    if value is None:
        empty = f"; write {group}=none" if "none" in choices else ""
        raise ValueError(f"{group} needs a name{empty}")
    if override.is_sweep_override():
        if not sweep:
            raise ValueError(f"{group}={_spelled(override)} names several choices; add -m to run one after the other")
        names = [str(name) for name in override.sweep_iterator()] if override.is_discrete_sweep() else []
    else:
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if "glob(" not in _spelled(override):
        for name in names:
            if name not in choices:
                raise ValueError(f"{group} has no {name!r}; {nearest(name, choices)}")


def _spelled(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def check_keys(overrides: Sequence[Override], groups: Mapping[str, Sequence[str]], keys: Iterable[str]) -> None:
    """Refuse an override of a key that the composed configuration does not have. Raises ValueError.

    Args:
        overrides: the parsed command line.
        groups: every group with its choices.
        keys: the dotted names of the configuration, inner nodes included.
    """
    known = set(keys) | set(groups)
    for override in overrides:
        name = override.key_or_group
        if override.is_add() or override.is_force_add() or override.is_hydra_override() or name in known:
            continue
        # Below the first level only names of the same group are near; a stranger's may look alike by accident.
        group = name.partition(".")[0]
        near = {key for key in known if key.startswith(f"{group}.")} if group in known and "." in name else known
        # A library's classes take more than our files say.
        open_ended = group in ("trainer", "callbacks", "loggers") and near != known and not override.is_delete()
        more = f" (an argument that the file does not list: +{override.input_line})" if open_ended else ""
        raise ValueError(f"there is no {name!r}; {nearest(name, near)}{more}")


def merge(saved: Sequence[str], given: Sequence[str]) -> list[str]:
    """The command line of a run that is continued: what it was started with, overruled by what is given now.

    A recipe that is given now stands for the whole command, and a group for everything that was set inside it.
    """
    new = {override.key_or_group for override in parse(given)}
    if "recipes" in new:
        return list(given)
    kept = [
        override.input_line or ""
        for override in parse(saved)
        if not any(override.key_or_group == name or override.key_or_group.startswith(f"{name}.") for name in new)
    ]
    return [*kept, *given]
