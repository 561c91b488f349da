"""Configs and caches of models whose layers are of several types, as config.json names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.caches.causal import CausalCache
from kvcache.caches.windows import SlidingWindowCache
from kvcache.caches.wrapper import WrapperCache
from kvcache.runner.config import ModelConfig, read_token_ids, refuse_quantized
from kvcache.runner.errors import ModelError
from kvcache.runner.rope_config import rope_from_parameters
from ml import nn

__all__ = [
    "FULL", "FULL_ATTENTION", "SLIDING", "SLIDING_ATTENTION", "Shape", "SlidingConfig", "attention_shapes",
    "common_fields", "layer_types", "model_shapes", "parse_rope", "refuse", "sliding_cache",
]  # fmt: skip

SLIDING_ATTENTION, FULL_ATTENTION = "sliding_attention", "full_attention"
"""Types of layers, as config.json names them."""
SLIDING, FULL = 0, 1
"""Layer types of :func:`sliding_cache`."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlidingConfig(ModelConfig):
    """Of sliding and full layers: ``kinds`` has the type of each by name, and ``window`` counts the token
    itself, as config.json does.
    """

    kinds: tuple[str, ...]
    window: int

    def cache_kind(self, i: int) -> int:
        """What layer i is to :func:`sliding_cache`."""
        return SLIDING if self.kinds[i] == SLIDING_ATTENTION else FULL

    def cached_tokens(self, max_sequences: int, capacity: int, max_batch: int) -> int:
        kept = self.window - (max_sequences == 1)
        full = max_sequences * capacity
        sliding = full if kept >= capacity else max_sequences * kept + max_batch
        count = self.kinds.count(SLIDING_ATTENTION)
        return count * sliding + (len(self.kinds) - count) * full


def common_fields(raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields of ModelConfig, ``rope`` aside."""
    refuse_quantized(raw)
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    bos = read_token_ids(raw.get("bos_token_id"))
    eos = read_token_ids(raw.get("eos_token_id")) + read_token_ids(generation.get("eos_token_id"))
    bias = bool(raw.get("attention_bias", False))
    return {
        "architecture": architecture,
        "vocab_size": raw["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": raw["intermediate_size"],
        "layers": raw["num_hidden_layers"],
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or hidden // heads,
        "rms_norm_eps": float(raw["rms_norm_eps"]),
        "max_positions": raw["max_position_embeddings"],
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "qk_norm": False,
        "bos_id": bos[0] if bos else None,
        "eos_ids": tuple(dict.fromkeys(eos)),
        "sliding_window": raw.get("sliding_window"),
        "layer_types": None,
    }


def layer_types(
    raw: Mapping[str, Any], known: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """The type of each layer, ``default(i)`` where config.json does not list them."""
    count = raw["num_hidden_layers"]
    kinds = tuple(raw.get("layer_types") or [default(i) for i in range(count)])
    if len(kinds) != count:
        raise ModelError(f"{len(kinds)} layer_types for {count} layers; there is one each")
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"layer type {kind!r} is not supported; {' and '.join(known)} are")
    return kinds


def refuse(raw: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """ModelError for a setting that would change the numbers; the first allowed value is the default."""
    for name, values in allowed.items():
        found = raw.get(name, values[0])
        if found not in values:
            raise ModelError(f"{name}={found!r} is not supported; only {values[0]!r} is")


def parse_rope(
    raw: Mapping[str, Any], head_dim: int, base: float, kind: str = "", partial: float = 1.0
) -> nn.RopeSpec:
    """The rotary embedding, of layers of type ``kind`` where each type has its own.

    ``base`` and ``partial`` (the share of head_dim that is rotated) are used where none is given.
    """
    given = raw.get("rope_parameters") or {}
    given = given.get(kind, given)
    parameters = {"partial_rotary_factor": raw.get("partial_rotary_factor", partial), **given}
    if not given:
        parameters.update({"rope_theta": raw.get("rope_theta", base), **(raw.get("rope_scaling") or {})})
    parameters.setdefault("rope_theta", base)
    return rope_from_parameters(parameters, head_dim, raw["max_position_embeddings"])


def sliding_cache(
    window: int, sliding: nn.RopeSpec, full: nn.RopeSpec, memory: int | None = None
) -> WrapperCache:
    """For sliding layers (type SLIDING) and full ones (type FULL).

    Hugging Face's ``window`` counts the token itself: it is our ``window - 1``.
    """
    return WrapperCache(
        SlidingWindowCache(window - 1, memory, nn.rope_shift(sliding)), CausalCache(nn.rope_shift(full))
    )


def model_shapes(config: ModelConfig, layer: Callable[[int], Mapping[str, Shape]]) -> dict[str, Shape]:
    """Embedding, layers, norm and head; ``layer(i)`` names the tensors below ``model.layers.{i}.``."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer(i).items()})
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def attention_shapes(config: ModelConfig, qk_norm: bool = False, gates: int = 0) -> dict[str, Shape]:
    """Of ``self_attn``, with its biases; ``gates`` rows more in the queries' projection."""
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {}
    for name, rows in {"q": queries + gates, "k": keys, "v": keys}.items():
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
