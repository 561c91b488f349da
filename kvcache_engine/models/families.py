"""The supported models, by the name in config.json's ``architectures``.

>>> from kvcache_engine.models.families import FAMILIES
>>> sorted(name for name, family in FAMILIES.items() if not family.causal)
['WhisperForConditionalGeneration']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ml
from kvcache.cache import Cache
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import ModelError
from kvcache_engine.models import (
    deepseek,
    gemma3,
    llama,
    moe,
    qwen3_next,
    whisper,
)
from kvcache_engine.models.defaults import filled
from kvcache_engine.parallel import Share, check_ranks, share_of

__all__ = [
    "FAMILIES",
    "SUPPORTED_ARCHITECTURES",
    "Family",
    "expected_shapes",
    "family_of",
    "parameter_count",
    "parse_config",
]

SUPPORTED_ARCHITECTURES = tuple(llama.MODEL_TYPES)
"""The Llama family, which ModelConfig describes completely."""
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How a kind of model is read and run.

    ``parse(raw, generation)`` turns config.json, with defaults, and generation_config.json into a config.
    ``model(backend, config, weights, dtype, progress)`` loads the weights and has the forward pass.
    ``model_type`` is used if config.json names no architecture. ``causal``: a pure decoder, which
    ``Generator`` and ``kvcache generate`` can run. ``divisible``: its layers can be split over ranks by
    heads, and ``model`` accepts ``share=``.
    """

    parse: Callable[[Raw, Raw], Any]
    model: Any
    model_type: str
    causal: bool = True
    divisible: bool = False

    def make_cache(self, config: Any, dtype: ml.DType | None = None, **options: Any) -> Cache:
        """An unbound cache, for activations of ``dtype``; options are the family's own (``memory``)."""
        cache: Cache = self.model.cache_of(config, dtype, **options)
        return cache

    def check_ranks(self, config: Any, size: int) -> None:
        """Raise ModelError for a family that cannot be split over this number of ranks."""
        if not self.divisible:
            known = ", ".join(name for name, family in FAMILIES.items() if family.divisible)
            raise ModelError(
                f"tensor parallelism: {config.architecture} is not split over ranks; {known} are: "
                "run it on one rank"
            )
        check_ranks(config, size)

    def share(self, config: Any, group: ml.Group) -> Share:
        """The part that one rank computes. Raises the errors of ``check_ranks``."""
        self.check_ranks(config, group.size)
        return share_of(config, group)


def family_of(config: Any) -> Family:
    """The family of a config. Raises ModelError for an unknown architecture."""
    try:
        return FAMILIES[config.architecture]
    except KeyError:
        raise ModelError(
            f"unsupported architecture {config.architecture}; supported are {', '.join(FAMILIES)}"
        ) from None


FAMILIES: dict[str, Family] = {
    **{
        name: Family(partial(llama.parse, architecture=name), llama.Llama, model_type, divisible=True)
        for name, model_type in llama.MODEL_TYPES.items()
    },
    "DeepseekV2ForCausalLM": Family(deepseek.parse_v2, deepseek.DeepSeek, "deepseek_v2"),
    "DeepseekV3ForCausalLM": Family(deepseek.parse_v3, deepseek.DeepSeek, "deepseek_v3"),
    "DeepseekV32ForCausalLM": Family(deepseek.parse_v32, deepseek.DeepSeek, "deepseek_v32"),
    "Gemma3ForCausalLM": Family(gemma3.parse, gemma3.Gemma3, "gemma3_text", divisible=True),
    "Glm4MoeForCausalLM": Family(moe.parse_glm4, moe.MoE, "glm4_moe"),
    "MixtralForCausalLM": Family(moe.parse_mixtral, moe.MoE, "mixtral"),
    "Qwen3MoeForCausalLM": Family(moe.parse_qwen3, moe.MoE, "qwen3_moe"),
    "Qwen3NextForCausalLM": Family(qwen3_next.parse, qwen3_next.Qwen3Next, "qwen3_next"),
    "Qwen3_5ForCausalLM": Family(qwen3_next.parse_dense, qwen3_next.Qwen3Next, "qwen3_5_text"),
    "WhisperForConditionalGeneration": Family(whisper.parse, whisper.Whisper, "whisper", causal=False),
}
"""All supported architectures."""


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, origin: str = "config.json"
) -> ModelConfig:
    """The config from the contents of config.json and generation_config.json; ``origin`` is used in
    errors.
    """
    try:
        name, generation = _architecture(raw), generation or {}
        config: ModelConfig = FAMILIES[name].parse(filled(raw, generation, name), generation)
        return config
    except KeyError as error:
        raise ModelError(f"{origin}: config.json has no {error.args[0]!r}") from error
    except (ModelError, ml.NotSupportedError, ml.ShapeError) as error:
        raise ModelError(f"{origin}: {error}") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{origin}: config.json cannot be read ({error})") from error


def _architecture(raw: Raw) -> str:
    names = raw.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == raw.get("model_type")
    ]
    causal = [name for name, family in FAMILIES.items() if family.causal]
    for name in names:
        if name in causal:
            return str(name)
    shown = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    raise ModelError(f"unsupported architecture {shown}; supported are {', '.join(causal)}")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model of this config reads."""
    return dict(family_of(config).model.shapes(config))


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters of a model with this config; a tied embedding counts once."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in expected_shapes(config).values())
