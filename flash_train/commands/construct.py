"""From a node of the configuration to an object: a constructor's signature is the schema, checked before the call."""

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Union

from flash_train.commands.overrides import nearest

_OWN = ("_target_", "_partial_")


def build(node: Mapping[str, Any], *, key: str, wired: Mapping[str, Any] | None = None) -> Any:
    """Call `_target_` of `node` with its other entries; with `_partial_: true`, return the call to be completed.

    Args:
        node: plain values; an entry that is itself such a node is built first.
        key: where the node stands in the configuration, for error messages.
        wired: further arguments, which no file can give.

    Raises ValueError as `check` does, and if an argument is missing or is both in `node` and in `wired`.
    """
    target = check(node, key=key)
    arguments = {
        name: build(value, key=f"{key}.{name}") if _is_node(value) else value
        for name, value in node.items()
        if name not in _OWN
    }
    for name in arguments.keys() & (wired or {}).keys():
        raise ValueError(f"{key}.{name} follows from other settings and cannot be given")
    arguments |= wired or {}
    call = functools.partial(target, **arguments)
    if node.get("_partial_", False):
        return call
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{key}: {error}") from error
    return call()


def check(node: Mapping[str, Any], *, key: str) -> Callable[..., Any]:
    """The target of `node`, after a look at its arguments; nothing is built.

    Raises ValueError if it does not exist, takes no such argument, or gets a value of a wrong type.
    """
    if not _is_node(node):
        raise ValueError(f"{key} has no _target_, the dotted name of a class or function to call")
    try:
        target = resolve_name(node["_target_"])
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}._target_ names nothing that can be imported: {error}") from error
    for name, value in node.items():
        if _is_node(value):
            check(value, key=f"{key}.{name}")
    parameters = inspect.signature(target).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in node.items() if name not in _OWN}
    check_arguments(arguments, _hints(target), key=key, names=None if open_ended else parameters)
    return target


def check_arguments(
    arguments: Mapping[str, Any], hints: Mapping[str, Any], *, key: str, names: Iterable[str] | None = ()
) -> None:
    """Raise ValueError for an argument that is not among `names` or `hints`, or does not fit its annotation in `hints`.

    With `names` None every name is good.
    """
    for name, value in arguments.items():
        if names is not None and name not in names and name not in hints:
            raise ValueError(f"{key} takes no {name!r}; {nearest(name, {*names, *hints})}")
        if name in hints and not _is_node(value) and not _fits(value, hints[name]):
            full = f"{key}.{name}" if key else name
            raise ValueError(f"{full} must be {_spelled(hints[name])}, got {value!r}")


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    try:
        hints = typing.get_type_hints(function)
    except NameError:
        return {}  # annotations that exist for type checkers only
    return {name: hint for name, hint in hints.items() if name != "return"}


def _spelled(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        *most, last = map(str, typing.get_args(hint))
        return f"{', '.join(most)} or {last}" if most else last
    return inspect.formatannotation(hint).replace("typing.", "").replace("NoneType", "None")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value can be meant by an annotation; True where that cannot be told."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner
    if origin is typing.Annotated:
        return _fits(value, inner[0])
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (None, types.NoneType):
        return value is None
    kind = origin or hint
    if not inspect.isclass(kind) or typing.is_typeddict(kind) or getattr(kind, "_is_protocol", False):
        return True
    if isinstance(value, str) and kind in (Path, os.PathLike):
        return True
    if isinstance(value, list) and issubclass(kind, collections.abc.Iterable):
        element = [option for option in inner if option is not Ellipsis]
        return kind is not str and (len(set(element)) != 1 or all(_fits(item, element[0]) for item in value))
    return isinstance(value, kind)
