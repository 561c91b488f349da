"""Detects adapters and changed weights of a model of mlx-lm."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from kvcache.integrations.weights import SAMPLES, Marks, WatchedWeights
from kvcache.stores import Part

__all__ = ["Adapters"]

Named = tuple[str, mx.array]
_ADAPTER = {"lora_a", "lora_b", "m"}
"""The attributes of mlx-lm's adapter layers that hold their own weights."""
_WRAPPED = {"linear", "embedding"}
"""The attributes that hold the wrapped layer."""


class Adapters:
    """Identifies what K and V of ``model`` depend on besides the tokens and its current weights. A few
    elements of each array are sampled: a write in place is detected if it changes one of them, as a write of
    the whole array does.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = WatchedWeights()
        self._objects: list[tuple[object, ...]] = []
        """The arrays of a model without adapters, when it was last inspected whole."""
        self._named: Marks = ()
        self._order: list[int] = []
        """Their names, and their numbers by name."""
        self._look()

    def variant(self) -> Part:
        """The variant for new conversations; None: the original weights without adapters."""
        scales, own = self._look()
        if not own:
            return self._weights.version
        return (
            self._weights.version,
            scales,
            self._weights.digest("", _marks(own), lambda: map(_content, own)),
        )

    def _look(self) -> tuple[list[Part], list[Named]]:
        """Inspect the weights; returns the scales of layers with adapters, and the adapters' arrays."""
        if not hasattr(self._model, "named_modules"):
            return [], []
        arrays = _arrays_of(self._model, [])
        objects = [_object(array) for array in arrays]
        if objects == self._objects:  # most models, at each request
            self._weights.look([*self._named, (_few(arrays[i] for i in self._order),)])
            return [], []
        own: list[Named] = []
        base: list[tuple[str, int]] = []
        named_arrays: Any = tree_flatten(self._model.parameters())
        layers: dict[str, Any] = {}
        if any(name.endswith("lora_a") for name, _ in named_arrays):
            layers = {name: part for name, part in self._model.named_modules() if hasattr(part, "lora_a")}
        place = {id(array): i for i, array in enumerate(arrays)}
        for name, array in named_arrays:
            layer, _, leaf = name.rpartition(".")
            if layer in layers and leaf in _ADAPTER:
                own.append((name, array))
            else:
                bare = ".".join(part for part in name.split(".") if part not in _WRAPPED)
                base.append((bare, place[id(array)]))
        base.sort()
        named = [(name, *objects[i]) for name, i in base]
        order = [i for _, i in base]
        self._objects, self._named, self._order = [] if layers else objects, named, order
        self._weights.look([*named, (_few(arrays[i] for i in order),)])
        scales: list[Part] = [(name, float(getattr(part, "scale", 1.0))) for name, part in layers.items()]
        return sorted(scales, key=str), sorted(own, key=lambda named: named[0])


def _arrays_of(part: Any, found: list[mx.array]) -> list[mx.array]:
    """Append the arrays of ``parameters()`` of a module, or of a dict or list in one."""
    items: Any = part.items() if isinstance(part, dict) else enumerate(part)
    private = isinstance(part, Module)  # its names with an underscore
    for key, child in items:
        if private and key.startswith("_"):
            continue
        if isinstance(child, mx.array):
            found.append(child)
        elif isinstance(child, dict | list):
            _arrays_of(child, found)
    return found


def _object(array: mx.array) -> tuple[object, ...]:
    return id(array), array.shape, array.dtype


def _marks(named: Sequence[Named]) -> Marks:
    arrays = [array for _, array in named]
    return [*((name, *_object(array)) for name, array in named), (_few(arrays),)]


def _few(arrays: Iterable[mx.array]) -> bytes:
    """A few elements of each array, evenly spaced along each axis, since ``reshape`` may copy all of it."""
    few = [(array, _spaced(array.shape)) for array in arrays if array.size]
    if _host_reads():
        plain: Any = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array, _ in few]
        mx.eval(plain)
        places = [at for _, at in few]
        read = zip(plain, places, strict=True)
        return b"".join(np.asarray(memoryview(array))[at].tobytes() for array, at in read)
    parts: dict[mx.Dtype, list[mx.array]] = {}
    for array, at in few:
        parts.setdefault(array.dtype, []).append(array[at].reshape(-1))
    return b"".join(_bytes(mx.concatenate(each)) for each in parts.values())


def _host_reads() -> bool:
    """Whether the host reads arrays where they lie; CUDA would copy them whole."""
    return mx.default_device().type == mx.cpu or mx.metal.is_available()


@functools.lru_cache(maxsize=64)
def _spaced(shape: tuple[int, ...]) -> tuple[slice, ...]:
    most = round(SAMPLES ** (1 / max(1, len(shape))))
    return tuple(slice(None, None, -(-size // most)) for size in shape)


def _content(named: Named) -> tuple[str, bytes]:
    name, array = named
    return f"{name} {array.dtype} {array.shape}", _bytes(array.reshape(-1))


def _bytes(flat: mx.array) -> bytes:
    return np.array(flat.view(mx.uint8)).tobytes() if flat.size else b""
