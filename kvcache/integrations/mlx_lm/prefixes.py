"""Conversations with a model of mlx-lm that never recompute a shared prefix."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.generate import generate_step

from kvcache import LayerShape, PrefixCache, Session
from kvcache.cache import ClosedError, InvalidRangeError, KVCacheError
from kvcache.integrations.conversations import Conversation, SharedPrefixes, prefix_options
from kvcache.integrations.mlx_lm.adapters import Adapters
from kvcache.integrations.mlx_lm.layers import Attention
from kvcache.integrations.mlx_lm.pool import CachePool
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.stores import Part

__all__ = ["MLXPrefixCache", "MLXSession"]

_OF_CACHES = {
    "prompt_cache": "the MLXPrefixCache passes its own",
    "max_kv_size": "the MLXPrefixCache keeps whole prompts",
    "kv_bits": "MLXPrefixCache(dtype=) says what K and V are stored as",
    "input_embeddings": "prefixes are found by tokens alone; call generate_step without MLXPrefixCache",
}
"""Options of ``generate_step`` that prefixes exclude, and the alternative."""
_DRAWN = ("temp", "temperature", "top_p", "top_k", "min_p")
_OF_SAMPLERS = "pass sampler=mlx_lm.sample_utils.make_sampler(temp=..., top_p=..., min_p=..., top_k=...)"


class MLXSession(Conversation):
    """One conversation: ``prompt_cache`` is for mlx-lm, and contains ``cached`` of the prompt's tokens. Pass
    the model ``remaining``, the tokens that the prompt cache lacks, each once; report generated tokens with
    ``extend``. If the evaluated tokens differ from the reported ones, this cannot be detected, and later
    conversations start from wrong keys and values.
    """

    def __init__(self, owner: MLXPrefixCache, session: Session, variant: Part = None) -> None:
        """``variant`` identifies the adapters and weights that compute it."""
        self._owner, self._variant = owner, variant
        rows = BatchRows.adopted(owner.pool.sequences, session.seq, session.cached)
        super().__init__(session, rows, lambda: rows.lengths[0])
        self.prompt_cache = owner.pool.prompt_cache_of(rows)

    def prefill(self, size: int = 512, progress: Callable[[int, int], object] | None = None) -> mx.array:
        """Evaluate ``remaining`` except its last token, at most ``size`` tokens at a time; returns that
        token. ``progress`` is called before each part with the numbers of evaluated and of all tokens.
        ``generate_step`` continues from there. Snapshots are taken at the ends of parts where they are due. A
        part that raises leaves no trace: ``remaining`` still has its tokens. Other threads wait for one part,
        not for all of them.
        """
        parts, tokens, lock = self._parts(size), self._session.tokens, self._owner.pool.lock
        while True:
            with lock:
                part = next(parts, None)
            if part is None:
                return mx.array(self.remaining, mx.int32)
            begin, end = part
            if progress is not None:
                progress(begin, len(tokens))
            with lock:
                try:
                    self._owner.model(mx.array([tokens[begin:end]]), cache=self.prompt_cache)
                    self._owner.pool.storage.ctx.compute()
                except BaseException:
                    with suppress(KVCacheError):
                        self._session.undo(partial(self._rows.rewind, self.prompt_cache, begin))
                    raise

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            self._owner.pool.sequences.undo_unwritten()
            if self._owner.adapters.variant() != self._variant:  # the tokens may mix both variants
                self._session.close(keep=False)
            yield
        finally:
            self._owner.pool.sequences.current = None
            self._rows.leave()
            self._owner._left(self._session)


_CACHE_OPTIONS = ("dtype", "rollback", "backend")
"""The fields of PoolOptions that an MLXPrefixCache takes by the same name."""


class MLXPrefixCache(SharedPrefixes):
    """A ``kvcache.PrefixCache`` for a model of mlx-lm, sliding and hybrid ones included.

    Every conversation is a prompt cache of one row; up to ``max_sequences`` may be open. Stored entries have
    the format of ``CausalCache``, so those written by transformers, vLLM or the engine for the same model are
    found.

    **Threads.** Any number of threads may call it; one works at a time, the others wait. ``generate`` holds
    the lock during a part of the prompt or a step, but not while its caller processes a token, so answers of
    several threads are generated concurrently. If conversations of other threads use all sequences or cells,
    ``begin`` and ``generate`` wait until one of those is closed. A thread that has a conversation open itself
    does not wait; an error is raised. A conversation may be used by one thread at a time.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int = 4,
        capacity: int = 4096,
        batch_invariant: bool = False,
        **options: Any,
    ) -> None:
        """``options`` are ``dtype``, ``rollback`` and ``backend``, as in ``PoolOptions``, and PrefixCache's:
        ``budget``, ``tiers``, ``identity``, ``block_size`` and its options.

        ``batch_invariant``: answers do not depend on the cache's content, bit for bit; prompts are evaluated
        in blocks of ``block_size`` tokens, and only such blocks are reused, not answers.

        A thread writes each conversation to the stores when it ends, unless
        ``PrefixOptions(write_through=False)``.

        Raises NotSupportedError for unsupported layers, as CachePool does, and for ``tiers`` with a model
        that is split over ranks (``model.shard``).
        """
        self._check_options(MLXPrefixCache, options, _CACHE_OPTIONS, _ranks_of(model))
        self.model = model
        self.adapters = Adapters(model)
        self.pool = CachePool(
            model, capacity=capacity, max_sequences=max_sequences, batch_invariant=batch_invariant,
            **{name: options.pop(name) for name in _CACHE_OPTIONS if name in options},
        )  # fmt: skip
        if batch_invariant:
            options["whole_blocks"] = True
        self.pool.sequences.give_away()
        self.lock = self.pool.lock
        self._vocabulary = _rows_embedded(model)
        self._claims: dict[int, tuple[threading.Thread, float]] = {}
        """By sequence, the thread that began the open conversation, and the number of cells reserved for
        it.
        """
        try:
            self.prefix = PrefixCache(self.pool.cache, **prefix_options(options, lambda: _shapes(self.pool)))
        except BaseException:
            self.pool.close()
            raise

    def begin(
        self,
        tokens: Sequence[int],
        salt: str = "",
        shared: int = 0,
        *,
        session_id: str = "",
        next_use: float | None = None,
    ) -> MLXSession:
        """Start a conversation with a prompt, from its longest cached prefix. ``salt`` and ``shared`` control
        sharing, ``session_id`` and ``next_use`` say whose request it is, as in ``PrefixCache.begin``; ``with
        cache.lock:``, ``prefix.agent_sessions`` closes, retains or deletes what an agent used. With
        adapters, prefixes are shared among conversations whose adapters have the same content and scales.
        """
        self.check_open("begin")
        room = self.pool.room
        if len(tokens) > room:
            raise InvalidRangeError(
                f"begin: a prompt of {len(tokens)} tokens; the pool has room for {room}, answers "
                "included: make the MLXPrefixCache with a larger capacity or max_sequences"
            )
        tokens = self.check_ids("begin", tokens)
        claim = max(len(tokens), room / self.pool.sequences.max_sequences)
        with self.pool.lock:
            while self._is_full(claim):
                self.pool.lock.wait(1.0)  # a thread may end without closing its conversation
            self.pool.sequences.current = None
            variant = self.adapters.variant()
            session = self.prefix.begin(
                tokens, salt, shared, variant=variant, session_id=session_id, next_use=next_use
            )
            self._claims[session.seq] = threading.current_thread(), claim
            return MLXSession(self, session, variant)

    def vocabulary(self) -> int | None:
        """How many token ids the model's embedding has; None: not known."""
        return self._vocabulary

    def _is_full(self, claim: float) -> bool:
        """Whether other, live threads hold the sequence or the cells that a conversation of this size
        needs.
        """
        taken = [] if self.prefix.closed else [session.seq for session in self.prefix.sessions]
        claims = [self._claims[seq] for seq in taken if seq in self._claims]
        if any(owner is threading.current_thread() for owner, _ in claims):
            return False
        claimed = sum(count for _, count in claims)
        full = len(claims) >= self.pool.sequences.max_sequences or claimed + claim > self.pool.room
        return full and any(owner.is_alive() for owner, _ in claims)

    def _left(self, session: Session) -> None:
        """Release the sequence and the cells of an ended conversation."""
        self._claims.pop(session.seq, None)
        self.pool.lock.tell()

    def generate(
        self,
        tokens: Sequence[int],
        *,
        prefill_step_size: int = 512,
        salt: str = "",
        shared: int = 0,
        session_id: str = "",
        next_use: float | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """As mlx-lm's ``generate_step`` with its ``options``, for one conversation, from the cached prefix.
        Yields tokens with their log-probabilities. Yielded tokens are kept, wherever the caller stops. If
        ``max_tokens`` do not fit after the prompt, the answer ends when the pool is full, which is logged in
        advance.

        Raises InvalidRangeError for options that belong to the constructor of the cache, for embeddings, and
        for a prompt that does not fit.
        """
        for name in options:
            if name not in _OPTIONS:
                remedy = _OF_SAMPLERS if name in _DRAWN else f"those of generate_step: {', '.join(_OPTIONS)}"
                raise InvalidRangeError(f"generate: no option {name!r}; {remedy}")
        for name, remedy in _OF_CACHES.items():
            if options.get(name) is not None:
                raise InvalidRangeError(f"generate: {name}={options[name]!r:.40}; {remedy}")
        if processors := options.get("logits_processors"):
            options["logits_processors"] = [_of_whole_prompt(tokens, one) for one in processors]
        before, progress = len(tokens) - 1, options.get("prompt_progress_callback")
        if progress is not None:
            options["prompt_progress_callback"] = lambda done, total: progress(before + done, before + total)
        asked = options.get("max_tokens", _MAX_TOKENS)
        options["max_tokens"] = self.pool.sequences.fitting("generate", len(tokens), asked)
        said: list[int] = []
        with self.begin(tokens, salt, shared, session_id=session_id, next_use=next_use) as session:
            last = session.prefill(prefill_step_size, progress)
            steps = generate_step(last, self.model, prompt_cache=session.prompt_cache, **options)
            try:
                for token, logprobs in steps:
                    said.append(int(token))
                    yield int(token), logprobs
            except ClosedError:
                self.check_open("generate")
                raise
            except GeneratorExit:  # the caller stopped
                with suppress(ClosedError):  # the cache was closed meanwhile
                    session.extend(said)
                raise
            session.extend(said)

    def close(self) -> None:
        """Close all conversations, write everything kept to the stores, and drop the caches."""
        with self.pool.lock:
            super().close()
            self.pool.close()
            self.pool.lock.tell()


def _rows_embedded(model: Any) -> int | None:
    """The rows of a model's largest embedding, behind which MLX reads whatever is there."""
    kinds = (Embedding, QuantizedEmbedding)
    parts = model.named_modules() if hasattr(model, "named_modules") else ()
    return max((int(part.weight.shape[0]) for _, part in parts if isinstance(part, kinds)), default=None)


_OPTIONS = inspect.signature(generate_step).parameters
_MAX_TOKENS = int(_OPTIONS["max_tokens"].default)


def _shapes(pool: CachePool) -> Mapping[int, LayerShape]:
    """What the layers store, as far as known; not inferred from stored entries."""
    shapes = {}
    for i, layer in enumerate(pool.storage.layers):
        if isinstance(layer, Attention) and layer.kv_heads and layer.key_dim and layer.value_dim is not None:
            values = layer.key_dim if layer.keys_only else layer.value_dim
            shape = (layer.kv_heads, layer.key_dim), (layer.kv_heads, values)
            shapes[i] = LayerShape(*shape, layer.keys_only)
    return shapes


def _of_whole_prompt(prompt: Sequence[int], processor: Callable[..., Any]) -> Callable[..., Any]:
    """``processor``, called with the whole prompt although ``generate_step`` gets only its last token."""
    before = mx.array(list(prompt[:-1]), mx.int32)
    return lambda seen, logits: processor(mx.concatenate([before, seen]), logits)


def _ranks_of(model: Any) -> int:
    """The number of ranks over which ``model.shard`` has divided the layers."""
    kinds = AllToShardedLinear, QuantizedAllToShardedLinear
    parts = model.modules() if hasattr(model, "modules") else ()
    return max((part.group.size() for part in parts if isinstance(part, kinds)), default=1)
