"""Training windows: each starts with BOS, as a prompt does, followed by text from the start of a verse.

stream   <s> verse \\n verse \\n verse </s> <s> verse \\n verse </s> ...
inputs   <s> s     s+1   ...  s+n-2          s: the first token of a verse
targets  s   s+1   s+2   ...  s+n-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from .errors import TrainTinyError
from .tokenizer import BOS, EOS

__all__ = ["Batch", "Windows", "encode_chapters"]

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, each (windows, tokens)."""

    inputs: Tensor
    targets: Tensor


def encode_chapters(tokenizer: Tokenizer, chapters: Sequence[str]) -> list[Ids]:
    """The ids of each chapter, without BOS and EOS."""
    encoded = tokenizer.encode_batch(list(chapters), add_special_tokens=False)
    return [np.array(chapter.ids, dtype=np.int64) for chapter in encoded]


class Windows:
    """Endless batches: each epoch cuts the stream of chapters at a fresh phase and shuffles the pieces."""

    def __init__(self, chapters: Sequence[Ids], newline: int, length: int, seed: int) -> None:
        bos, eos = np.array([BOS]), np.array([EOS])
        self.stream: Ids = np.concatenate([part for ids in chapters for part in (bos, ids, eos)])
        if len(self.stream) <= 2 * length:
            raise TrainTinyError(
                f"the training text has {len(self.stream)} tokens, more than {2 * length} are needed"
            )
        starts = np.flatnonzero(np.isin(self.stream, (newline, BOS))) + 1
        self.starts = starts[starts + length <= len(self.stream)]
        self.length = length
        self.random = np.random.default_rng(seed)

    def epoch(self) -> Ids:
        """Shuffled window starts, about `length` apart, so that an epoch sees nearly every token once."""
        phase = self.random.integers(self.length)
        cuts = np.arange(phase, self.starts[-1] + 1, self.length)
        return self.random.permutation(self.starts[np.searchsorted(self.starts, cuts)])

    def batches(self, size: int) -> Iterator[Batch]:
        queue: Ids = self.epoch()
        while True:
            while len(queue) < size:
                queue = np.concatenate([queue, self.epoch()])
            chosen, queue = queue[:size], queue[size:]
            yield self.batch(chosen)

    def batch(self, starts: Ids) -> Batch:
        targets = self.stream[starts[:, None] + np.arange(self.length)]
        inputs = np.concatenate([np.full((len(starts), 1), BOS), targets[:, :-1]], axis=1)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
