"""The options of speculative decoding, and the draft that they name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import ml
from kvcache_engine.checkpoints.source import existing_model_path
from kvcache_engine.config import ModelSizes
from kvcache_engine.drafts import Draft, ModelDraft, prompt_lookup
from kvcache_engine.errors import ModelError, RequestError
from kvcache_engine.language_model import LanguageModel
from kvcache_engine.loading import load_config, load_model
from kvcache_engine.mtp import MTPDraft
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.runtimes import Runtime, load_foreign, runtime_for
from kvcache_engine.verification import Speculation

__all__ = ["Drafting", "speculation_record", "speculation_rows"]

LOOKUP, MTP = "lookup", "mtp"


class Accepting(StrEnum):
    """How drawn drafts are accepted."""

    REJECTION = "rejection"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Drafting:
    """Whether and how tokens are drafted and accepted."""

    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding by lookup (n-grams of the text), mtp (the model's own layer), or a "
            "model of the same vocabulary."
        ),
    ] = None
    draft_tokens: Annotated[int, typer.Option(help="Drafted tokens per pass.", min=1, max=31)] = 4
    acceptance: Annotated[
        Accepting,
        typer.Option(
            help="When sampling: rejection keeps the distribution, exact keeps the text of each seed.",
            case_sensitive=False,
        ),
    ] = Accepting.REJECTION

    @property
    def mtp(self) -> bool:
        """Whether to load the model's layer for multi-token prediction."""
        return self.draft == MTP

    def options(self, options: EngineOptions) -> EngineOptions:
        """The engine's options, with room for drafts if there are any."""
        if self.draft is None:
            return options
        fields = {name: getattr(options, name) for name in EngineOptions.__slots__}
        return SpeculativeOptions(**fields, tokens=self.draft_tokens, acceptance=self.acceptance.value)

    @contextlib.contextmanager
    def opened(self, model: Any, dtype: ml.DType, options: EngineOptions) -> Iterator[Draft | None]:
        """The draft for an engine with ``options``, or None; a draft model is closed at the end."""
        if self.draft is None or self.draft in (LOOKUP, MTP):
            yield None if self.draft is None else MTPDraft(model) if self.mtp else prompt_lookup
            return
        try:
            path = existing_model_path(Path(self.draft))
        except ModelError as error:
            raise RequestError(
                f"--draft {error}; it must be {LOOKUP}, {MTP} or a model (--draft-tokens sets their number)"
            ) from None
        runtime = runtime_for(path)
        if runtime is Runtime.OWN:
            self._check_vocabulary(load_config(path), model)
            small = load_model(path, model.backend, dtype)
        elif runtime.backend == model.backend.name:
            small = load_foreign(runtime, path, model.backend, dtype)
            self._check_vocabulary(small.config, model)
        else:
            raise RequestError(
                f"--draft {self.draft}: {runtime.value} runs it on {runtime.backend}; it must run on "
                f"{model.backend.name}, like the model that it drafts for"
            )
        context = options.context_for(model.config)
        with ModelDraft(small, options.max_sequences, capacity=context) as draft:
            yield draft

    def _check_vocabulary(self, config: ModelSizes, model: LanguageModel) -> None:
        theirs, ours = config.vocab_size, model.config.vocab_size
        if theirs != ours:
            raise RequestError(
                f"--draft {self.draft}: its vocabulary has {theirs} tokens; the model's has {ours}"
            )


def speculation_rows(speculation: Speculation) -> list[tuple[str, str]]:
    """Rows of the summary; empty if nothing was drafted."""
    if not speculation.drafted:
        return []
    accepted = f"{speculation.accepted} of {speculation.drafted} ({speculation.acceptance:.0%})"
    return [("drafts accepted", accepted), ("tokens per pass", f"{speculation.tokens_per_pass:.2f}")]


def speculation_record(speculation: Speculation) -> dict[str, Any]:
    """JSON-able data."""
    return {
        **asdict(speculation),
        "acceptance": speculation.acceptance,
        "tokens_per_pass": speculation.tokens_per_pass,
    }
