"""A byte-level BPE tokenizer: any text survives a round trip, and encoding puts the BOS token first."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

__all__ = ["BOS", "EOS", "PAD", "SPECIAL", "newline_id", "train_tokenizer"]

SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(3)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from the training text alone; a short text may yield fewer than `vocab_size` tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return tokenizer


def newline_id(tokenizer: Tokenizer) -> int:
    """The token of a line feed, which stands alone between two verses."""
    (token,) = tokenizer.encode("\n", add_special_tokens=False).ids
    return int(token)
