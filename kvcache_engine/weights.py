"""Loading weights: tensors are read by name, checked, joined on the host and put on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

import ml
from kvcache_engine.errors import ModelError
from ml import nn

__all__ = ["GroupedLinear", "Linear", "Loader", "Progress", "Shape", "Shapes", "Weights"]

Progress = Callable[[int, int], None]
"""(tensors done, total tensors)."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""The name and shape of every tensor that a model reads."""


class Weights(Protocol):
    """Host arrays under Hugging Face's names, F32, F16 or BF16 (``ml_dtypes.bfloat16``)."""

    def __getitem__(self, name: str, /) -> np.ndarray: ...
    def __contains__(self, name: object, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` has shape (in, out).

    ``group``: the ranks that have the other inputs, over which the output is summed.
    """

    weight: ml.Tensor
    bias: ml.Tensor | None = None
    group: ml.Group | None = None

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        result = x.matmul(ctx, self.weight)
        if self.bias is not None:
            result = result.add(ctx, self.bias)
        return result if self.group is None else self.group.all_reduce(ctx, result)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Several maps of one shape: ``weight`` (maps, in, out)."""

    weight: ml.Tensor

    def __call__(self, ctx: ml.Context, x: ml.Tensor, groups: nn.Groups) -> ml.Tensor:
        """x (rows, in) -> (rows, out); each row is mapped by its group's weight."""
        return nn.grouped_matmul(ctx, x, self.weight, groups)


class Loader:
    """Reads the tensors of ``shapes``, each once; ``progress(done, total)`` counts them.

    ``group``: the ranks that the model is split over; these weights are one rank's part.

    Raises ModelError for a tensor that is missing or has the wrong shape.
    """

    def __init__(
        self,
        weights: Weights,
        shapes: Shapes,
        dtype: ml.DType,
        progress: Progress | None = None,
        group: ml.Group | None = None,
    ) -> None:
        self.shapes = shapes
        self.group = group
        self.dtype = dtype
        self._weights = weights
        self._progress = progress
        self._done = 0

    def take(self, name: str) -> np.ndarray:
        """The array on the host, checked against the shape of the config."""
        if name not in self._weights:
            raise ModelError(f"the weights have no tensor {name!r}, which the config requires")
        array, shape = self._weights[name], self.shapes[name]
        if array.shape != shape:
            raise ModelError(f"{name} has shape {array.shape}; the config says {shape}")
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self.shapes))
        return array

    def put(self, ctx: ml.Context, array: np.ndarray, dtype: ml.DType | None = None) -> ml.Tensor:
        return ctx.from_numpy(array, dtype or self.dtype)

    def tensor(self, ctx: ml.Context, name: str) -> ml.Tensor:
        return self.put(ctx, self.take(name))

    def transposed(self, ctx: ml.Context, array: np.ndarray) -> ml.Tensor:
        """A tensor (in, out) from a host array (out, in).

        In F32, the dtype of CPUs, it is contiguous if there are more outputs than inputs: OpenBLAS and MKL
        multiply one row by it in 0.6 to 0.9 of the time. Otherwise it is a view of (out, in).
        """
        if self.dtype is ml.DType.F32 and array.shape[0] > array.shape[1]:
            return self.put(ctx, array.T)
        return self.put(ctx, array).permute(ctx, 1, 0)

    def norm(self, ctx: ml.Context, name: str, offset: float = 0.0) -> ml.Tensor:
        """The weight (size,) of a norm; ``offset`` 1 for norms that are stored around zero."""
        weight = self.take(f"{name}.weight")
        return self.put(ctx, weight.astype(np.float32) + np.float32(offset) if offset else weight)

    def linear(self, ctx: ml.Context, *names: str) -> Linear:
        """One product of several maps, joined along their outputs; a missing bias counts as zeros."""
        arrays = [self.take(f"{name}.weight") for name in names]
        return self.joined(ctx, arrays, [self._bias(name) for name in names])

    def summed(self, ctx: ml.Context, name: str) -> Linear:
        """A map whose inputs are split over the ranks, if there are several."""
        return replace(self.linear(ctx, name), group=self.group)

    def joined(
        self, ctx: ml.Context, weights: Sequence[np.ndarray], biases: Sequence[np.ndarray | None] = ()
    ) -> Linear:
        """A map from host arrays (out, in) and (out,)."""
        weight = self.transposed(ctx, _concatenated(weights))
        if all(bias is None for bias in biases):
            return Linear(weight)
        filled = [
            np.zeros(len(rows), rows.dtype) if bias is None else bias
            for rows, bias in zip(weights, biases, strict=True)
        ]
        return Linear(weight, self.put(ctx, _concatenated(filled)))

    def grouped(self, ctx: ml.Context, count: int, weights: Iterable[np.ndarray]) -> GroupedLinear:
        """Maps from ``count`` host arrays (out, in), in order."""
        stacked: ml.Tensor | None = None
        for i, array in enumerate(weights):
            if stacked is None:
                stacked = ctx.empty((count, *array.shape), self.dtype)
            self.put(ctx, array[None]).copy(ctx, stacked.slice(ctx, 0, i, i + 1))
        assert stacked is not None
        return GroupedLinear(stacked.permute(ctx, 0, 2, 1))

    def rows(self, *names: str) -> np.ndarray:
        """The weights (out, in) of several maps on the host, joined along their outputs."""
        return _concatenated([self.take(f"{name}.weight") for name in names])

    def _bias(self, name: str) -> np.ndarray | None:
        return self.take(f"{name}.bias") if f"{name}.bias" in self.shapes else None


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
