"""Llamas of random weights, as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import ml
from kvcache_engine.loading import load_config
from kvcache_engine.models.families import expected_shapes, parse_config
from kvcache_engine.models.llama import Llama

STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"
RANDOM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
"""24 layers of 1,024."""
SMALL: dict[str, Any] = {
    **RANDOM, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 8192,
}  # fmt: skip
"""3 million weights."""


TWO_LAYERS: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
"""Of ``transformers_llama``: small but for its attention."""


def random_model(folder: Path, config: dict[str, Any], spread: float = 0.02) -> Path:
    """``folder`` with weights in F16, which compute in F32: half the file, the same work."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random, weights = np.random.default_rng(0), {}
    for name, shape in expected_shapes(load_config(folder)).items():
        plain = np.ones(shape) if len(shape) == 1 else spread * random.standard_normal(shape, np.float32)
        weights[name] = plain.astype(np.float16)
    save_file(weights, folder / "model.safetensors")
    return folder


class RandomWeights:
    """The same numbers in every process, made as they are asked for."""

    def __init__(self, shapes: Any) -> None:
        self._shapes = shapes

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __getitem__(self, name: str) -> np.ndarray:
        random = np.random.default_rng(list(name.encode()))
        return random.standard_normal(self._shapes[name], np.float32) * np.float32(0.02)


def random_llama(backend: ml.Backend, raw: dict[str, Any]) -> Llama:
    """The runner's own, in F32."""
    config: Any = parse_config(raw)
    weights: Any = RandomWeights(Llama.shapes(config))
    return Llama(backend, config, weights)


def transformers_llama(**config: Any) -> Any:
    """transformers' Llama of this shape, with the same random weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config)).eval()
