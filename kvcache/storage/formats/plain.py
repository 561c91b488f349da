"""Plain numbers as a format: one part, which is the input itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ml


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of one float dtype."""

    dtype: ml.DType

    @property
    def name(self) -> str:
        return self.dtype.name

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        return ((dim, self.dtype),)

    def head_dim(self, width: int) -> int:
        return width

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return (x if x.dtype is self.dtype else x.cast(ctx, self.dtype),)

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        return parts[0]

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        with np.errstate(over="ignore"):
            error: np.ndarray = np.abs(x.astype(self.dtype.numpy).astype(np.float32) - x)
        return error


PLAIN = {dtype.name: Plain(dtype) for dtype in ml.DType if dtype.is_float}
