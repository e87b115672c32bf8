"""Moments on the device's own time line, read later and without waiting for it."""

import time
from typing import Protocol

import torch


class Moment(Protocol):
    """A point in time that the device reaches some time after it was asked for."""

    def reached(self) -> bool:
        """Whether the device is there, without waiting."""
        ...

    def wait(self) -> None:
        """Until the device is there."""
        ...

    def seconds_since(self, earlier: "Moment") -> float:
        """Both must have been reached."""
        ...


class HostMoment:
    """A device that computes in step with the host has the host's time."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: "Moment") -> float:
        assert isinstance(earlier, HostMoment)
        return self._time - earlier._time


class DeviceMoment:
    """An event in the current stream of a CUDA or ROCm device: behind all work that was queued before it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def reached(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        assert isinstance(earlier, DeviceMoment)
        return earlier._event.elapsed_time(self._event) / 1e3


def now(device: torch.device) -> Moment:
    """The moment at which `device` will have done what it was given so far."""
    return DeviceMoment(device) if device.type == "cuda" else HostMoment()
