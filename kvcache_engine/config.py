"""Checked model configurations, and the fields of Hugging Face's config.json that all families read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcache import LayerShape
from kvcache_engine.errors import ModelError
from ml.nn import RopeSpec

__all__ = [
    "ModelConfig", "ModelSizes", "common_fields", "experts_per_token", "read_token_ids", "refuse",
    "refuse_quantized",
]  # fmt: skip


class ModelSizes(Protocol):
    """What the engine needs of a model's config, whichever library runs the model. ModelConfig implements
    it.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def cached_layers(self) -> Mapping[int, LayerShape]:
        """By layer, what a cache stores for a token; layers that store nothing are omitted."""

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        """The number of tokens that a full cache stores in ``layer``, one of ``cached_layers``."""

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """The most bytes of a cache besides its cells, for recurrent states."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family model. Sizes count elements, ``max_positions`` tokens; ids are token ids.

    ``attention_bias``: q, k and v have biases; ``output_bias``: o has one; ``qk_norm``: an RMS norm per
    head on queries and keys.

    Raises ModelError for inconsistent sizes.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeSpec
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ModelError(f"model config: {name}={size!r}; it must be a whole number of at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"model config: {self.heads} heads are not a multiple of {self.kv_heads} kv heads"
            )
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ModelError(f"model config: token id {token} is outside the {self.vocab_size} tokens")

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        """The number of tokens that a full cache stores in ``layer``, one of ``cached_layers``."""
        return max_sequences * capacity

    @property
    def cached_layers(self) -> dict[int, LayerShape]:
        """By layer, what a cache stores for a token; layers that store nothing are omitted."""
        return dict.fromkeys(self.attending, self.stored)

    @property
    def attending(self) -> Sequence[int]:
        """The layers that store keys and values."""
        return range(self.layers)

    @property
    def stored(self) -> LayerShape:
        """What such a layer stores for a token."""
        widths = self.kv_heads, self.head_dim
        return LayerShape(widths, widths)

    def cache_kind(self, i: int) -> int | None:
        """The type of layer i in a WrapperCache; None: the model runs on a cache of one type."""
        return None

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """The most bytes of a cache besides its cells, for recurrent states."""
        return 0


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "max_positions",
)


def read_token_ids(value: Any) -> list[int]:
    """Token ids from config.json: one id, a list of ids, or None."""
    if value is None:
        return []
    return [int(token) for token in (value if isinstance(value, list | tuple) else [value])]


def common_fields(raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields of ModelConfig except ``rope``; ``raw`` must contain all fields that have defaults."""
    refuse_quantized(raw)
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    bos = read_token_ids(raw["bos_token_id"])
    eos = read_token_ids(raw["eos_token_id"]) + read_token_ids(generation.get("eos_token_id"))
    bias = bool(raw["attention_bias"])
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
        "tie_embeddings": bool(raw["tie_word_embeddings"]),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "qk_norm": False,
        "bos_id": bos[0] if bos else None,
        "eos_ids": tuple(dict.fromkeys(eos)),
    }


def experts_per_token(raw: Mapping[str, Any], experts: int) -> int:
    """The experts per token. Raises ModelError unless they are between 1 and ``experts``, if there are
    any.
    """
    count: int = raw["num_experts_per_tok"]
    if experts and not 1 <= count <= experts:
        raise ModelError(
            f"num_experts_per_tok={count}; it must be at least 1 and at most the {experts} experts"
        )
    return count


def refuse(raw: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Raise ModelError for a setting that would change the results; the first allowed value is the
    default.
    """
    for name, values in allowed.items():
        value = raw.get(name, values[0])
        if value not in values:
            raise ModelError(f"{name}={value!r} is not supported; only {values[0]!r} is")


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a checkpoint with quantised weights."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"weights quantised by {method!r} are not supported; use the unquantised model or a GGUF file"
        )
