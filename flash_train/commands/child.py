"""A process that is run to its end, and told of what its parent is told."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from flash_train.comparison.runner import die_with_parent


def run_child(command: Sequence[str]) -> int:
    """Run `command` to its end and return its exit code, negative for the signal that ended it.

    It has a process group of its own, so that a terminal's Ctrl-C reaches it once, from here: SIGINT to all of the
    group, SIGTERM where this process gets SIGTERM or SIGHUP. It is waited for then (a run writes a last checkpoint), a
    second Ctrl-C ends it at once, and KeyboardInterrupt is raised, with the number of a signal that is no Ctrl-C. If
    this process dies, the child gets SIGTERM.
    """
    with _raising_on_end() as received:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_prepared())
        try:
            return child.wait()
        except BaseException:
            _end(child, signal.SIGTERM if received else signal.SIGINT)
            raise


def _end(child: "subprocess.Popen[bytes]", number: int) -> None:
    try:
        _tell(child, number)
        child.wait()
    except BaseException:
        _tell(child, signal.SIGKILL)
        child.wait()
        raise


def _tell(child: "subprocess.Popen[bytes]", number: int) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)


@contextmanager
def _raising_on_end() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt; which of them came is in the list."""
    received: list[int] = []

    def receive(number: int, frame: object) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():  # Python delivers signals there only
        yield received
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _prepared():
    """For the child before it begins: it dies with its parent, and leaves submitit's signal, which a cluster sends to
    every process of a job, to its parent."""
    ask = die_with_parent(signal.SIGTERM)

    def prepare() -> None:
        if ask is not None:
            ask()
        if "SUBMITIT_EXECUTOR" in os.environ:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    return prepare
