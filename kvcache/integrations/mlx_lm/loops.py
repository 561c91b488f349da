"""Prompt caches of a pool in mlx-lm's loops: generation, its ``LRUPromptCache``, and speculative decoding.

A prompt that can never fit into its pool is refused before anything is computed, and an answer ends when the
pool is full.

``LRUPromptCache`` copies its entries and trims the copies. If no sequence is free for a copy, or if it cannot
be trimmed that far, the lookup is a miss, as with mlx-lm's own caches that cannot be trimmed.

Speculative decoding checks only once, before it starts, whether drafts can be trimmed. A sliding layer
without ``rollback`` is trimmable until its window is full; later it would silently keep rejected drafts. This
is refused here, and so is a ``rollback`` of a draft model smaller than its drafts. If a round fails, both
prompt caches return to its beginning, and the error propagates.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm.layers import Attention
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.sequences import SequencePool, SequencesTakenError

__all__ = ["check_loops", "incoming", "is_serving", "keep_prompt_caches", "rows_of"]

incoming = threading.local()
"""Set in the thread in which a server generates. ``queue``: the answer queue of its last request."""


def is_serving() -> bool:
    """Whether this is the thread in which a server generates."""
    return hasattr(incoming, "serving")


def rows_of(prompt_cache: Sequence[Any] | None) -> list[BatchRows]:
    """The rows of our entries in a prompt cache; empty for anything else."""
    entry_rows = [getattr(entry, "rows", None) for entry in prompt_cache or ()]
    return [rows for rows in entry_rows if isinstance(rows, BatchRows)]


@functools.cache
def keep_prompt_caches() -> None:
    """Wrap ``LRUPromptCache``, once."""
    for name, around in (("insert_cache", _insert_cache), ("fetch_nearest_cache", _fetch_nearest_cache)):
        setattr(LRUPromptCache, name, functools.partialmethod(around, getattr(LRUPromptCache, name)))


def _insert_cache(
    lru: LRUPromptCache,
    original: Callable[..., None],
    model: Any,
    tokens: Any,
    prompt_cache: Any,
    **more: Any,
) -> None:
    own_rows = rows_of(prompt_cache)
    for rows in own_rows:
        rows.kept = True
        rows.pool.keepers.add(lru)
    if own_rows and is_serving():
        # The server no longer uses the list, but has live references that would hold the sequence.
        prompt_cache, original_cache = list(prompt_cache), prompt_cache
        original_cache.clear()
    if prompt_cache:
        original(lru, model, tokens, prompt_cache, **more)


def _fetch_nearest_cache(lru: LRUPromptCache, original: Callable[..., Any], model: Any, tokens: Any) -> Any:
    try:
        return original(lru, model, tokens)
    except (SequencesTakenError, NotSupportedError):  # a copy of a longer conversation's beginning
        return None, tokens


@functools.cache
def check_loops() -> None:
    """Wrap the generators of mlx-lm, once."""
    loops: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
    for name, around in (("generate_step", _generate_step), ("speculative_generate_step", _speculative)):
        original = getattr(loops, name)
        setattr(loops, name, functools.wraps(original)(functools.partial(around, original)))
    original = loops.BatchGenerator.insert_segments
    loops.BatchGenerator.insert_segments = functools.partialmethod(_insert_segments, original)
    trim = loops.trim_prompt_cache
    loops.trim_prompt_cache = functools.wraps(trim)(functools.partial(_trim_after_a_round, trim))


def _given(original: Callable[..., Any], *arguments: Any, **options: Any) -> inspect.BoundArguments:
    bound = inspect.signature(original).bind(*arguments, **options)
    bound.apply_defaults()
    return bound


# Prompts that can never fit are refused before the first pass; answers end when the pool is full.


def _generate_step(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    bound = _given(original, *arguments, **options)
    bound_arguments, prompt_cache = bound.arguments, bound.arguments["prompt_cache"]
    embedded = bound_arguments["input_embeddings"]
    tokens = bound_arguments["prompt"].size if embedded is None else len(embedded)
    if not bound_arguments["kv_bits"]:  # kv_bits removes layers from the pool
        bound_arguments["max_tokens"] = _fitting(
            "generate_step", bound_arguments["model"], prompt_cache, tokens, bound_arguments["max_tokens"]
        )
    return original(*bound.args, **bound.kwargs)


def _insert_segments(
    generator: Any, original: Callable[..., Any], segments: Any, max_tokens: Any = None, caches: Any = None,
    *more: Any, **options: Any,
) -> Any:  # fmt: skip
    counts = [sum(map(len, of_one)) for of_one in segments]
    most = max_tokens or [generator.max_tokens] * len(counts)
    each = zip(caches or [None] * len(counts), counts, most, strict=True)
    fit = [_fitting("BatchGenerator.insert", generator.model, *one) for one in each]
    return original(generator, segments, fit, caches, *more, **options)


def _fitting(op: str, model: Any, prompt_cache: Any, tokens: int, more: int) -> int:
    """The number of ``more`` tokens that fit after a prompt, in the pool of its current or future prompt
    cache.
    """
    pool = getattr(getattr(model, "make_cache", None), "__self__", None)
    sequences = None if prompt_cache else getattr(pool, "sequences", None)
    for rows in rows_of(prompt_cache)[:1]:
        sequences, tokens = rows.pool, max(rows.lengths) + tokens
    return sequences.fitting(op, tokens, more) if isinstance(sequences, SequencePool) else more


# Speculation.


class _Rounds:
    """The lengths of the prompt caches between two rounds of a ``speculative_generate_step`` generator.
    Rejected drafts are also removed at the end; if a round is interrupted, by the counts of the previous one.
    """

    def __init__(self, several: Sequence[Sequence[Any]], tokens: int) -> None:
        self.rows = [several_rows[0] for prompt_cache in several if (several_rows := rows_of(prompt_cache))]
        self.several = [prompt_cache for prompt_cache in several if rows_of(prompt_cache)]
        self.lengths = [rows.lengths[0] + tokens for rows in self.rows]
        """The tokens of each prompt cache before the current round."""
        self.handled: BaseException | None = None
        """The exception that the caller is handling while it waits for a token."""
        self.working = False

    @property
    def fails(self) -> bool:
        """Whether an error is propagating out of a round."""
        return self.working and sys.exception() is not self.handled

    def steps(self, tokens: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The tokens of the loop; after an error, the prompt caches are as before that round."""
        for rows in self.rows:
            rows.rounds = self
        try:
            while True:
                self.handled, self.working = sys.exception(), True
                try:
                    token = next(tokens)
                except StopIteration:
                    return
                except BaseException:
                    self.working = False
                    self._go_back()
                    raise
                self.working = False
                yield token
        finally:
            self.working = False
            tokens.close()
            for rows in self.rows:
                rows.rounds = None

    def _go_back(self) -> None:
        for rows, prompt_cache, length in zip(self.rows, self.several, self.lengths, strict=True):
            with rows.pool.lock:
                rows.rewind(prompt_cache, min(length, rows.lengths[0]))


def _trim_after_a_round(original: Callable[..., Any], prompt_cache: Any, count: int) -> Any:
    rounds = next((rows.rounds for rows in rows_of(prompt_cache)), None)
    if rounds is None:
        return original(prompt_cache, count)
    if rounds.fails:
        return 0
    trimmed = original(prompt_cache, count)
    rounds.lengths = [rows.lengths[0] for rows in rounds.rows]
    return trimmed


def _speculative(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    bound = _given(original, *arguments, **options)
    bound_arguments = bound.arguments
    model, prompt_cache, drafts = (
        bound_arguments["model"],
        bound_arguments["prompt_cache"],
        bound_arguments["num_draft_tokens"],
    )
    if prompt_cache is None:
        own, drafted = make_prompt_cache(model), make_prompt_cache(bound_arguments["draft_model"])
    else:
        _check_both(prompt_cache)
        own, drafted = prompt_cache[: len(model.layers)], prompt_cache[len(model.layers) :]
    _check_rollback(own, 1, drafts)
    _check_rollback(drafted, max(1, drafts - 1), drafts)
    tokens, most = bound_arguments["prompt"].size, bound_arguments["max_tokens"]
    for whose, of_one in (model, own), (bound_arguments["draft_model"], drafted):
        most = _fitting("speculative_generate_step", whose, of_one, tokens, most)
    bound_arguments["prompt_cache"], bound_arguments["max_tokens"] = [*own, *drafted], most
    return _Rounds((own, drafted), tokens - 1).steps(original(*bound.args, **bound.kwargs))


def _check_both(prompt_cache: Any) -> None:
    rows = rows_of(prompt_cache)
    if rows and len(prompt_cache) <= len(rows[0].pool.storage.entries):
        raise InvalidRangeError(
            f"speculative_generate_step: prompt_cache has {len(prompt_cache)} entries, those of the model "
            "alone; pass make_prompt_cache(model) + make_prompt_cache(draft_model)"
        )


def _check_rollback(entries: Any, least: int, drafts: int) -> None:
    for rows in rows_of(entries):
        storage = rows.pool.storage
        windows = [layer.window for layer in storage.layers if isinstance(layer, Attention) and layer.used]
        if storage.rollback < least and any(window is not None for window in windows):
            raise NotSupportedError(
                f"speculative_generate_step: a pool has rollback={storage.rollback}, so that its sliding "
                f"layers cannot take back rejected drafts, num_draft_tokens={drafts}, once their windows are "
                f"full; make it with rollback={least} or more"
            )
