"""The layers of a model over several devices of one machine: the options for ``ml.open_backend``."""

from __future__ import annotations

from collections.abc import Sequence

import ml
from kvcache_engine.config import ModelConfig

__all__ = ["open_on_devices", "parse_devices"]


def parse_devices(text: str) -> list[str]:
    """``"cuda:0,cuda:1"`` -> ``["cuda:0", "cuda:1"]``. Raises DeviceError for a name left out."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ml.DeviceError(f"devices {text!r}: a name is empty; write them as cuda:0,cuda:1")
    return names


def open_on_devices(backend: str, devices: Sequence[str], config: ModelConfig) -> ml.Backend:
    """Open a backend with the layers of ``config`` split evenly over ``devices``, in order.

    Embeddings and head are on the first device, the weights and cache of each layer on the layer's device;
    ``Context.layer`` applies to the model and to every cache bound to the backend.

    Raises DeviceError for a device that does not exist or is named twice, for more devices than layers, and
    for a backend that keeps all layers on one device.
    """
    if len(devices) > config.layers:
        raise ml.DeviceError(
            f"{len(devices)} devices for {config.layers} layers: {', '.join(devices)}; "
            "each must have at least one layer; name fewer devices"
        )
    try:
        return ml.open_backend(backend, devices=list(devices), layers=config.layers)
    except TypeError as error:  # a third-party backend without these options
        raise ml.DeviceError(
            f"backend {backend!r} takes no devices= and layers=, so that it cannot split layers over "
            f"{', '.join(devices)} ({error}); name one with --device"
        ) from error
