"""One process at a time works in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone_in(folder: Path, *, what: str, key: str) -> Iterator[None]:
    """Keep a second process, which would take our files for its own or delete them, out of `folder`.

    `what` works there, and `key` is the override that gives it another folder. Raises ValueError if one is at work
    there already, or the folder cannot be written. The claim ends with the process, however it ends.
    """
    try:
        lock = FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise ValueError(f"another {what} is at work in {folder}; wait for it, or give another {key}=") from error
    except OSError as error:
        raise ValueError(f"cannot write in {folder}: {error.strerror}") from error
    with lock:
        yield
