"""Held-out loss in bits per byte, a figure that does not depend on the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .model import Llama
from .tokenizer import BOS
from .windows import encode_chapters

__all__ = ["bits_per_byte"]


@torch.no_grad()
def bits_per_byte(model: Llama, tokenizer: Tokenizer, chapters: Sequence[str]) -> float:
    """Cut each chapter into windows of BOS and at most 511 tokens, sum their bits, divide by UTF-8 bytes.

    BOS is not scored. Nothing is carried from one window to the next, so this is an upper bound.
    """
    span = model.config.max_position_embeddings - 1
    nats = 0.0
    for ids in encode_chapters(tokenizer, chapters):
        for piece in torch.split(torch.from_numpy(ids), span):
            nats += window_nats(model, piece)
    return nats / math.log(2) / sum(len(chapter.encode()) for chapter in chapters)


def window_nats(model: Llama, targets: Tensor) -> float:
    inputs = torch.cat([torch.tensor([BOS]), targets[:-1]])
    logits = model(inputs[None])[0]
    return F.cross_entropy(logits.float(), targets, reduction="sum").item()
