"""The description of a rotary embedding: its dimensions, base, pairing and scaling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ml.errors import ShapeError
from ml.nn.scaling import RopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding.

    The first ``dim`` dimensions of a head, an even number, are rotated; ``base`` is theta; ``interleaved``
    pairs neighbouring dimensions instead of the two halves; ``scaling`` extends the context.

    >>> from ml.nn import RopeSpec
    >>> RopeSpec(dim=4, base=10_000.0).inverse_frequencies.tolist()
    [1.0, 0.01]
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ShapeError(
                f"RopeSpec: dim={self.dim}; it must be even and at least 2, since "
                "dimensions are rotated in pairs"
            )
        if self.base <= 0:
            raise ShapeError(f"RopeSpec: base={self.base}; it must be above 0")

    @cached_property
    def inverse_frequencies(self) -> np.ndarray:
        """Radians per position of each pair, scaled: float64 (dim / 2,), highest first; read-only."""
        plain = self.base ** -(np.arange(0, self.dim, 2) / self.dim)
        return _frozen(plain if self.scaling is None else self.scaling.scale(plain, self.base))

    @cached_property
    def attention_factor(self) -> float:
        """The factor by which rotated vectors are multiplied: YaRN's temperature, else 1."""
        return 1.0 if self.scaling is None else self.scaling.attention_scale

    @cached_property
    def signed_frequencies(self) -> np.ndarray:
        """float32 (dim,): each dimension's frequency, negative for the first of each pair."""
        pairs = self.inverse_frequencies.astype(np.float32) * np.array([[-1], [1]], np.float32)
        return _frozen(pairs.T.reshape(-1) if self.interleaved else pairs.reshape(-1))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
