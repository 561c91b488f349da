"""The generation loop: several requests at once in one cache, their common prefixes computed once.

Every step is one forward pass. While a request has prompt tokens left, a step takes up to
``prefill_chunk`` of them, from several requests where they fit; otherwise it decodes one token for
every running sequence together. A request starts when a sequence is free, and shares with
``copy_prefix`` what another sequence has stored of the same tokens: a request whose prefix is just
being computed by another one waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Generator as Events
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

import ml
from kvcache.cache import Batch, Cache
from kvcache.caches.causal import CausalCache
from kvcache.runner.config import ModelConfig
from kvcache.runner.errors import RequestError, RunnerError, TextTooLongError
from kvcache.runner.memory import cache_bytes, check_memory
from kvcache.runner.request_state import RequestState, Slot, common_prefix, has_token
from kvcache.runner.requests import Event, Finished, GenerationOptions, Prefilled, Statistics
from kvcache.runner.sampling import Sampler
from kvcache.runner.tokenizer import Tokenizer
from kvcache.stores.closing import Closing

__all__ = [
    "Generator",
    "GeneratorOptions",
    "LanguageModel",
    "Prompt",
    "cache_for",
    "check_prompt",
    "encode_prompt",
]

Prompt = str | Sequence[int]
"""A text, or token ids as they are."""


class LanguageModel(Protocol):
    """What the loop needs of a model; ``kvcache.runner.models.llama.Llama`` is one."""

    @property
    def backend(self) -> ml.Backend: ...
    @property
    def config(self) -> ModelConfig: ...

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits (len(batch.outputs), vocab_size); keys and values go through ``cache``."""


@runtime_checkable
class MakesCache(Protocol):
    """A model whose layers need another cache than a ``CausalCache``."""

    def make_cache(self) -> Cache:
        """A fresh cache, bound to no backend."""


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """The cache: ``max_sequences`` at a time, of ``capacity`` tokens each (None: the model's
    ``max_positions``, at most 4096), stored as ``cache_dtype``; ``prefill_chunk`` prompt tokens go
    through one forward pass at most.
    """

    max_sequences: int = 4
    capacity: int | None = None
    prefill_chunk: int = 512
    cache_dtype: ml.DType = ml.DType.F32

    def __post_init__(self) -> None:
        for name in ("max_sequences", "prefill_chunk", "capacity"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"GeneratorOptions: {name}={value}; it is >= 1")

    def capacity_for(self, config: ModelConfig) -> int:
        return min(config.max_positions, 4096) if self.capacity is None else self.capacity


class Generator(Closing):
    """Generates text for many requests in one cache. A context manager; one ``generate`` at a time.

    ``cache`` is a fresh one, which the generator binds and closes (None: what ``model.make_cache()``
    gives, a ``CausalCache`` where the model has no such method).
    ``tokenizer`` may be None where prompts are token ids and texts are not wanted.

    Raises CapacityError, before anything is allocated, where the cache does not fit in memory.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        cache: Cache | None = None,
        options: GeneratorOptions | None = None,
    ) -> None:
        options = options or GeneratorOptions()
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.capacity = options.capacity_for(model.config)
        self.statistics = Statistics()
        sizes = self._sizes()
        check_memory(model.config, model.backend, *sizes)
        self.cache = cache_for(model) if cache is None else cache
        self._largest = self._largest_batch()
        self.cache.init(model.backend, *sizes, self._largest)
        self._slots = [Slot(seq) for seq in range(options.max_sequences)]
        self._queue: list[RequestState] = []
        self._clock = 0
        self._busy = False
        self._closed = False

    @property
    def limit(self) -> int:
        """How many tokens one sequence can hold: the capacity, and no more than the model's positions."""
        return min(self.capacity, self.model.config.max_positions)

    @property
    def cache_bytes(self) -> int:
        """What the cache takes when its buffers are there, which is from the first token on."""
        return cache_bytes(self.model.config, *self._sizes(), self._largest)

    def _sizes(self) -> tuple[ml.DType, int, int]:
        """What the cache stores, of how many sequences, with how many tokens each."""
        return self.options.cache_dtype, self.options.max_sequences, self.capacity

    def _largest_batch(self) -> int:
        return max(self.options.prefill_chunk, self.options.max_sequences)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises RequestError for one that is empty, too long or out of range."""
        return encode_prompt(self.tokenizer, prompt, self.model.config, self.capacity)

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
            raise RequestError("generate: prompts is a string; it is a sequence of prompts")
        if self._busy:
            raise RunnerError("generate: another generate is not done; draw it to its end or close it")
        settings = settings or GenerationOptions()
        sampler = Sampler(settings.temperature, settings.top_k, settings.top_p, settings.seed)
        runs = [
            RequestState(i, self.encode(prompt), settings, sampler.fork(i))
            for i, prompt in enumerate(prompts)
        ]
        for run in runs if self.tokenizer is not None else ():
            run.decoder = self.tokenizer.stream(run.tokens) if self.tokenizer else None
        return self._generate(runs)

    def complete(
        self, prompts: Sequence[Prompt], settings: GenerationOptions | None = None
    ) -> list[Finished]:
        """``generate`` to its end: one answer per prompt, in their order."""
        answers = [event for event in self.generate(prompts, settings) if isinstance(event, Finished)]
        return sorted(answers, key=lambda answer: answer.request)

    def close(self) -> None:
        """Close the cache; a ``generate`` that is not done fails. Model and backend are the caller's."""
        self._closed = True
        self.cache.close()

    # The loop.

    def _generate(self, runs: list[RequestState]) -> Events[Event, None, None]:
        if self._busy:
            raise RunnerError("generate: another generate is not done; draw it to its end or close it")
        self._busy = True
        self._queue = runs
        self.statistics = Statistics(prompt_tokens=sum(run.prompt_tokens for run in runs))
        try:
            while self._queue or any(slot.run for slot in self._slots):
                yield from self._admit()
                yield from self._step()
        finally:
            self._free()
            self._busy = False

    def _free(self) -> None:
        """Empty every sequence, whatever happened."""
        self._queue = []
        for slot in self._slots:
            slot.run, slot.left = None, []
        for seq in range(0 if self._closed else self._sizes()[1]):
            self.cache.remove(seq, 0)

    def _admit(self) -> Iterator[Event]:
        """Give waiting requests the sequences that are free, with what is stored of their prompts."""
        waiting: list[RequestState] = []
        queue, self._queue = self._queue, waiting
        for i, run in enumerate(queue):
            free = [slot for slot in self._slots if slot.run is None]
            if not free:
                waiting.extend(queue[i:])
                return
            donor, shared = self._donor(run)
            if donor is not None and donor.stored < shared:  # it is being computed: wait for it
                waiting.append(run)
                continue
            self._clock += 1
            slot = min(free, key=lambda slot: (len(slot.left) > 0, slot.used))
            yield self._start(run, slot, donor, shared)

    def _start(self, run: RequestState, slot: Slot, donor: Slot | None, shared: int) -> Event:
        if donor is slot:
            self.cache.remove(slot.seq, shared)
        elif donor is not None:
            self.cache.copy_prefix(donor.seq, slot.seq, shared)
        else:
            self.cache.remove(slot.seq, 0)
        slot.run, slot.used, slot.left = run, self._clock, []
        self.statistics.reused_tokens += shared
        return run.start(shared)

    def _donor(self, run: RequestState) -> tuple[Slot | None, int]:
        """The sequence with the longest common prefix, and its length: at least one token is computed."""
        best: Slot | None = None
        longest = 0
        for slot in self._slots:
            shared = common_prefix(run.tokens[:-1], slot.planned)
            ready = slot.stored < shared or self.cache.can_resume(slot.seq, shared)
            if shared > longest and ready:
                best, longest = slot, shared
        return best, longest

    def _step(self) -> Iterator[Event]:
        """One forward pass: a chunk of prompts, or one token of every running sequence."""
        running = [(slot, slot.run) for slot in self._slots if slot.run is not None]
        prefill = [(slot, run) for slot, run in running if run.prefilling]
        return self._compute(self._chunk(prefill), True) if prefill else self._decode(running)

    def _decode(self, running: Sequence[tuple[Slot, RequestState]]) -> Iterator[Event]:
        return self._compute([(slot, run, 1) for slot, run in running], False)

    def _compute(self, parts: Sequence[tuple[Slot, RequestState, int]], prefill: bool) -> Iterator[Event]:
        began = time.perf_counter()
        logits = self._forward(parts)
        produced = iter(logits)
        sampled = [
            (slot, run, None if run.prefilling else run.sampler(next(produced))) for slot, run, _ in parts
        ]
        self._count(parts, prefill, time.perf_counter() - began)
        for slot, run, token in sampled:
            if prefill:
                yield Prefilled(run.request, run.stored, run.prompt_tokens)
            if token is not None:
                yield from self._accept(slot, run, token)

    def _chunk(self, prefill: Sequence[tuple[Slot, RequestState]]) -> list[tuple[Slot, RequestState, int]]:
        """How many prompt tokens of which requests go into this step, first come first served."""
        parts, budget = [], self.options.prefill_chunk
        for slot, run in sorted(prefill, key=lambda pair: pair[0].used):
            count = min(budget, run.prompt_tokens - run.stored)
            if count:
                parts.append((slot, run, count))
                budget -= count
        return parts

    def _forward(self, parts: Sequence[tuple[Slot, RequestState, int]]) -> np.ndarray:
        """Logits of the runs that have none of their prompt left; then those tokens count as stored.

        A pass that fails takes its tokens out of the cache again.
        """
        batch = _batch(parts)
        try:
            with self.model.backend.new_context() as ctx:
                self.cache.start_forward(ctx, batch)
                logits = self.model.forward(ctx, batch, self.cache).to_numpy()
        except BaseException:
            for slot, run, _ in parts:
                self.cache.remove(slot.seq, run.stored)
            raise
        for _, run, count in parts:
            run.stored += count
        return logits

    def _accept(self, slot: Slot, run: RequestState, token: int) -> Iterator[Event]:
        events = run.advance(token, self.model.config.eos_ids, self.limit)
        self.statistics.generated_tokens += has_token(events[0])
        if isinstance(events[-1], Finished):
            slot.leave()
        yield from events

    def _count(self, parts: Sequence[tuple[Slot, RequestState, int]], prefill: bool, seconds: float) -> None:
        statistics, tokens = self.statistics, sum(count for _, _, count in parts)
        if prefill:
            statistics.computed_tokens += tokens
            statistics.prefill_seconds += seconds
        else:
            statistics.decoded_tokens += tokens
            statistics.decode_seconds += seconds


def cache_for(model: LanguageModel) -> Cache:
    """A fresh cache for the model's layers, bound to no backend."""
    if isinstance(model, MakesCache):
        return model.make_cache()
    return CausalCache(getattr(model, "shift", None))


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: Prompt, config: ModelConfig, capacity: int
) -> list[int]:
    """A text's token ids, or the ids as they are, checked as ``check_prompt`` does."""
    if not isinstance(prompt, str):
        return check_prompt(prompt, config, capacity)
    if tokenizer is None:
        raise RequestError("the prompt is text and there is no tokenizer; pass token ids")
    try:
        found = tokenizer.encode(prompt, most=min(capacity, config.max_positions))
    except TextTooLongError as error:
        _check_length(error.count, config, capacity, "at least ")
        raise
    return check_prompt(found, config, capacity)


def check_prompt(tokens: Sequence[int], config: ModelConfig, capacity: int) -> list[int]:
    """The tokens as a list. Raises RequestError for a prompt that the model or the cache cannot take."""
    if not len(tokens):
        raise RequestError("the prompt is empty and this model adds no BOS token; give it some text")
    _check_length(len(tokens), config, capacity)
    found = [int(token) for token in tokens]
    wrong = [token for token in found if not 0 <= token < config.vocab_size]
    if wrong:
        raise RequestError(
            f"the prompt has token {wrong[0]}; the model's ids are 0 to {config.vocab_size - 1}: "
            "is the tokenizer of another model?"
        )
    return found


def _check_length(count: int, config: ModelConfig, capacity: int, least: str = "") -> None:
    if count > config.max_positions:
        raise RequestError(
            f"the prompt has {least}{count} tokens, more than the model's {config.max_positions} positions; "
            "shorten it"
        )
    if count > capacity:
        raise RequestError(
            f"the prompt has {least}{count} tokens, more than the capacity of {capacity} per sequence; "
            f"raise it (the model takes up to {config.max_positions}) or shorten the prompt"
        )


def _batch(parts: Sequence[tuple[Slot, RequestState, int]]) -> Batch:
    positions: list[int] = []
    sequences: list[int] = []
    inputs: list[int] = []
    outputs: list[int] = []
    for slot, run, count in parts:
        end = run.stored + count
        positions += range(run.stored, end)
        sequences += [slot.seq] * count
        inputs += run.tokens[run.stored : end]
        if end >= run.prompt_tokens:
            outputs.append(len(positions) - 1)
    return Batch(positions, sequences, inputs=inputs, outputs=outputs)
