"""Fake tensors for a training step: shapes without data, all on the CPU, whatever device the code names."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_READ = aten._local_scalar_dense.default
_LSTM = aten.mkldnn_rnn_layer.default
_PLAIN = (Tensor, int, float, torch.dtype, type(None))
"""What names no device."""


class Fakes(FakeTensorMode):
    """torch's, with three differences: a floating number that is read (`loss.item()`, for a log) is 1, a tensor on
    another device is an error here, where autograd would end the process, and an LSTM is one, of which torch's fake
    keeps a quarter.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and args[0].is_floating_point() and getattr(args[0], "constant", None) is None:
            return 1.0
        if func is _LSTM:
            raise ValueError(
                "what an LSTM keeps for its backward, only its kernel knows, and fake tensors have none of it: "
                "probe_memory measures it"
            )
        result = super().dispatch(func, types, args, kwargs or {})
        if isinstance(result, FakeTensor) and result.fake_device.type not in ("cpu", "meta"):
            raise ValueError(
                f"a step must make its tensors where its batch is, and {func} makes one on {result.fake_device}: "
                "give device=self.device, or that of another tensor"
            )
        return result


class Valueless(Exception):
    """`func` reads what fake tensors have not."""

    def __init__(self, func: str) -> None:
        super().__init__(func)
        self.func = func


class OnCpu(TorchFunctionMode):
    """Inside, whoever names an accelerator gets the CPU, which is all that there is; a number is written as it is read.

    Raises Valueless for an array of a tensor's values.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if function in (Tensor.numpy, Tensor.__array__):
            raise Valueless(f"Tensor.{function.__name__}")
        if function is Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), args[1])
        if kwargs or not all(isinstance(x, _PLAIN) for x in args):  # tree_map takes its time
            args, kwargs = tree_map(_on_cpu, args), tree_map(_on_cpu, kwargs or {})
        return function(*args, **(kwargs or {}))


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu") if x.type in ("cuda", "xpu", "mps") else x
    return "cpu" if isinstance(x, str) and re.fullmatch(r"(cuda|xpu|mps)(:\d+)?", x) else x


class DeepCopies(TorchFunctionMode):
    """Inside, copy.deepcopy copies a tensor by `like`: torch's own gives each fake tensor a mode of its own."""

    def __init__(self, like: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._like = like

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._like(tensor))
        return function(*args, **(kwargs or {}))


def empty_like(tensor: Tensor, *, dtype: torch.dtype, device: str) -> Tensor:
    """One of its shape and strides, without its data. Raises ValueError for a sparse or nested one."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise ValueError(
            f"a tensor must be dense to be predicted, got one of layout {tensor.layout}: what it takes depends on its "
            "values; probe_memory measures it"
        )
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
