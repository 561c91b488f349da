"""Configs and caches of models whose layers keep states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml
from kvcache.cache import ShiftFunction
from kvcache.caches.recurrent import RecurrentCache
from kvcache.runner.config import ModelConfig
from kvcache.runner.errors import ModelError
from kvcache.runner.models.mamba_mixer import MambaSizes

__all__ = ["StateConfig", "recurrent_cache", "time_limits"]


@dataclass(frozen=True, slots=True)
class StateConfig(ModelConfig):
    """Of a model with states."""

    @property
    def state_values(self) -> int:
        """Numbers that a sequence's states have, of all layers."""
        raise NotImplementedError

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """Of states in F32, and as many checkpoints as RecurrentCache takes by default."""
        return max_sequences * (1 + min(24, capacity // 256)) * self.state_values * 4


def recurrent_cache(
    sizes: MambaSizes, shift: ShiftFunction | None, dtype: ml.DType | None, options: Mapping[str, Any]
) -> RecurrentCache:
    """For the states of Mamba-2 mixers, and the keys of layers with attention."""
    return RecurrentCache(
        (sizes.channels, sizes.kernel - 1),
        (sizes.heads, sizes.state, sizes.head_dim),
        shift,
        conv_dtype=dtype,
        delivers=True,
        **options,
    )


def time_limits(raw: Mapping[str, Any]) -> None:
    """ModelError where steps in time are limited, to anything but 0 and infinity."""
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    high = float("inf") if isinstance(high, Mapping) else float(high)
    if low > 0 or high < math.inf:
        raise ModelError(f"time_step_limit=({low}, {high}) is not supported; only (0, inf) is")
