"""Detects adapters and changed weights of a model of mlx-lm."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from kvcache.integrations.weights import SAMPLES, Marks, WatchedWeights
from kvcache.stores import Part

__all__ = ["Adapters"]

Named = tuple[str, mx.array]
_ADAPTER = {"lora_a", "lora_b", "m"}
"""The attributes of mlx-lm's adapter layers that hold their own weights."""
_WRAPPED = {"linear", "embedding"}
"""The attributes that hold the wrapped layer."""
WHOLE = 256
"""The most elements of an array that is compared whole, whichever object it is: Gemma 3n replaces some by
equal ones in each pass.
"""


class Adapters:
    """Identifies what K and V of ``model`` depend on besides the tokens and its current weights. A few
    elements of each array are sampled: a write in place is detected if it changes one of them, as a write of
    the whole array does.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = WatchedWeights()
        self._numbers: dict[int, tuple[weakref.ref[mx.array], int]] = {}
        """By ``id``, an array and its number, which no other gets when it has gone."""
        self._next = itertools.count()
        self._look()

    def variant(self) -> Part:
        """The variant for new conversations; None: the original weights without adapters."""
        scales, own = self._look()
        if not own:
            return self._weights.version
        return (
            self._weights.version,
            scales,
            self._weights.digest("", self._marks(own), lambda: map(_content, own)),
        )

    def _look(self) -> tuple[list[Part], list[Named]]:
        """Inspect the weights; returns the scales of layers with adapters, and the adapters' arrays."""
        if not hasattr(self._model, "named_modules"):
            return [], []
        named = [*_arrays_of(self._model)]
        self._number([array for _, array in named])
        layers: dict[str, Any] = {}
        if any(name.endswith("lora_a") for name, _ in named):  # it takes as long as all the rest
            layers = {name: part for name, part in self._model.named_modules() if hasattr(part, "lora_a")}
        own: list[Named] = []
        base: list[Named] = []
        for name, array in named:
            layer, _, leaf = name.rpartition(".")
            if layer in layers and leaf in _ADAPTER:
                own.append((name, array))
            else:
                base.append((_unwrapped(name), array))
        self._weights.look(self._marks(sorted(base, key=lambda named: named[0])))
        scales: list[Part] = [(name, float(getattr(part, "scale", 1.0))) for name, part in layers.items()]
        return sorted(scales, key=str), sorted(own, key=lambda named: named[0])

    def _number(self, arrays: Sequence[mx.array]) -> None:
        before, self._numbers = self._numbers, {}
        for array in arrays:
            if array.size <= WHOLE:
                continue
            known = before.get(id(array))
            if known is None or known[0]() is not array:
                known = weakref.ref(array), next(self._next)
            self._numbers[id(array)] = known

    def _marks(self, arrays: Sequence[Named]) -> Marks:
        """For each array its number, and a few elements of all."""
        numbers, few = self._numbers, _few([array for _, array in arrays])
        ids = [(name, array, numbers.get(id(array))) for name, array in arrays]
        return [
            *((name, array.shape, array.dtype, None if one is None else one[1]) for name, array, one in ids),
            (few,),
        ]


def _arrays_of(part: Any, prefix: str = "") -> Iterator[Named]:
    """The arrays of ``parameters()`` of a module, or of a dict or list in one."""
    items: Any = part.items() if isinstance(part, dict) else enumerate(part)
    private = isinstance(part, Module)  # its names with an underscore
    for key, child in items:
        if private and key.startswith("_"):
            continue
        if isinstance(child, mx.array):
            yield f"{prefix}{key}", child
        elif isinstance(child, dict | list):
            yield from _arrays_of(child, f"{prefix}{key}.")


@functools.lru_cache(maxsize=4096)
def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _few(arrays: Sequence[mx.array]) -> bytes:
    """A few elements of each array, evenly spaced along each axis, since ``reshape`` may copy all of it; of
    small ones all.
    """
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
    if math.prod(shape) <= WHOLE:
        return (slice(None),) * len(shape)
    most = round(SAMPLES ** (1 / max(1, len(shape))))
    return tuple(slice(None, None, -(-size // most)) for size in shape)


def _content(named: Named) -> tuple[str, bytes]:
    name, array = named
    return f"{name} {array.dtype} {array.shape}", _bytes(array.reshape(-1))


def _bytes(flat: mx.array) -> bytes:
    return np.array(flat.view(mx.uint8)).tobytes() if flat.size else b""
