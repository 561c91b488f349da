"""The memory of a model and its cache, computed from the config before anything is allocated."""

from __future__ import annotations

import ml
from kvcache import CacheFormat, bytes_text
from kvcache.cache import CacheDType, InvalidRangeError
from kvcache_engine.config import ModelSizes
from kvcache_engine.errors import CapacityError

__all__ = ["available_bytes", "cache_bytes", "check_memory"]


def cache_bytes(
    config: ModelSizes,
    dtype: CacheDType,
    max_sequences: int,
    capacity: int,
    max_batch: int = 512,
    activations: ml.DType = ml.DType.F32,
) -> int:
    """Bytes that a cache stores in all layers, for ``max_sequences`` of ``capacity`` tokens each.

    Layers with a window store only the window and ``max_batch`` further tokens. ``activations`` is the dtype
    in which the model computes: some formats have scales of that dtype. Raises InvalidRangeError for a format
    that does not support the size of the model's keys.
    """
    stored = CacheFormat.of(dtype)
    total = config.state_bytes(max_sequences, capacity)
    for layer, shape in config.cached_layers.items():
        tokens = config.cached_tokens(layer, max_sequences, capacity, max_batch)
        try:
            total += tokens * shape.nbytes(stored, activations)
        except InvalidRangeError as error:
            why = str(error).removeprefix("put: ")
            raise InvalidRangeError(f"cache_dtype={stored}: {why}") from error
    return total


def available_bytes(backend: ml.Backend) -> int | None:
    """Free bytes on all devices of the backend together; None if one of them does not report it.

    Devices of kind "cpu" share the host's memory, which counts once.
    """
    rows = zip(backend.devices, backend.memory().devices, strict=True)
    places = {"host" if device.kind == "cpu" else device.name: row.free for device, row in rows}
    free = [*places.values()]
    known = [amount for amount in free if amount is not None]
    return sum(known) if known and len(known) == len(free) else None


def check_memory(
    config: ModelSizes,
    backend: ml.Backend,
    cache_dtype: CacheDType,
    max_sequences: int,
    capacity: int,
    weight_bytes: int = 0,
) -> None:
    """Refuse a cache that does not fit in memory with ``weight_bytes`` still to be loaded.

    Raises CapacityError, which says what is needed, what is free and what would fit.
    """
    free = available_bytes(backend)
    needed = cache_bytes(config, cache_dtype, max_sequences, capacity)
    if free is None or needed + weight_bytes <= free:
        return
    devices = ", ".join(device.name for device in backend.devices)
    if weight_bytes > free:
        raise CapacityError(
            f"the weights need {bytes_text(weight_bytes)}, but only {bytes_text(free)} is free on {devices}; "
            "use a smaller model or a narrower dtype"
        )
    one = max(1, cache_bytes(config, cache_dtype, max_sequences, 1))
    beside = f" beside {bytes_text(weight_bytes)} of weights" if weight_bytes else ""
    raise CapacityError(
        f"a cache of {max_sequences} x {capacity} tokens in {CacheFormat.of(cache_dtype)} needs "
        f"{bytes_text(needed)}{beside}, but only {bytes_text(free)} is free on {devices}; "
        f"a capacity of at most {(free - weight_bytes) // one} fits"
    )
