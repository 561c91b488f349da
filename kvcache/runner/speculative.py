"""Speculative decoding: a Generator whose requests carry a draft, which the engine verifies."""

from __future__ import annotations

from kvcache.cache import SnapshotCache
from kvcache.runner.drafts import Draft
from kvcache.runner.generate import Generator
from kvcache.runner.language_model import LanguageModel
from kvcache.runner.options import SpeculativeOptions
from kvcache.runner.tokenizer import Tokenizer
from kvcache.runner.verification import Speculation

__all__ = ["Speculation", "SpeculativeGenerator", "SpeculativeOptions"]


class SpeculativeGenerator(Generator):
    """A Generator that verifies the tokens of ``draft``: the same answers in fewer passes.

    ``speculation`` counts what the drafts were worth. The draft is the caller's to close.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        draft: Draft,
        cache: SnapshotCache | None = None,
        options: SpeculativeOptions | None = None,
    ) -> None:
        super().__init__(model, tokenizer, cache, options or SpeculativeOptions())
        self.draft = draft

    @property
    def speculation(self) -> Speculation:
        """Of the last ``generate``."""
        return self.engine.speculation
