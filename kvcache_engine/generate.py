"""Prompts to their answers: an Engine that is asked for one set of them at a time, and forgets them then."""

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

    ``complete`` waits for those of other threads. ``generate`` does not: while the iterator of another one is
    neither exhausted nor closed or dropped, however slowly it is drawn from, both raise RunnerError.

    ``cache`` is a fresh one, which the generator binds and closes (None: what ``model.make_cache()``
    gives, a ``CausalCache`` where the model has no such method).
    ``tokenizer`` may be None where prompts are token ids and texts are not wanted.
    With ``draft``, whose tokens are verified, there are fewer passes and the same answers; it is the caller's
    to close.

    Raises CapacityError, before anything is allocated, where the cache does not fit in memory, RequestError
    for a draft with other options than SpeculativeOptions.
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
        """Of ``complete``."""
        self._used = threading.Lock()
        """Held by an iterator that has begun: any thread may drop it."""

    @property
    def cache(self) -> Any:
        return self.engine.cache

    @property
    def statistics(self) -> Statistics:
        """Of the last ``generate``."""
        return self.engine.statistics

    @property
    def speculation(self) -> Speculation:
        """What the drafts of the last ``generate`` were worth."""
        return self.engine.speculation

    @property
    def limit(self) -> int:
        """How many tokens one sequence can hold: prompt and answer together."""
        return self.engine.limit

    @property
    def cache_bytes(self) -> int:
        """What the cache takes when its buffers are there, which is from the first token on."""
        return self.engine.cache_bytes

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises RequestError for one that is empty, too long or out of range."""
        return self.engine.encode(prompt)

    def generate(
        self, prompts: Sequence[Prompt], settings: GenerationOptions | None = None
    ) -> Events[Event, None, None]:
        """Start the requests; events come as the iterator is drawn from, in the order they happen.

        All prompts are checked at once, before any is computed. Request i draws its samples
        independently of the others. When the iterator ends, fails or is closed, the cache is empty
        again; ``statistics`` counts this call.

        Raises RequestError here; while drawing, whatever the backend raises.
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
        if not self._used.acquire(False):  # another thread's came between
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
        """``generate`` to its end: one answer per prompt, in their order."""
        with self._lock:
            answers = [event for event in self.generate(prompts, settings) if isinstance(event, Finished)]
        return sorted(answers, key=lambda answer: answer.request)

    def close(self) -> None:
        """Close the cache; a ``generate`` that is not done fails. Model and backend are the caller's."""
        self.engine.close()


def _unfinished() -> RunnerError:
    return RunnerError("generate: another call of generate has not finished; exhaust or close its iterator")


def _answers(events: Sequence[EngineEvent]) -> Iterator[Event]:
    """The events; raises what a request failed with."""
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        yield event
