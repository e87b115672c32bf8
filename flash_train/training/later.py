"""Numbers from the device that are read a step later, when it has the next step's work, so that it never idles."""

import torch
from torch import Tensor

__all__ = ["Later"]


class Later:
    """A tensor on its way to the host, behind all work that the device was given so far.

    To read a tensor at once waits for that work, and then the device waits for the host to give it more.

    >>> Later(torch.tensor([1.0, 2.0])).numbers()
    tensor([1., 2.])
    """

    def __init__(self, x: Tensor) -> None:
        self.is_there = not x.is_cuda
        """Without waiting: on a CPU."""
        if self.is_there:
            self._host = x.clone()
        else:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(x.device))

    def numbers(self) -> Tensor:
        """The tensor on the host; waits for it, and for nothing that the device was given since."""
        if not self.is_there:
            self._copied.synchronize()
            self.is_there = True
        return self._host
