"""The Hugging Face folder: config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .errors import TrainTinyError
from .log import write_json
from .model import Llama, LlamaConfig
from .tokenizer import BOS, EOS, PAD, SPECIAL

__all__ = ["load_model", "load_tokenizer", "save_model"]

T = TypeVar("T")


def save_model(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write everything that loading needs; a folder that is there already is brought up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone, and this file is packaged
    partial.replace(folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "config.json", hugging_face_config(model.config))
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config))


def load_model(folder: Path) -> Llama:
    """The model as shipped: bf16 weights, computed in float32."""
    written = read_file(folder / "config.json", lambda path: json.loads(path.read_text(encoding="utf-8")))
    model = Llama(LlamaConfig(**{f.name: written[f.name] for f in fields(LlamaConfig)}))
    model.load_state_dict(read_file(folder / "model.safetensors", load_file))
    return model.eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    return read_file(folder / "tokenizer.json", lambda path: Tokenizer.from_file(str(path)))


def read_file(path: Path, read: Callable[[Path], T]) -> T:
    if not path.exists():
        raise TrainTinyError(f"{path} does not exist; train first, without --report")
    return read(path)


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
