"""Work divided over processes: a death among them is noticed at once, and none of them outlives who started them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDied(RuntimeError):
    """A worker process ended before its work did."""


def work_through(function: Callable[[Item], Result], items: Sequence[Item], *, processes: int) -> Iterator[Result]:
    """The results of `function` on each of `items`, as they are done; with one process in this one.

    `function` and `items` are pickled. What it raises is raised here, and the other processes are ended.

    Raises WorkerDied if a process was killed or ran out of memory.
    """
    if processes == 1 or len(items) < 2:
        yield from map(function, items)
        return
    # Not forked from this process, whose threads (torch's, tokenizers') would not come along and could leave locks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([getattr(function, "func", function).__module__])  # imported once for all
    ours, theirs = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(
        min(processes, len(items)), mp_context=context, initializer=_begin_worker, initargs=(ours,)
    )
    try:
        futures = [executor.submit(function, item) for item in items]
        for future in as_completed(futures):
            yield future.result()
        executor.shutdown()
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a worker process died before its work was done (killed, or out of memory); run the same command again, "
            f"it goes on where it stopped, and with less than processes={processes} it needs less memory"
        ) from error
    finally:
        theirs.close()
        executor.shutdown(cancel_futures=True)


def _begin_worker(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes fill the cores
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    try:
        parent.recv_bytes()
    except (EOFError, OSError):  # the other end was closed, by hand or by death
        os._exit(1)
