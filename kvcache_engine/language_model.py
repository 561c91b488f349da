"""What the engine requires of a model, and what it accepts as a prompt."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import ml
from kvcache import CausalCache
from kvcache.cache import Batch, Cache
from kvcache_engine.config import ModelSizes
from kvcache_engine.errors import RequestError, TextTooLongError
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.tokenizer import Tokenizer

__all__ = [
    "LanguageModel",
    "Prompt",
    "cache_for",
    "check_prompt",
    "encode_prompt",
    "settings_for",
    "start_pass",
]

Prompt = str | Sequence[int]
"""A text, or token ids."""


class LanguageModel(Protocol):
    """What the engine needs of a model: ``Llama`` and its relatives, ``TransformersModel``, or your own.

    Optional members: ``make_cache()`` returns the cache for its layers (default: a ``CausalCache``),
    ``dtype`` is what it computes in (default: F32), ``identity()`` identifies its weights for stores,
    ``starts_passes`` says that ``forward`` calls ``start_forward`` itself, as it may split a batch.
    """

    @property
    def backend(self) -> ml.Backend: ...
    @property
    def config(self) -> ModelSizes: ...

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits (len(batch.outputs), vocab_size); keys and values go through ``cache``.

        ``cache.start_forward(ctx, batch)`` has been called, unless the model's ``starts_passes`` is True.
        """


@runtime_checkable
class MakesCache(Protocol):
    """A model whose layers need another cache than a ``CausalCache``."""

    def make_cache(self) -> Cache:
        """A fresh cache, bound to no backend."""


def cache_for(model: LanguageModel) -> Any:
    """A fresh cache for the model's layers, bound to no backend."""
    if isinstance(model, MakesCache):
        return model.make_cache()
    return CausalCache(getattr(model, "shift", None))


def start_pass(model: LanguageModel, ctx: ml.Context, batch: Batch, cache: Cache) -> None:
    """Start the pass before ``model.forward(ctx, batch, cache)``."""
    if not getattr(model, "starts_passes", False):
        cache.start_forward(ctx, batch)


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: Prompt, config: ModelSizes, capacity: int
) -> list[int]:
    """A text's token ids, or the given ids, checked by ``check_prompt``."""
    if not isinstance(prompt, str):
        return check_prompt(prompt, config, capacity)
    if tokenizer is None:
        raise RequestError("the prompt is text and there is no tokenizer; pass token ids")
    try:
        ids = tokenizer.encode(prompt, most=min(capacity, config.max_positions))
    except TextTooLongError as error:
        _check_length(error.count, config, capacity, "at least ")
        raise
    return check_prompt(ids, config, capacity)


def check_prompt(tokens: Sequence[int], config: ModelSizes, capacity: int) -> list[int]:
    """The tokens as a list. Raises RequestError for a prompt that the model or the cache cannot take."""
    try:
        if isinstance(tokens, bytes | bytearray | Mapping | Set):
            raise TypeError
        if not len(tokens):
            raise RequestError(
                "the prompt is empty and this model adds no BOS token; pass a prompt with text"
            )
        _check_length(len(tokens), config, capacity)
        ids = [_id(token) for token in tokens]
    except TypeError:
        other: Any = tokens
        remedy = ": pass its ['input_ids']" if isinstance(other, Mapping) and "input_ids" in other else ""
        raise RequestError(
            f"the prompt is {tokens!r:.80}; it must be a text or a sequence of token ids{remedy}"
        ) from None
    wrong = [token for token in ids if not 0 <= token < config.vocab_size]
    if wrong:
        raise RequestError(
            f"the prompt has token {wrong[0]}; the model's ids are 0 to {config.vocab_size - 1}: "
            "does the tokenizer belong to another model?"
        )
    return ids


def settings_for(tokenizer: Tokenizer | None, settings: GenerationOptions | None) -> GenerationOptions:
    """The settings, or the defaults. Raises RequestError for stop strings without a tokenizer."""
    if not isinstance(settings, GenerationOptions | None):
        raise RequestError(f"settings={settings!r:.60}; it must be GenerationOptions(...)")
    settings = settings or GenerationOptions()
    if settings.stop and tokenizer is None:
        raise RequestError(
            f"stop={list(settings.stop)} is text and there is no tokenizer; pass the engine one"
        )
    return settings


def _id(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)


def _check_length(count: int, config: ModelSizes, capacity: int, least: str = "") -> None:
    if count > config.max_positions:
        raise RequestError(
            f"the prompt has {least}{count} tokens, more than the model's {config.max_positions} positions; "
            "shorten it"
        )
    if count > capacity:
        raise RequestError(
            f"the prompt has {least}{count} tokens, more than the capacity of {capacity} per sequence; "
            f"raise it (the model supports up to {config.max_positions}) or shorten the prompt"
        )
