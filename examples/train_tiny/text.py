"""The text: chapters of verses, a byte-level BPE tokenizer, and windows that begin at a verse.

Debian ships the King James Bible (package bible-kjv-text); its reader `bible` (package bible-kjv) prints it
as `Ge1:1 In the beginning ...`, one verse a line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from torch import Tensor

INSTALL = "apt-get install -y bible-kjv bible-kjv-text"
COMMAND = ("bible", "-f", "Gen1:1-Rev22:21")
CHAPTERS, VERSES = 1189, 31102
SOURCE = "King James Bible (Debian's bible-kjv-text)"
LICENCE = (
    "Book names and verse numbers are left out.\n"
    "The translation is of 1611 and in the public domain: Debian's copyright file says that its copyright "
    "is expired. (In the United Kingdom, printing it remains a prerogative of the Crown.)"
)
VERSE = re.compile(r"(\d?[A-Za-z]+\d+):\d+ (.+)")
HELD_OUT_EVERY, SHIPPED_EVERY = 20, 4
SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(3)
Ids = NDArray[np.int64]


class TrainTinyError(RuntimeError):
    """The run cannot go on; the message says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Chapters in reading order; every 20th (the 20th, the 40th, ...) is held out and never trained on."""

    source: str
    licence: str
    chapters: tuple[str, ...]

    @property
    def stride(self) -> int:
        return min(HELD_OUT_EVERY, len(self.chapters))

    @property
    def heldout(self) -> tuple[str, ...]:
        return self.chapters[self.stride - 1 :: self.stride]

    @property
    def shipped(self) -> tuple[str, ...]:
        """Every fourth of the held-out chapters: small enough to ship as heldout.txt."""
        return self.heldout[::SHIPPED_EVERY]

    @property
    def train(self) -> tuple[str, ...]:
        return tuple(text for i, text in enumerate(self.chapters) if (i + 1) % self.stride)


def read_bible() -> Corpus:
    """The King James Bible, 1189 chapters, without book names and verse numbers."""
    if shutil.which(COMMAND[0]) is None:
        raise TrainTinyError(
            f"the program `bible` is not installed: {INSTALL}, or give a text with --text FILE"
        )
    result = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    verses = parse_verses(result.stdout)
    groups = groupby(verses, key=itemgetter(0))
    chapters = tuple("\n".join(verse for _, verse in group) for _, group in groups)
    if (len(chapters), len(verses)) != (CHAPTERS, VERSES):
        raise TrainTinyError(
            f"`bible` printed {len(chapters)} chapters, {len(verses)} verses, not {CHAPTERS}, {VERSES} "
            f"{result.stderr.strip()}; is it Debian's? {INSTALL}"
        )
    return Corpus(SOURCE, LICENCE, chapters)


def parse_verses(printed: str) -> list[tuple[str, str]]:
    """(`Ge1`, `In the beginning ...`) for each line `Ge1:1 In the beginning ...`; other lines are dropped."""
    return [(m[1], m[2].strip()) for m in map(VERSE.fullmatch, printed.splitlines()) if m]


def read_text(path: Path) -> Corpus:
    """Any text: a chapter is what lies between blank lines, a verse is a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TrainTinyError(f"--text {path}: {e}") from e
    chapters = tuple(chapter.strip("\n") for chapter in re.split(r"\n\s*\n", text) if chapter.strip())
    if len(chapters) < 2:
        raise TrainTinyError(
            f"--text {path}: {len(chapters)} chapters (blank lines part them), at least 2 are needed"
        )
    return Corpus(path.name, "Its licence is that of the file.", chapters)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Any text survives a round trip, and encoding puts BOS first; a short text may yield fewer tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return tokenizer


def encode_chapters(tokenizer: Tokenizer, chapters: Sequence[str]) -> list[Ids]:
    """The ids of each chapter, without BOS and EOS."""
    encoded = tokenizer.encode_batch(list(chapters), add_special_tokens=False)
    return [np.array(chapter.ids, dtype=np.int64) for chapter in encoded]


class Windows:
    """Endless batches: each epoch cuts the stream of chapters at a fresh phase and shuffles the pieces.

    stream   <s> verse \\n verse \\n verse </s> <s> verse \\n verse </s> ...
    inputs   <s> s     s+1   ...  s+n-2          s: the first token of a verse
    targets  s   s+1   s+2   ...  s+n-1
    """

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

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, each (size, length) of token ids."""
        queue: Ids = self.epoch()
        while True:
            while len(queue) < size:
                queue = np.concatenate([queue, self.epoch()])
            starts, queue = queue[:size], queue[size:]
            targets = self.stream[starts[:, None] + np.arange(self.length)]
            inputs = np.concatenate([np.full((size, 1), BOS), targets[:, :-1]], axis=1)
            yield torch.from_numpy(inputs), torch.from_numpy(targets)
