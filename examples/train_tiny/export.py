"""The Hugging Face folder: config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .model import Llama, LlamaConfig
from .tokenizer import BOS, EOS, PAD, SPECIAL

__all__ = ["load_model", "save_model", "write_json"]


def save_model(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write everything that loading needs; a folder that is there already is brought up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "config.json", hugging_face_config(model.config))
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config))


def load_model(folder: Path, config: LlamaConfig) -> Llama:
    """The model as shipped: bf16 weights, computed in float32."""
    model = Llama(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def hugging_face_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.as_dict(),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "bfloat16",
    }


def tokenizer_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
