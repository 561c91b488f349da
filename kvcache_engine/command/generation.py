"""``kvcache generate``, in one process or as one of the ranks of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ml
from kvcache.views.words import counted
from kvcache_engine.command.answers import tell_full
from kvcache_engine.command.drafting import Drafting
from kvcache_engine.command.screen import Screen
from kvcache_engine.config import ModelSizes
from kvcache_engine.generate import Generator
from kvcache_engine.language_model import LanguageModel, encode_prompt
from kvcache_engine.loading import load_config, load_model
from kvcache_engine.memory import check_memory
from kvcache_engine.models.families import family_of, parameter_count
from kvcache_engine.options import EngineOptions
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.warm_up import warm_up

__all__ = ["continue_prompts"]

NO_DRAFTS = Drafting()


def continue_prompts(
    backend: ml.Backend,
    path: Path,
    dtype: ml.DType,
    prompts: Sequence[str],
    settings: GenerationOptions,
    options: EngineOptions,
    screen: Screen,
    drafting: Drafting = NO_DRAFTS,
    group: ml.Group | None = None,
    model: LanguageModel | None = None,
) -> None:
    """Generate and show answers; with a ``group``, as one of its ranks. ``model``: an already loaded one.
    Everything is checked before the weights are loaded, and the screen is always restored.
    """
    if model is None:
        config, weights = _own_sizes(path, dtype, group)
    else:
        config, weights = model.config, 0
    tokenizer, options = _prepare(backend, path, config, weights, prompts, settings, options)
    answers: list[Finished] = []
    done = "while loading the model"
    try:
        model = model or load_model(path, backend, dtype, screen.loading, group, drafting.mtp)
        warm_up(backend)
        with (
            drafting.opened(model, dtype, options) as draft,
            Generator(model, tokenizer, options=options, draft=draft) as generator,
            contextlib.closing(generator.generate(prompts, settings)) as events,
            _abandoned(screen, generator),
        ):
            for event in events:
                screen.event(event)
                done = (
                    f"after {counted(generator.statistics.generated_tokens, 'token')}; the cache is released"
                )
                if isinstance(event, Finished):
                    answers.append(event)
            totals, cache_bytes = generator.statistics, generator.cache_bytes
            drafts = None if draft is None else generator.engine.speculation
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted {done}") from None
    finally:
        screen.stop()
    answers.sort(key=lambda answer: answer.request)
    screen.finish(totals, cache_bytes, drafts)
    if group is None or group.rank == 0:
        tell_full(answers, generator.limit, model.config.max_positions)


@contextlib.contextmanager
def _abandoned(screen: Screen, generator: Generator) -> Iterator[None]:
    """Show the answers generated so far, however the block ends."""
    try:
        yield
    except BrokenPipeError:  # the reader has gone
        raise
    except BaseException:
        screen.stop()
        screen.abandon(generator.statistics, generator.cache_bytes)
        raise


def _own_sizes(path: Path, dtype: ml.DType, group: ml.Group | None) -> tuple[ModelSizes, int]:
    """The config of one of our own models, this rank's part of it, and the bytes of its weights."""
    config = load_config(path)
    if group is not None and group.size > 1:
        config = family_of(config).share(config, group).config(config)
    return config, parameter_count(config) * dtype.itemsize


def _prepare(
    backend: ml.Backend,
    path: Path,
    config: ModelSizes,
    weights: int,
    prompts: Sequence[str],
    settings: GenerationOptions,
    options: EngineOptions,
) -> tuple[Tokenizer, EngineOptions]:
    """The tokenizer, and the options, with the capacity that the prompts need if none is set. ``weights``:
    bytes still to be loaded.
    """
    if options.capacity is not None:  # before the prompts, since it needs only the config
        sizes = (options.cache_dtype, options.max_sequences, options.capacity)
        check_memory(config, backend, *sizes, weights)
    tokenizer = Tokenizer.load(path)
    limit = options.capacity or config.max_positions
    longest = max(len(encode_prompt(tokenizer, text, config, limit)) for text in prompts)
    if options.capacity is None:
        needed = min(config.max_positions, longest + settings.max_new_tokens)
        options = replace(options, capacity=needed)
        check_memory(config, backend, options.cache_dtype, options.max_sequences, needed, weights)
    return tokenizer, options
