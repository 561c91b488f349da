"""What computes in a model of mlx-lm now: adapters, and weights that have changed."""

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
"""What mlx-lm's layers with adapters have of their own."""
_WRAPPED = {"linear", "embedding"}
"""Where they put the layer that they wrap."""


class Adapters:
    """Tells what K and V of ``model`` depend on beside the tokens and the weights that it has now.

    An array that is written in place is noticed where one of a few elements of it changes, as where all are
    written.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = WatchedWeights()
        self._look()

    def variant(self) -> Part:
        """What to begin a conversation with; None: the weights alone, as they were at first."""
        scales, own = self._look()
        if not own:
            return self._weights.version
        return (
            self._weights.version,
            scales,
            self._weights.digest("", _marks(own), lambda: map(_content, own)),
        )

    def _look(self) -> tuple[list[Part], list[Named]]:
        """Look at the weights; returns the scales of layers with adapters, and the arrays of these."""
        if not hasattr(self._model, "named_modules"):
            return [], []
        layers = {name: part for name, part in self._model.named_modules() if hasattr(part, "lora_a")}
        own: list[Named] = []
        base: list[Named] = []
        found: Any = tree_flatten(self._model.parameters())
        for name, array in found:
            layer, _, leaf = name.rpartition(".")
            if layer in layers and leaf in _ADAPTER:
                own.append((name, array))
            else:
                base.append((".".join(part for part in name.split(".") if part not in _WRAPPED), array))
        self._weights.look(_marks(sorted(base, key=lambda named: named[0])))
        scales: list[Part] = [(name, float(getattr(part, "scale", 1.0))) for name, part in layers.items()]
        return sorted(scales, key=str), sorted(own, key=lambda named: named[0])


def _marks(arrays: Sequence[Named]) -> Marks:
    """Of each its object, and a few elements, which are read in one go for each dtype."""
    marks: list[tuple[object, ...]] = []
    parts: dict[mx.Dtype, list[mx.array]] = {}
    for name, array in arrays:
        marks.append((name, array.shape, str(array.dtype), id(array)))
        if array.size:
            parts.setdefault(array.dtype, []).append(array.reshape(-1)[:: -(-array.size // SAMPLES)])
    return [*marks, *((_bytes(mx.concatenate(few)),) for few in parts.values())]


def _content(named: Named) -> tuple[str, bytes]:
    name, array = named
    return f"{name} {array.dtype} {array.shape}", _bytes(array.reshape(-1))


def _bytes(flat: mx.array) -> bytes:
    return np.array(flat.view(mx.uint8)).tobytes() if flat.size else b""
