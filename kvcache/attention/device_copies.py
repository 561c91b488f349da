"""Tensors that all layers of a pass read, such as masks: where layers lie on several devices, carried along.

An operation moves an operand that lies elsewhere by itself, but each time anew. Layers come in the order
of their devices, so that one copy, kept until a layer of another device asks, is one copy per device.
"""

from __future__ import annotations

from typing import TypeVar

import ml

__all__ = ["DeviceCopies", "device_copies", "near"]

T = TypeVar("T")


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

    Not a tensor (no mask, ``ml.CAUSAL``): itself too.
    """
    backend = getattr(ctx, "backend", None)
    if backend is not None and len(backend.devices) > 1 and isinstance(tensor, ml.Tensor):
        return DeviceCopies(ctx, tensor)
    return tensor


def near(ctx: ml.Context, found: T | DeviceCopies) -> T:
    """The tensor on the device of ``ctx``; not to be written."""
    return found.on(ctx) if isinstance(found, DeviceCopies) else found  # type: ignore[return-value]
