"""Signals that wait for the end of a step, since a model that is half updated cannot be saved."""

import logging
import signal
import threading
from types import FrameType

__all__ = ["DeferredSignals"]

log = logging.getLogger(__name__)


class DeferredSignals:
    """Holds back the first SIGINT (Ctrl-C) or SIGTERM until `deliver`; a second one goes through at once.

    Python delivers signals to the main thread only, so elsewhere nothing is held.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous = {}

    def hold(self) -> None:
        """Start to hold signals back."""
        if not self._previous and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)

    def release(self) -> None:
        """Put back the handlers that were there before `hold`."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def deliver(self) -> None:
        """Hand a signal that was held back to whoever handled it before; for Ctrl-C that raises KeyboardInterrupt."""
        if self.received is not None:
            number, self.received = self.received, None
            self.release()
            signal.raise_signal(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            log.warning(
                f"{signal.Signals(number).name}: finishing this step for a last checkpoint; again ends at once."
            )
        else:
            self.deliver()
