"""Tensors that are created only when their content is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["Deferred"]

_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "is_cuda",
        "is_cpu",
        "layout",
        "requires_grad",
        "is_leaf",
    )
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
"""Attributes that are available without creating the tensor."""


class Deferred(torch.Tensor):
    """A tensor with the shape, dtype and device of the result of ``make``. Any operation creates the real
    tensor, once, and is applied to it, including in-place operations, so other code need not know of deferred
    tensors.
    """

    made: torch.Tensor | None
    pattern: Any
    """For a mask: its pattern."""
    _make: Callable[[], torch.Tensor]

    @staticmethod
    def of(like: torch.Tensor, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> Deferred:
        """``like`` has one element and gives the dtype and device; no memory is allocated for ``shape``."""
        return Deferred.over(like.expand(shape), make)

    @staticmethod
    def over(blank: torch.Tensor, make: Callable[[], torch.Tensor]) -> Deferred:
        """``blank`` has the shape, dtype and device of what is made."""
        deferred = blank.as_subclass(Deferred)
        deferred.made, deferred._make = None, make
        return deferred

    def resolve(self) -> torch.Tensor:
        if self.made is None:
            self.made = self._make()
        return self.made

    def moved(self, device: torch.device) -> Deferred:
        """The same on another device, still deferred: models over several devices move masks along."""
        with torch._C.DisableTorchFunctionSubclass():
            like = torch.empty((), dtype=self.dtype, device=device)
            shape = tuple(self.shape)
        deferred = Deferred.of(like, shape, lambda: self.resolve().to(device))
        vars(deferred).update({name: x for name, x in vars(self).items() if name in ("pattern", "stored")})
        return deferred

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.to and args[0].made is None and (device := _only_device(args, kwargs)):
            return args[0].moved(device)
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = _pytree.tree_map_only(Deferred, Deferred.resolve, (args, kwargs))
        return function(*args, **kwargs)


def _only_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device passed to ``Tensor.to``, if it is the only argument."""
    if len(args) > 2 or not {*kwargs} <= {"device", "non_blocking"}:
        return None
    device = args[1] if len(args) == 2 else kwargs.get("device")
    return torch.device(device) if isinstance(device, str | int | torch.device) else None
