"""A second device on a machine that has one: tensors that compute on the CPU and say that they lie elsewhere.

As on real devices, an operation takes tensors of one device only; scalars and index tensors may lie on the CPU, and
only an explicit move changes a tensor's device. Anything else raises.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# The device type that torch keeps for backends it does not know. This holds for the rest of the process.
_setup_privateuseone_for_python_backend()
ELSEWHERE = torch.device("privateuseone", 0)
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Elsewhere(torch.Tensor):
    """Wraps a CPU tensor; views and in-place writes reach the wrapped one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Elsewhere":
        new = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=ELSEWHERE,
        )  # fmt: skip
        new.inner = inner
        return new

    def tolist(self) -> Any:
        for second in SecondDevice.open:
            second.reads += 1
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


# What `torch.tensor(..., device=ELSEWHERE)` calls, past every mode.
@torch.library.impl("aten::empty_strided", "privateuseone")
def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl("aten::_copy_from", "privateuseone")
def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    destination.inner.copy_(source)  # type: ignore[attr-defined]
    return destination


class SecondDevice(TorchDispatchMode):
    """Inside, tensors may be made on and moved to `ELSEWHERE`.

    `ran` counts the operations that ran there, `reads` those for which a real host would wait: values that came back.
    """

    open: ClassVar[list["SecondDevice"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.ran = self.reads = 0

    def __enter__(self) -> "SecondDevice":
        self.open.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.open.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _run(func, args, kwargs or {})
        there: list[Elsewhere] = []
        tree_map_only(Elsewhere, there.append, (args, kwargs))
        self.ran += isinstance(result, Elsewhere)
        moved_in = func is torch.ops.aten.copy_.default and isinstance(args[0], Elsewhere)
        # Operations on lists of tensors in place give nothing.
        stayed = result is None or isinstance(result, (Elsewhere, tuple, list))
        self.reads += bool(there) and not moved_in and not stayed
        return result


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    if func.name().partition(".")[0] in _INDEXING:
        tensors = [args[0]]
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    here = any(tensor.dim() and not isinstance(tensor, Elsewhere) for tensor in tensors)
    if there and here and func not in _MOVES:
        raise RuntimeError(f"{func} was given tensors of two devices.")
    device = kwargs.get("device")
    if device is not None:
        there, kwargs = torch.device(device) == ELSEWHERE, {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(Elsewhere, lambda tensor: tensor.inner, (args, kwargs)) if tensors else (args, kwargs)
    result = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, Elsewhere, result) if there else result


def put_elsewhere(module: nn.Module) -> None:
    """Moves the module's weights, and before each call its inputs, as the hooks of `device_map` do."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(Elsewhere(weight.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Elsewhere(buffer)

    def bring(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda x: x.to(ELSEWHERE) if isinstance(x, torch.Tensor) else x, (args, kwargs))

    module.register_forward_pre_hook(bring, with_kwargs=True)
