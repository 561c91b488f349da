"""The rotations of a transformers config: shifting stored keys, and the length up to which they depend only
on position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ml
from kvcache import InvalidRangeError, NotSupportedError, ShiftFunction
from ml import nn

__all__ = ["check_rotation", "rope_shift", "rotation_limit"]

_HALVES = ("gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_next")
_PAIRS = ("llama4_text",)
"""Model types whose rotation pairs the halves of a head, and those that pair neighbouring dimensions."""


def rope_shift(config: Any) -> ShiftFunction:
    """The function for ``HFCache(shift=...)``, which allows removing tokens from the middle.

    For models whose rotation is known and tested here: Gemma 3, gpt-oss, Llama 2 to 4, Mistral, Qwen 2
    and 3, Qwen3-Next. Raises NotSupportedError for others; write a ``kvcache.ShiftFunction`` for those.
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


def rotation_limit(config: Any) -> tuple[int, str] | None:
    """The number of tokens up to which a key's rotation depends only on its position, and the type of
    rotation. None: always. Beyond that, "dynamic" and "longrope" rotate all keys of a pass depending on its
    total length.
    """
    decoder = config.get_text_config(decoder=True)
    parameters = getattr(decoder, "rope_parameters", None) or {}
    limits = []
    for one in [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]:
        kind = str(one.get("rope_type", "default"))
        if kind == "longrope":
            longest = one.get("original_max_position_embeddings") or decoder.max_position_embeddings
            limits.append((int(longest), kind))
        elif "dynamic" in kind:
            limits.append((decoder.max_position_embeddings - 1, kind))
    return min(limits, default=None)


def check_rotation(op: str, tokens: int, limit: tuple[int, str]) -> None:
    """Raise InvalidRangeError for a conversation that shares its prefix and is longer than ``limit``."""
    longest, kind = limit
    if tokens > longest:
        raise InvalidRangeError(
            f"{op}: a conversation of {tokens} tokens; beyond {longest} the model rotates all keys "
            f"differently ({kind}), so that shorter prefixes cannot be shared: use a separate HFCache"
        )


def _layer(config: Any, i: int) -> Callable[..., ml.Tensor] | None:
    """The rotation of layer ``i``; None if it has none."""
    if config.model_type in _PAIRS and not config.no_rope_layers[i]:
        return None
    parameters = {name: getattr(config, name) for name in ("rope_parameters", "max_position_embeddings")}
    types = getattr(config, "layer_types", None)
    kind = "full_attention" if types is None else types[i]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = nn.parse_rope(parameters, head_dim, kind, partial=True)
    return nn.rope_shift(replace(spec, interleaved=config.model_type in _PAIRS))
