"""The floor of `kvcache bench` for CPU backends without one of their own: NumPy, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

import ml
from kvcache.testing.bench.timing import Contender

__all__ = ["EAGER", "FLOORS", "LAYERS", "floors", "peers"]

EAGER = False
"""A step is timed until a row is in host memory, since the other framework may be lazy."""
FLOORS = ("floor (NumPy slices)",)
LAYERS = 4
ROOM = 2048
"""Cells beyond the history, for steps that append."""


class Slices:
    """In-place slice writes into preallocated head-major buffers, and two slices of them."""

    def __init__(self, history: int, new: int, heads: int, dim: int, dtype: ml.DType, grow: bool) -> None:
        """``grow``: each step appends."""
        self.new, self.grow, self.at = new, grow, history
        self.token = np.ones((heads, new, dim), dtype.numpy)
        shape = (heads, history + (ROOM if grow else new), dim)
        self.layers = [[np.zeros(shape, dtype.numpy) for _ in "kv"] for _ in range(LAYERS)]

    def step(self) -> np.ndarray:
        begin, end = self.at, self.at + self.new
        for buffers in self.layers:
            views = []
            for buffer in buffers:
                buffer[:, begin:end] = self.token
                views.append(buffer[:, :end])
        return views[0][:, -1].copy()

    def finish(self) -> None:
        if self.grow:
            self.at += self.new

    def contender(self) -> Contender:
        return Contender(self.step, lambda: None, self.finish)


def floors(history: int, new: int, heads: int, dim: int, dtype: str, grow: bool) -> dict[str, Contender]:
    """The floors by name; ``dtype`` is the name of a float dtype of NumPy or ml_dtypes."""
    stored = next(one for one in ml.DType if one.is_float and one.numpy.name == dtype)
    return {FLOORS[0]: Slices(history, new, heads, dim, stored, grow).contender()}


def peers(*shape: Any) -> dict[str, Contender]:
    """No peers: no other runtime's cache stores tensors of an arbitrary backend."""
    return {}
