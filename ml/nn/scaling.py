"""How models extend rotary embeddings beyond the length of their first training.

Each class turns the plain inverse frequencies into scaled ones, as the function of the same name
in transformers' ``ROPE_INIT_FUNCTIONS`` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ml.errors import ShapeError


class RopeScaling(Protocol):
    """A scaling method; hashable."""

    @property
    def attention_scale(self) -> float:
        """The factor by which cos and sin, and thus rotated queries and keys, are multiplied."""

    def scale(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Scaled inverse frequencies from the plain float64 (dim / 2,), highest first."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al., "Extending Context Window", 2023)."""

    factor: float

    @property
    def attention_scale(self) -> float:
        return 1.0

    def scale(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """The frequency of pair i divided by ``factors[i]``: LongRoPE (Ding et al., 2024, arXiv 2402.13753).

    ``attention_scale`` is LongRoPE's attention factor. LongRoPE has separate factors for short and long
    contexts; a cache must use one of them throughout, since stored keys do not change.

    Raises ShapeError for a factor that is not above 0, and in ``scale`` unless there is one for each pair.
    """

    factors: tuple[float, ...]
    attention_scale: float = 1.0

    def __post_init__(self) -> None:
        for factor in self.factors:
            if not factor > 0:
                raise ShapeError(f"FactorScaling: factor {factor}; all must be above 0")

    def scale(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        if len(self.factors) != len(frequencies):
            raise ShapeError(
                f"FactorScaling: {len(self.factors)} factors for {len(frequencies)} pairs of dimensions; "
                "there must be one for each pair"
            )
        scaled: np.ndarray = frequencies / np.asarray(self.factors)
        return scaled


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, a blend between.

    A wavelength is long when fewer than ``low_freq_factor`` of it fit in ``original_max_position``
    tokens, and short when more than ``high_freq_factor`` do.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    @property
    def attention_scale(self) -> float:
        return 1.0

    def scale(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        turns = self.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        blended: np.ndarray = (1 - kept) * frequencies / self.factor + kept * frequencies
        return blended


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv 2309.00071), with DeepSeek's ``mscale`` options.

    Dimensions that turn more than ``beta_fast`` times in ``original_max_position`` tokens keep
    their frequency, those that turn less than ``beta_slow`` times are divided by ``factor``, and a
    linear ramp joins them; ``truncate`` rounds the ramp's ends outwards to whole dimensions.
    ``attention_factor`` None means 0.1 ln(factor) + 1, or DeepSeek's ratio of mscales.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def magnitude(self, mscale: float) -> float:
        """The growth of vectors with the context: ``0.1 mscale ln(factor) + 1``."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def scale(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        low, high = self._ramp(2 * len(frequencies), base)
        slowed = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)
        blended: np.ndarray = frequencies / self.factor * slowed + frequencies * (1 - slowed)
        return blended

    def _ramp(self, dim: int, base: float) -> tuple[float, float]:
        """The beginning and end of the ramp, in pairs of dimensions."""
        low, high = self._pair(self.beta_fast, dim, base), self._pair(self.beta_slow, dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if low == high else high  # avoids a division by zero, like the reference

    def _pair(self, turns: float, dim: int, base: float) -> float:
        """The pair that rotates ``turns`` times in ``original_max_position`` tokens."""
        return dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))
