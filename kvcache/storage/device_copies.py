"""Data that all layers of a pass read, such as indices and masks, on each device that has a layer. Host
arrays are collected and uploaded to each device in one transfer. Tensors computed on a device are computed on
each device that needs them: nothing is copied between devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

import ml
from ml import nn

T = TypeVar("T")


def device_of(ctx: ml.Context) -> int:
    """The index of the device on which a context creates tensors; 0 if unknown."""
    index: int = getattr(ctx, "device_index", 0)
    return index


class HostArrays:
    """Host arrays that are uploaded together when the first of them is needed on a device."""

    __slots__ = ("_arrays", "_near")

    def __init__(self) -> None:
        self._arrays: list[tuple[np.ndarray, ml.DType]] = []
        self._near: dict[int, list[ml.Tensor]] = {}

    def add(self, array: np.ndarray, dtype: ml.DType = ml.DType.I32) -> HostArray:
        """A source for ``near``; the array must not be changed afterwards."""
        self._arrays.append((array, dtype))
        return HostArray(self, len(self._arrays) - 1)

    def pending(self, ctx: ml.Context) -> bool:
        """Whether a transfer to the device of ``ctx`` is costly and has not been made yet."""
        priced = nn.offers(getattr(ctx, "backend", None), ml.SupportsTransfers)
        return priced and not self._near.get(device_of(ctx))

    def gather(self) -> None:
        """Called before arrays are uploaded, so that it can add more of them."""

    def on(self, ctx: ml.Context, place: int) -> ml.Tensor:
        tensors = self._near.setdefault(device_of(ctx), [])
        if place >= len(tensors):
            self.gather()
            tensors += _upload(ctx, self._arrays[len(tensors) :])
        return tensors[place]


def _upload(ctx: ml.Context, arrays: list[tuple[np.ndarray, ml.DType]]) -> list[ml.Tensor]:
    backend: Any = getattr(ctx, "backend", None)
    if nn.offers(backend, ml.SupportsTransfers):
        return backend.upload(ctx, arrays)  # type: ignore[no-any-return]
    return [ctx.from_numpy(array, dtype) for array, dtype in arrays]


@dataclass(frozen=True, slots=True)
class HostArray:
    """One of ``HostArrays``."""

    arrays: HostArrays
    place: int

    def on(self, ctx: ml.Context) -> ml.Tensor:
        return self.arrays.on(ctx, self.place)


class OnDevices:
    """A tensor that ``make`` makes once on each device that needs it."""

    __slots__ = ("_make", "_near")

    def __init__(self, make: Callable[[ml.Context], ml.Tensor]) -> None:
        self._make = make
        self._near: dict[int, ml.Tensor] = {}

    def on(self, ctx: ml.Context) -> ml.Tensor:
        device = device_of(ctx)
        if device not in self._near:
            self._near[device] = self._make(ctx)
        return self._near[device]


def near(ctx: ml.Context, source: T | OnDevices | HostArray) -> T:
    """The tensor on the device of ``ctx``, not to be written; any other source is returned unchanged."""
    return source.on(ctx) if isinstance(source, (OnDevices, HostArray)) else source  # type: ignore[return-value]
