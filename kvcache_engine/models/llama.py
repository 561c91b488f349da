"""A Llama-family decoder, written once on ml.nn: Llama 2 and 3, Mistral, Qwen2, Qwen3.

One pre-norm layer (Touvron et al., 2023), with optional parts for different families::

    hidden += o(attend(rope(norm(q)), cache(rope(norm(k)), v)))    q, k, v of rms_norm(hidden)
    hidden += down(silu(gate) * up)                                gate, up of rms_norm(hidden)

Queries, keys and values are one product, and so are gate and up: their weights are joined when the model is
loaded. Queries and keys are then adjacent, and are normalised and rotated as one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache_engine.config import ModelConfig, common_fields, refuse
from kvcache_engine.errors import ModelError
from kvcache_engine.models.decoder import CausalModel
from ml.nn import parse_rope

__all__ = ["MODEL_TYPES", "Llama", "check_window", "parse", "qwen_window"]

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The architectures of the family, and their ``model_type`` in config.json."""


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The config from the contents of config.json and generation_config.json."""
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    fields = common_fields(raw, generation, architecture)
    llama, qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))
    check_window(raw, None if llama else qwen_window(raw) if qwen2 or qwen3 else raw["sliding_window"])
    bias = fields["attention_bias"] and (llama or qwen3)
    fields |= {
        "attention_bias": bias or qwen2,
        "output_bias": bias,
        "mlp_bias": llama and bool(raw["mlp_bias"]),
        "qk_norm": qwen3,
    }
    return ModelConfig(**fields, rope=parse_rope(raw, fields["head_dim"]))


def check_window(raw: Mapping[str, Any], window: int | None) -> None:
    """Raise ModelError for sliding layers, which are not supported here. A window that covers all positions
    is accepted.
    """
    windowed = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if windowed or (window is not None and window < raw["max_position_embeddings"]):
        shown = f"layer type {windowed[0]!r}" if windowed else f"a sliding window of {window} tokens"
        raise ModelError(f"{shown} is not supported for this architecture; use a model with full attention")


def qwen_window(raw: Mapping[str, Any]) -> int | None:
    """Qwen uses its window only with ``use_sliding_window``; Llama uses none, Mistral always its own."""
    return raw["sliding_window"] if raw["use_sliding_window"] else None


class Llama(CausalModel[ModelConfig]):
    """A model of the Llama family on a backend's devices, with any cache."""
