"""Configs and caches of models whose layers keep states, and what these models share."""

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
    """Of a model with states: those of layers that put no keys."""

    @property
    def states(self) -> dict[str, StateSpec]:
        """What a layer keeps of a sequence."""
        raise NotImplementedError

    @property
    def state_layers(self) -> int:
        """How many layers keep states."""
        return self.layers - len(self.attending)

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """Of states in F32, and as many checkpoints as StateCache takes by default."""
        values = self.state_layers * sum(math.prod(spec.shape) for spec in self.states.values())
        return max_sequences * (1 + min(24, capacity // 256)) * values * 4


def recurrent_cache(config: StateConfig, dtype: ml.DType | None = None, **options: Any) -> RecurrentCache:
    """For the states of a model, and the keys of its layers with attention.

    ``dtype`` is that of the model's activations; ``options`` go to StateCache.
    """
    states: dict[int | None, dict[str, StateSpec]] = {None: config.states}
    attention = CausalCache(nn.rope_shift(config.rope))
    return RecurrentCache.of(StateCache(states, dtype=dtype, delivers=True, **options), attention)


C = TypeVar("C", bound=StateConfig)


class RecurrentModel(CausalModel[C]):
    """A decoder some of whose mixers keep states."""

    cache_type = RecurrentCache
    cache_of = staticmethod(recurrent_cache)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return begin_runs(ctx, super().begin_pass(ctx, batch, cache))
