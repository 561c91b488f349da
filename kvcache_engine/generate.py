"""From prompts to answers: an Engine that serves one set of prompts at a time, and then discards their
cache.
"""

from __future__ import annotations

import threading
from collections.abc import Generator as Events
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from kvcache import Turns
from kvcache.cache import SnapshotCache
from kvcache.stores import Closing
from kvcache_engine.drafts import Draft
from kvcache_engine.engine import Engine, EngineEvent
from kvcache_engine.errors import RequestError, RunnerError
from kvcache_engine.language_model import LanguageModel, Prompt, settings_for
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.requests import Event, Finished, GenerationOptions, Statistics
from kvcache_engine.scheduler import Failed
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.verification import Speculation

__all__ = ["Generator"]


class Generator(Closing):
    """Generates text for many requests in one cache. A context manager; one ``generate`` at a time.

    ``complete`` waits for calls of ``complete`` in other threads. ``generate`` does not wait: as long as the
    iterator of another ``generate`` is neither exhausted, closed nor dropped, both raise RunnerError.

    ``cache`` is a fresh cache, which the generator binds and closes (None: ``model.make_cache()``, or a
    ``CausalCache`` if the model has no such method). ``tokenizer`` may be None if prompts are token ids and
    no text is needed. With ``draft``, whose tokens are verified, the same answers take fewer passes; the
    caller closes it.

    Raises CapacityError, before anything is allocated, if the cache does not fit in memory, RequestError for
    a draft without SpeculativeOptions.

    >>> import ml
    >>> from kvcache_engine import GenerationOptions, Generator, Tokenizer, bundled_model, load_model
    >>> name = bundled_model()
    >>> with ml.open_backend("numpy") as backend:
    ...     with Generator(load_model(name, backend), Tokenizer.load(name)) as generator:
    ...         answers = generator.complete(["And God said"], GenerationOptions(max_new_tokens=4))
    >>> len(answers[0].tokens)
    4
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        cache: SnapshotCache | None = None,
        options: EngineOptions | None = None,
        draft: Draft | None = None,
    ) -> None:
        if draft is not None and not isinstance(options, SpeculativeOptions):
            if options is not None:
                raise RequestError("Generator: draft= needs options=SpeculativeOptions(...), or none")
            options = SpeculativeOptions()
        self.engine, self.draft = Engine(model, tokenizer, options, cache=cache), draft
        self.options = self.engine.options
        self._lock = Turns()
        """Serializes calls of ``complete``."""
        self._used = threading.Lock()
        """Held by an iterator that has begun: any thread may drop it."""

    @property
    def cache(self) -> Any:
        return self.engine.cache

    @property
    def statistics(self) -> Statistics:
        """The statistics of the last ``generate``."""
        return self.engine.statistics

    @property
    def speculation(self) -> Speculation:
        """How well the drafts of the last ``generate`` worked."""
        return self.engine.speculation

    @property
    def limit(self) -> int:
        """The most tokens of one sequence, prompt and answer together."""
        return self.engine.limit

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache once its buffers are allocated, which is at the first token."""
        return self.engine.cache_bytes

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises RequestError for one that is empty, too long or out of range."""
        return self.engine.encode(prompt)

    def generate(
        self, prompts: Sequence[Prompt], settings: GenerationOptions | None = None
    ) -> Events[Event, None, None]:
        """Start the requests; events are produced in order as the iterator is consumed.

        All prompts are checked before any is computed. Request i is sampled independently of the others. When
        the iterator ends, fails or is closed, the cache is emptied; ``statistics`` covers this call.

        Raises RequestError immediately, and errors of the backend during iteration.
        """
        if isinstance(prompts, str):
            raise RequestError("generate: prompts is a string; it must be a sequence of prompts")
        settings = settings_for(self.engine.tokenizer, settings)
        self._check_idle()
        return self._generate([self.encode(prompt) for prompt in prompts], settings)

    def _check_idle(self) -> None:
        if self.engine.busy or self._used.locked():
            raise _unfinished()

    def _generate(
        self, prompts: Sequence[Sequence[int]], settings: GenerationOptions
    ) -> Events[Event, None, None]:
        engine = self.engine
        self._check_idle()
        if not self._used.acquire(False):  # another thread was first
            raise _unfinished()
        try:
            engine.reset()
            with ExitStack() as ending:
                for stream, tokens in enumerate(prompts):
                    ending.callback(engine.cancel, engine.submit(tokens, settings, self.draft, stream))
                while engine.busy or engine.closed:
                    yield from _answers(engine.admit())
                    yield from _answers(engine.step())
        finally:
            try:
                if not engine.closed:
                    engine.forget()
            finally:
                self._used.release()

    def complete(
        self, prompts: Sequence[Prompt], settings: GenerationOptions | None = None
    ) -> list[Finished]:
        """Run ``generate`` to its end; returns one answer per prompt, in order."""
        with self._lock:
            answers = [event for event in self.generate(prompts, settings) if isinstance(event, Finished)]
        return sorted(answers, key=lambda answer: answer.request)

    def close(self) -> None:
        """Close the cache; an unfinished ``generate`` fails. Model and backend belong to the caller."""
        self.engine.close()


def _unfinished() -> RunnerError:
    return RunnerError("generate: another call of generate has not finished; exhaust or close its iterator")


def _answers(events: Sequence[EngineEvent]) -> Iterator[Event]:
    """The events; raises the error of a failed request."""
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        yield event
