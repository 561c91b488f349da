"""Passes of models for tests: prompts, batches, logits, and layers on two devices, every move recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvcache
import ml
from backends.numpy.backend import NumpyBackend, NumpyContext


def prompt(count: int, seed: int = 0) -> list[int]:
    """Token ids of a vocabulary of 97, the special ones left out."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, 97, count)]


def run(model: Any, cache: Any, entries: Sequence[tuple[int, int]], tokens: Any, **more: Any) -> np.ndarray:
    """Logits of a batch of (sequence, position); ``tokens[sequence][position]`` are its inputs.

    ``more`` is what else the batch has: ``outputs``, ``multimodal``.
    """
    batch = kvcache.Batch(
        positions=[at for _, at in entries],
        sequences=[seq for seq, _ in entries],
        inputs=[tokens[seq][at] for seq, at in entries],
        **more,
    )
    with model.backend.new_context() as ctx:
        cache.start_forward(ctx, batch)
        logits: np.ndarray = model.forward(ctx, batch, cache).to_numpy()
        return logits


def close(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-3) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


class TwoDevices(NumpyBackend):
    """Two devices in one memory, two layers on each; ``moves`` names each change of context, (from, to)."""

    def __init__(self) -> None:
        super().__init__()
        self._devices = (*self._devices, ml.DeviceInfo("cpu:1", "cpu"))
        self.moves: list[tuple[int, int]] = []

    def _new_context(self, max_graph_nodes: int) -> _Placed:
        return _Placed(self, max_graph_nodes)


class _Placed(NumpyContext):
    backend: TwoDevices

    def _on_device(self, device: int) -> _Placed:
        self.backend.moves.append((self.device_index, device))
        return _Placed(self.backend, self.max_graph_nodes, device)

    def _device_of_layer(self, i: int) -> int:
        return i // 2
