"""Placement of a model's layers on several devices, shared by all backends with more than one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ml.base import BaseBackend, BaseContext
from ml.capabilities import PageTransfer
from ml.devices import DeviceInfo
from ml.dtypes import DType
from ml.errors import BoundsError, DeviceError, ShapeError

GPU_CALL_BYTES = 16 << 20
"""``CacheConfig.call_bytes`` of a GPU: launches of 10 us at 1.6 TB/s. An estimate, not a measurement."""


def asked_devices(device: Any, devices: Sequence[Any] | None) -> list[Any] | None:
    """The devices named by ``device=`` or ``devices=``; None for neither. Raises DeviceError for both, and
    for an empty list.
    """
    if devices is None:
        return None if device is None else [device]
    if device is not None:
        raise DeviceError("open_backend: device= and devices= are both set; use one of them")
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise DeviceError(f"open_backend: devices={devices!r}; it must be a list of names")
    return list(devices)


def check_once(names: Sequence[Any]) -> None:
    """Raise DeviceError if no device is named, or one is named twice."""
    if not names:
        raise DeviceError("open_backend: devices=[]; name at least one")
    if len(set(names)) < len(names):
        raise DeviceError(f"open_backend: devices={[*names]}; each must be named once")


def only_device(
    name: str, device: str | None, devices: Sequence[str] | None, layers: int | None
) -> str | None:
    """For a backend that works on one device: the one that ``device=`` or ``devices=`` names, if any.

    ``layers`` has no effect here, since all are on it. Raises DeviceError for several devices.
    """
    check_layers(layers)
    asked = asked_devices(device, devices)
    if asked is None:
        return None
    if len(asked) != 1:
        raise DeviceError(
            f"open_backend: devices={asked}; {name} keeps all layers on one device, so name one; torch and "
            "cupy support several"
        )
    only: str = asked[0]
    return only


def check_layers(layers: Any) -> None:
    """Raise ShapeError for a number of layers below 1, and for anything but a number."""
    if layers is None:
        return
    try:
        several = isinstance(layers, Sequence)
        count = len([*map(operator.index, layers)]) if several else operator.index(layers)
    except TypeError:
        raise ShapeError(
            f"open_backend: layers={layers!r:.60}; it must be a number of layers, or a list with the index "
            "of each one's device"
        ) from None
    if count < 1:
        raise ShapeError(f"open_backend: layers={layers}; a model must have at least one")


class PlacedBackend(BaseBackend):
    """A backend whose layers are split evenly over the devices, in order; with several devices, ``layers`` is
    required.

    ``layers`` may also name the device of each layer, by its index in ``devices``: ``[0, 0, 0, 1]``.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[DeviceInfo],
        layers: int | Sequence[int] | None,
        dtype: DType = DType.F32,
    ) -> None:
        check_layers(layers)
        if layers is None and len(devices) > 1:
            raise ShapeError(f"open_backend: {len(devices)} devices to split layers over; pass layers=N")
        super().__init__(name, devices, dtype)
        self._device_of: list[int] | None = None
        """By layer; None: there is one device, and any number of layers."""
        if isinstance(layers, Sequence):
            self._device_of = [*layers]
            for device in layers:
                self._check_device(device)
        elif layers is not None:
            self._device_of = [i * len(devices) // layers for i in range(layers)]

    def device_of_layer(self, i: int) -> int:
        """The index of the device of layer ``i``."""
        devices = self._device_of
        if devices is None:
            return 0
        if i >= len(devices):
            raise BoundsError(
                f"layer: {i} of {len(devices)}; the backend was opened with layers={len(devices)}"
            )
        return devices[i]

    def place_layer(self, i: int, device: int) -> None:
        """Place everything created for layer ``i`` from now on on ``devices[device]``."""
        self._check_device(device)
        if self.device_of_layer(i) != device:
            assert self._device_of is not None
            self._device_of[i] = device

    def native_device(self, places: Sequence[Any], place: Any, what: str) -> int:
        """The index of the device at this one of the framework's ``places``; ``what`` describes an array
        there.
        """
        if place not in places:
            raise DeviceError(
                f"from_native: {what}; the backend was opened on "
                f"{', '.join(device.name for device in self.devices)}: move it there, or name its device in "
                "open_backend"
            )
        return places.index(place)

    # Pages.

    pages: Any = None
    """The pending copies of pages; None if all devices use host memory."""

    def pinned_memory(self, nbytes: int) -> np.ndarray | None:
        """See ``ml.SupportsTransfers``."""
        self.check("pinned_memory")
        return None if self.pages is None else self.pages.pinned_memory(nbytes)

    def page_out(
        self, ctx: PlacedContext, tensors: Sequence[Any]
    ) -> tuple[list[np.ndarray], PageTransfer] | None:
        """See ``ml.SupportsTransfers``."""
        for tensor in tensors:
            ctx.check("page_out", tensor)
        return None if self.pages is None else self.pages.page_out(tensors)

    def page_in(
        self, ctx: PlacedContext, arrays: Sequence[np.ndarray], tensors: Sequence[Any]
    ) -> PageTransfer | None:
        """See ``ml.SupportsTransfers``."""
        for tensor in tensors:
            ctx.check("page_in", tensor)
        return None if self.pages is None else self.pages.page_in(arrays, tensors)

    def _check_device(self, device: int) -> None:
        if not 0 <= operator.index(device) < len(self.devices):
            raise BoundsError(
                f"layers: device {device} of {len(self.devices)}; a layer needs an index in devices="
            )


class PlacedContext(BaseContext):
    """One device of a ``PlacedBackend``. The contexts of its layers close with it."""

    backend: PlacedBackend

    def __init__(self, backend: PlacedBackend, max_graph_nodes: int, device: int = 0) -> None:
        super().__init__(backend, max_graph_nodes, device)
        self._family: dict[int, PlacedContext] = {device: self}

    @property
    def device(self) -> str:
        """The name of the device of results."""
        return self.backend.devices[self.device_index].name

    def _device_of_layer(self, i: int) -> int:
        return self.backend.device_of_layer(i)

    def _on_device(self, device: int) -> PlacedContext:
        context = self._family.get(device)
        if context is None or context.active_backend is None:
            context = type(self)(self.backend, self.max_graph_nodes, device)
            context.join(self._family)
        return context

    def join(self, family: dict[int, PlacedContext]) -> None:
        """Join the contexts that close together, as the context of this device."""
        self._family = family
        family[self.device_index] = self

    def close(self) -> None:
        if self._family.get(0) is self or len(self._family) == 1:
            for ctx in self._family.values():
                BaseContext.close(ctx)
        super().close()
