"""Configs, caches and a base class of models whose layers have states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import ml
from kvcache import CausalCache, RecurrentCache, StateCache, StateSpec
from kvcache.cache import Batch, Cache
from kvcache_engine.config import ModelConfig
from kvcache_engine.models.decoder import CausalModel
from kvcache_engine.models.state_runs import begin_runs
from kvcache_engine.models.step import Step
from ml import nn

__all__ = ["RecurrentModel", "StateConfig", "recurrent_cache"]


@dataclass(frozen=True, slots=True)
class StateConfig(ModelConfig):
    """The config of a model with states, in layers that put no keys."""

    @property
    def states(self) -> dict[str, StateSpec]:
        """The states of a layer for a sequence."""
        raise NotImplementedError

    @property
    def state_layers(self) -> int:
        """The number of layers with states."""
        return self.layers - len(self.attending)

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """The bytes of F32 states, with StateCache's default number of checkpoints."""
        values = self.state_layers * sum(math.prod(spec.shape) for spec in self.states.values())
        return max_sequences * (1 + min(24, capacity // 256)) * values * 4


def recurrent_cache(config: StateConfig, dtype: ml.DType | None = None, **options: Any) -> RecurrentCache:
    """A cache for a model's states and for the keys of its attention layers. ``dtype`` is that of the model's
    activations; ``options`` go to StateCache.
    """
    states: dict[int | None, dict[str, StateSpec]] = {None: config.states}
    attention = CausalCache(nn.rope_shift(config.rope))
    return RecurrentCache.of(StateCache(states, dtype=dtype, delivers=True, **options), attention)


C = TypeVar("C", bound=StateConfig)


class RecurrentModel(CausalModel[C]):
    """A decoder in which some mixers have states."""

    cache_type = RecurrentCache
    cache_of = staticmethod(recurrent_cache)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return begin_runs(ctx, super().begin_pass(ctx, batch, cache))
