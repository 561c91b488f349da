"""Text from the model, without a KV cache: only for the samples of the model card."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .model import Llama
from .tokenizer import EOS

__all__ = ["Request", "generate"]


@dataclass(frozen=True, slots=True)
class Request:
    """A temperature of 0 is greedy."""

    prompt: str
    temperature: float = 0.0
    seed: int = 0
    tokens: int = 120


@torch.no_grad()
def generate(model: Llama, tokenizer: Tokenizer, request: Request) -> str:
    """The prompt and what the model adds to it, up to the end of the chapter or `tokens` new tokens."""
    random = torch.Generator().manual_seed(request.seed)
    ids: list[int] = tokenizer.encode(request.prompt).ids
    for _ in range(request.tokens):
        window = ids[-model.config.max_position_embeddings :]
        logits = model(torch.tensor([window]))[0, -1]
        token = choose(logits, request.temperature, random)
        if token == EOS:
            break
        ids.append(token)
    return str(tokenizer.decode(ids))


def choose(logits: Tensor, temperature: float, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=random))
