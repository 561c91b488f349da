"""transformers' models driven by our engine."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch

from benchmarks.census import driven
from benchmarks.census import transformers as library
from benchmarks.census import transformers_types as small
from benchmarks.census.driven import agree, is_right, judge
from benchmarks.census.transformers import quiet, tokens
from kvcache.integrations.transformers import TransformersModel

__all__ = ["CANNOT", "MODES", "Case", "agree", "is_right", "judge", "quiet", "types"]

MODES, CANNOT, types = driven.MODES, small.CANNOT, small.types


class Case(driven.Case):
    """One model, and what it answers by itself, without a cache."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda count, seed: tokens(1, count, seed)[0].tolist())
        self.model = library.Case(name).model

    def likeliest(self, tokens: Sequence[int]) -> list[int]:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return [int(token) for token in logits.argmax(-1)]

    @functools.cached_property
    def driven(self) -> TransformersModel:
        return TransformersModel(copy.deepcopy(self.model))

    @functools.cached_property
    def smaller(self) -> TransformersModel:
        other, generator = copy.deepcopy(self.model), torch.Generator().manual_seed(5)
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
        return TransformersModel(other)
