"""mlx-lm's models driven by our engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import cache as own

from benchmarks.census import driven
from benchmarks.census import mlx_lm_types as small
from benchmarks.census.driven import agree, is_right, judge
from benchmarks.census.mlx_lm import draw, quiet
from kvcache.integrations.mlx_lm import MLXModel

__all__ = ["CANNOT", "MODES", "Case", "agree", "is_right", "judge", "quiet", "types"]

MODES, types = driven.MODES, small.types
CANNOT: dict[str, str] = {}


class Case(driven.Case):
    """One model, and what it answers by itself, in one pass with mlx-lm's own prompt cache."""

    def __init__(self, name: str) -> None:
        super().__init__(draw)
        self.name, self.model = name, small.build(name)
        self.likeliest([1, 2])  # what keeps mlx-lm from running it

    def likeliest(self, tokens: Sequence[int]) -> list[int]:
        logits = self.model(mx.array([list(tokens)]), cache=own.make_prompt_cache(self.model))
        return [int(token) for token in mx.argmax(logits[0], axis=-1).tolist()]

    @functools.cached_property
    def driven(self) -> MLXModel:
        return MLXModel(self.model)

    @functools.cached_property
    def smaller(self) -> MLXModel:
        other, keys = small.build(self.name), iter(mx.random.split(mx.random.key(5), 4096))

        def near(array: mx.array) -> mx.array:
            if not mx.issubdtype(array.dtype, mx.floating):
                return array
            return (array * (1 + 0.05 * mx.random.normal(array.shape, key=next(keys)))).astype(array.dtype)

        other.update(tree_map(near, other.parameters()))
        return MLXModel(other)
