"""mlx-lm's loops on a pool of fixed size, as used by ``mlx_lm.server``. mlx-lm's own caches grow; a pool does
not, and an error in the middle of a batch would end all of its rows and the server's generation thread. For a
model with a pool (``install``)

* requests wait until there is room for them and everything that they may add;
* conversations kept by an ``LRUPromptCache`` are dropped, oldest first, if necessary
  (``SequencePool.relieve``);
* the server refuses a prompt that can never fit, and ends an answer when the pool is full ("length").

Other errors, for example if other code holds the pool's sequences, fail the requests of the batch but not the
server. Models without a pool are not affected. This module depends on internals of mlx-lm 0.32.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx

from kvcache.cache import InvalidRangeError
from kvcache.integrations.mlx_lm.loops import incoming, is_serving, rows_of
from kvcache.integrations.mlx_lm.pool import CachePool

__all__ = ["guard"]

log = logging.getLogger(__name__)
_queues: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
"""By BatchGenerator of a server and by request, the queue of its answer."""


@functools.cache
def guard() -> None:
    """Wrap mlx-lm's loops, once."""
    loops = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
    server = importlib.import_module("mlx_lm.server")
    for kind, name, around in (
        (loops.BatchGenerator, "insert_segments", _insert_segments),
        (loops.BatchGenerator, "_next", _next),
        (server.ResponseGenerator, "_is_batchable", _is_batchable),
        (server.ResponseGenerator, "_next_request", _next_request),
        (server.ResponseGenerator, "_tokenize", _tokenize),
        (server.ResponseGenerator, "_serve_single", _serve_single),
    ):
        setattr(kind, name, functools.partialmethod(around, getattr(kind, name)))


def _pool_of(model: Any) -> CachePool | None:
    pool = getattr(getattr(model, "make_cache", None), "__self__", None)
    return pool if isinstance(pool, CachePool) else None


# ResponseGenerator.


def _is_batchable(responder: Any, original: Callable[..., bool], *arguments: Any) -> bool:
    pool = _pool_of(responder.model_provider.model)
    storage = None if pool is None else pool.storage
    return original(responder, *arguments) and (
        storage is None or not storage.alike_from or storage.calls_told
    )


def _next_request(responder: Any, original: Callable[..., Any], *arguments: Any) -> Any:
    request = original(responder, *arguments)
    if request is not None:
        incoming.queue = request[0]
    return request


def _tokenize(responder: Any, original: Callable[..., Any], tokenizer: Any, request: Any, asked: Any) -> Any:
    """Refuse a prompt that can never fit, and limit the answer to the room of the pool."""
    incoming.serving = True
    tokenized = original(responder, tokenizer, request, asked)
    pool = _pool_of(responder.model_provider.model)
    if pool is not None:
        room = pool.room - len(tokenized[0])
        if room <= 0:
            raise InvalidRangeError(
                f"a prompt of {len(tokenized[0])} tokens; the pool of its model has room for {pool.room}, "
                "the answer included: shorten it, or install with a larger capacity or max_sequences"
            )
        if room < asked.max_tokens:
            log.warning(
                "an answer of up to %d tokens will end after %d, because the pool has no more room",
                asked.max_tokens,
                room,
            )
            asked.max_tokens = int(room)
    return tokenized


def _serve_single(
    responder: Any, original: Callable[..., None], request: tuple[Any, ...], *more: Any
) -> None:
    options, pool = responder.cli_args, _pool_of(responder.model_provider.model)
    step = options.prefill_step_size
    if pool is not None:
        request = _Answers(request[0]), *request[1:]
        options.prefill_step_size = max(1, min(step, pool.sequences.largest_pass or step))
    try:
        original(responder, request, *more)
    finally:
        options.prefill_step_size = step


class _Answers:
    """A request's queue; errors are sent without their frames, which would hold the prompt cache."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, item: Any) -> None:
        self._queue.put(RuntimeError(str(item)) if isinstance(item, Exception) else item)


# BatchGenerator.


class _Generator:
    """Access to private attributes of a BatchGenerator of mlx-lm 0.32.2; stores nothing itself."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    @property
    def waiting(self) -> deque[Any]:
        """Requests: (id, segments, max_tokens, prompt cache, tokens before, ...)."""
        requests: deque[Any] = self._generator._unprocessed_sequences
        return requests

    @property
    def prompts(self) -> Any:
        """The batch of prompts being evaluated."""
        return self._generator._prompt_batch

    @property
    def answers(self) -> Any:
        """The batch being decoded."""
        return self._generator._generation_batch

    @property
    def uids(self) -> list[int]:
        return [*self.prompts.uids, *self.answers.uids, *(request[0] for request in self.waiting)]

    def largest(self) -> list[int]:
        """The largest final number of tokens of each row of the two batches."""
        prompts, answers = self.prompts, self.answers
        begun = zip(prompts.tokens, self._generator._currently_processing, prompts.max_tokens, strict=True)
        lengths = [len(tokens) + sum(map(len, rest[0])) + most for tokens, rest, most in begun]
        counts = zip(answers.tokens, answers.max_tokens, answers._num_tokens, strict=True)
        return lengths + [len(tokens) + most - done for tokens, most, done in counts]

    def clear(self) -> None:
        """Forget all requests."""
        generator = self._generator
        generator._prompt_batch = type(self.prompts).empty(
            generator.model, generator.sampler, generator.prefill_step_size
        )
        generator._generation_batch = type(self.answers).empty(generator.model, generator.sampler)
        generator._currently_processing, generator._unprocessed_sequences = [], deque()


def _insert_segments(
    generator: Any,
    original: Callable[..., list[int]],
    segments: Sequence[Any],
    max_tokens: Any = None,
    caches: Any = None,
    all_tokens: Any = None,
    *more: Any,
    **options: Any,
) -> list[int]:
    pool, count = _pool_of(generator.model), len(segments)
    if pool is None or not is_serving():
        return original(generator, segments, max_tokens, caches, all_tokens, *more, **options)
    requests = zip(segments, caches or [None] * count, all_tokens or [[]] * count, strict=True)
    # Recompute a request that has nothing left to compute.
    fitted = [one if any(one[0]) else ([one[2]], None, []) for one in requests]
    segments, caches, all_tokens = (list(column) for column in zip(*fitted, strict=True))
    uids = original(generator, segments, max_tokens, caches, all_tokens, *more, **options)
    # The request that made the server load a model with a pool was accepted before this module was active.
    queue = getattr(incoming, "queue", None)
    _queues.setdefault(generator, {}).update(dict.fromkeys(uids, queue))
    return uids


def _anew(tokens: list[int], segments: Sequence[list[int]]) -> list[list[int]]:
    """The segments of a request, with its first ``tokens`` to be computed too; the last token is a separate
    segment.
    """
    first, *rest = segments
    return [[*tokens, *first], *rest] if rest else [tokens, first]


def _holds(prompt_cache: Any) -> bool:
    return any(claim.seq is not None for rows in rows_of(prompt_cache)[:1] for claim in rows.claimed)


def _next(generator: Any, original: Callable[[Any], Any]) -> Any:
    pool = _pool_of(generator.model)
    if pool is None or generator not in _queues:
        return original(generator)
    running, step = _Generator(generator), generator.prefill_step_size
    waiting, uids = running.waiting, running.uids
    _queues[generator] = {uid: queue for uid, queue in _queues[generator].items() if uid in uids}
    count = _admitted(pool, running)
    later = [waiting.pop() for _ in range(len(waiting) - count)]  # moved: copies hold prompt caches
    if pool.sequences.largest_pass is not None:
        rows = len(running.prompts) + count
        generator.prefill_step_size = max(1, min(step, pool.sequences.largest_pass // max(1, rows)))
    try:
        return original(generator)
    except Exception as error:
        return [], _fail(generator, running, uids[: len(uids) - len(later)], error)
    finally:
        generator.prefill_step_size = step
        running.waiting.extend(reversed(later))  # a failed request may have replaced the list


def _admitted(pool: CachePool, running: _Generator) -> int:
    """The number of waiting requests that there is room for, including what earlier ones may add. Other
    requests release a conversation that they have found if its room may be needed.
    """
    lengths, waiting, most_rows = running.largest(), running.waiting, pool.sequences.max_sequences
    largest_pass = pool.sequences.largest_pass or math.inf
    count = 0
    for _, segments, most, _, tokens, *_ in waiting:
        own = len(tokens) + sum(map(len, segments)) + most
        if lengths and (len(lengths) >= min(most_rows, largest_pass) or sum(lengths) + own > pool.room):
            break
        lengths.append(own)
        count += 1
    for i in range(count, len(waiting)):
        uid, segments, most, cache, tokens, *more = waiting[i]
        if not _holds(cache):
            continue
        if len(lengths) < most_rows and sum(lengths) + len(tokens) <= pool.room:
            lengths.append(len(tokens))
        else:
            waiting[i] = (uid, _anew(tokens, segments), most, pool.make_prompt_cache(), [], *more)
    return count


def _fail(generator: Any, running: _Generator, uids: Collection[int], error: Exception) -> list[Any]:
    """End these requests, whose batch cannot continue; returns their answers for the server."""
    log.error("%d requests of a batch fail: %s", len(uids), error)
    running.clear()
    for uid in _queues[generator].keys() & {*uids}:
        if (queue := _queues[generator].pop(uid)) is not None:
            _Answers(queue).put(error)
    nothing = mx.zeros(64)
    return [running.answers.Response(uid, 0, nothing, "error", [], []) for uid in uids]
