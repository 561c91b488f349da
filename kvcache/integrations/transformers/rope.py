"""The shift function of a transformers config: how stored keys move to other positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml
from kvcache import NotSupportedError, ShiftFunction
from kvcache.runner.rope_config import rope_from_parameters
from ml import nn

__all__ = ["rope_shift"]

_HALVES = ("gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_next")
_PAIRS = ("llama4_text",)
"""Model types whose rotation pairs the halves of a head, and those where it pairs neighbours."""


def rope_shift(config: Any) -> ShiftFunction:
    """What ``HFCache(shift=...)`` needs so that tokens can be removed from the middle.

    For models whose rotation is known and tested here: Gemma 3, gpt-oss, Llama 2 to 4, Mistral, Qwen 2
    and 3, Qwen3-Next. NotSupportedError for others; write a ``kvcache.ShiftFunction`` for those.
    """
    decoder = config.get_text_config(decoder=True)
    if decoder.model_type not in (*_HALVES, *_PAIRS):
        raise NotSupportedError(
            f"rope_shift: the position encoding of {decoder.model_type} is not supported; supported are "
            f"{', '.join((*_HALVES, *_PAIRS))}. Pass a kvcache.ShiftFunction of your own"
        )
    turns = [_layer(decoder, i) for i in range(decoder.num_hidden_layers)]

    def shift(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
        turn = turns[layer]
        return key if turn is None else turn(ctx, layer, key, offsets)

    return shift


def _layer(config: Any, i: int) -> Callable[..., ml.Tensor] | None:
    """The rotation of layer ``i``; None where it has none."""
    if config.model_type in _PAIRS and not config.no_rope_layers[i]:
        return None
    parameters = config.rope_parameters
    types = getattr(config, "layer_types", None)
    if types is not None:
        parameters = parameters.get(types[i], parameters)  # one set per type of layer
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = rope_from_parameters(parameters, head_dim, config.max_position_embeddings)
    return nn.rope_shift(replace(spec, interleaved=config.model_type in _PAIRS))
