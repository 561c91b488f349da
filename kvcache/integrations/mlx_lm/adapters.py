"""Detects adapters and changed weights of a model of mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
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
        own: list[Named] = []
        base: list[Named] = []
        named_arrays: Any = tree_flatten(self._model.parameters())
        layers: dict[str, Any] = {}
        if any(name.endswith("lora_a") for name, _ in named_arrays):  # it takes as long as all the rest
            layers = {name: part for name, part in self._model.named_modules() if hasattr(part, "lora_a")}
        for name, array in named_arrays:
            layer, _, leaf = name.rpartition(".")
            if layer in layers and leaf in _ADAPTER:
                own.append((name, array))
            else:
                base.append((".".join(part for part in name.split(".") if part not in _WRAPPED), array))
        self._weights.look(_marks(sorted(base, key=lambda named: named[0])))
        scales: list[Part] = [(name, float(getattr(part, "scale", 1.0))) for name, part in layers.items()]
        return sorted(scales, key=str), sorted(own, key=lambda named: named[0])


def _marks(arrays: Sequence[Named]) -> Marks:
    """For each array its object and a few elements, which are read together for each dtype."""
    marks: list[tuple[object, ...]] = []
    parts: dict[mx.Dtype, list[mx.array]] = {}
    for name, array in arrays:
        marks.append((name, array.shape, str(array.dtype), id(array)))
        if array.size:
            most = round(SAMPLES ** (1 / max(1, array.ndim)))  # along each axis: reshape may copy all of it
            few = array[tuple(slice(None, None, -(-size // most)) for size in array.shape)]
            parts.setdefault(array.dtype, []).append(few.reshape(-1))
    return [*marks, *((_bytes(mx.concatenate(few)),) for few in parts.values())]


def _content(named: Named) -> tuple[str, bytes]:
    name, array = named
    return f"{name} {array.dtype} {array.shape}", _bytes(array.reshape(-1))


def _bytes(flat: mx.array) -> bytes:
    return np.array(flat.view(mx.uint8)).tobytes() if flat.size else b""
