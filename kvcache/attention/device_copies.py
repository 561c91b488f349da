"""What all layers of a pass read, such as indices and masks, on each device that a layer lies on.

What the host makes is gathered, and goes to each device in one transfer. What was made on a device is carried
along from one to the next: layers come in the order of their devices, so that one copy, kept until a layer of
another device asks, is one copy per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

import ml

__all__ = ["DeviceCopies", "HostArray", "HostArrays", "device_copies", "device_of", "near"]

T = TypeVar("T")


def device_of(ctx: ml.Context) -> int:
    """The number of the device that a context makes tensors on; 0 where it does not tell."""
    index: int = getattr(ctx, "device_index", 0)
    return index


class HostArrays:
    """Arrays of the host, which go to a device together when the first of them is asked for there."""

    __slots__ = ("_arrays", "_near")

    def __init__(self) -> None:
        self._arrays: list[tuple[np.ndarray, ml.DType]] = []
        self._near: dict[int, list[ml.Tensor]] = {}

    def add(self, array: np.ndarray, dtype: ml.DType) -> HostArray:
        """What ``near`` takes; the array is not to be changed."""
        self._arrays.append((array, dtype))
        return HostArray(self, len(self._arrays) - 1)

    def on(self, ctx: ml.Context, place: int) -> ml.Tensor:
        found = self._near.setdefault(device_of(ctx), [])
        if place >= len(found):
            found += _upload(ctx, self._arrays[len(found) :])
        return found[place]


def _upload(ctx: ml.Context, arrays: list[tuple[np.ndarray, ml.DType]]) -> list[ml.Tensor]:
    backend: Any = getattr(ctx, "backend", None)
    if isinstance(backend, ml.SupportsUpload):
        return backend.upload(ctx, arrays)
    return [ctx.from_numpy(array, dtype) for array, dtype in arrays]


@dataclass(frozen=True, slots=True)
class HostArray:
    """One of ``HostArrays``."""

    arrays: HostArrays
    place: int

    def on(self, ctx: ml.Context) -> ml.Tensor:
        return self.arrays.on(ctx, self.place)


class DeviceCopies:
    """A tensor, and its copy where it was last asked for."""

    __slots__ = ("_ctx", "_near", "_tensor")

    def __init__(self, ctx: ml.Context, tensor: ml.Tensor) -> None:
        self._tensor = tensor
        self._ctx, self._near = ctx, tensor

    def on(self, ctx: ml.Context) -> ml.Tensor:
        if ctx is not self._ctx:
            self._ctx, self._near = ctx, self._tensor.cast(ctx, self._tensor.dtype)
        return self._near


def device_copies(ctx: ml.Context, tensor: T) -> T | DeviceCopies:
    """What ``near`` takes: ``tensor``, made on the device of ``ctx``; itself where there is one device.

    Not a tensor (no mask, ``ml.CAUSAL``, a ``HostArray``): itself too.
    """
    backend = getattr(ctx, "backend", None)
    if backend is not None and len(backend.devices) > 1 and isinstance(tensor, ml.Tensor):
        return DeviceCopies(ctx, tensor)
    return tensor


def near(ctx: ml.Context, found: T | DeviceCopies | HostArray) -> T:
    """The tensor on the device of ``ctx``; not to be written."""
    return found.on(ctx) if isinstance(found, (DeviceCopies, HostArray)) else found  # type: ignore[return-value]
