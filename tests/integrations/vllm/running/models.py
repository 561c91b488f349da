"""Small models with random weights that are far from uniform: greedy tokens do not hang on a last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 512
SHARED = ("llama", "mistral", "qwen2", "qwen3")


def write_model(folder: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=False, initializer_range=0.2, **({"sliding_window": None} | changes),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases too, which otherwise start as 1 and 0
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
