"""Conversations with a model of mlx-lm that never recompute a prefix that they share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import generate_step

import ml
from kvcache.cache import CacheDType, InvalidRangeError
from kvcache.integrations.mlx_lm.pool import CachePool
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.prefix.prefix_cache import PrefixCache, Session
from kvcache.stores.closing import Closing

__all__ = ["MLXPrefixCache", "MLXSession"]


class MLXSession:
    """One conversation: ``prompt_cache`` is for mlx-lm, and holds ``cached`` of the prompt's tokens."""

    def __init__(self, owner: MLXPrefixCache, session: Session) -> None:
        self._owner, self._session = owner, session
        self.cached = session.cached
        self._rows = BatchRows.adopted(owner.pool.sequences, session.seq, session.cached)
        self.prompt_cache = owner.pool.prompt_cache_of(self._rows)

    def __repr__(self) -> str:
        return f"<MLXSession; {self._session!r}>"

    def prefill(self, size: int = 512) -> mx.array:
        """Evaluate the prompt but its last token, ``size`` tokens at a time at most; returns that token.

        ``generate_step`` goes on from there. Snapshots are taken at the ends of the parts where they are due.
        """
        tokens, begin = self._session.tokens, self.cached
        for chunk in self._session.chunks(size):
            end = min(begin + len(chunk), len(tokens) - 1)
            if end > begin:
                self._owner.model(mx.array([tokens[begin:end]]), cache=self.prompt_cache)
                self._owner.pool.storage.ctx.compute()
            begin = end
        return mx.array(tokens[-1:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell what was generated, or is said next: later conversations may share it once it is evaluated."""
        self._session.extend(tokens)

    def close(self, keep: bool = True) -> None:
        """End the conversation; what the cache holds of it stays for others, unless ``keep`` is False."""
        self._owner.pool.sequences.undo_unwritten()
        self._session.close(keep)
        self._owner.pool.sequences.current = None
        self._rows.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep=error is None)


class MLXPrefixCache(Closing):
    """A ``kvcache.PrefixCache`` for a model of mlx-lm, sliding and hybrid ones included.

    Every conversation is a prompt cache of one row; as many as ``max_sequences`` may be open. Its pages are
    those of ``CausalCache``: what transformers, vLLM or the engine stored of a model is found here.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int = 4,
        capacity: int = 4096,
        dtype: CacheDType | None = None,
        rollback: int = 64,
        backend: ml.Backend | None = None,
        **options: Any,
    ) -> None:
        """``options`` are PrefixCache's: ``budget``, ``tiers``, ``identity``, ``interval``, ...

        Raises NotSupportedError for layers that there is no cache for, as CachePool does.
        """
        known = [*inspect.signature(PrefixCache.__init__).parameters][2:]
        for name in options:
            if name not in known:
                raise InvalidRangeError(f"MLXPrefixCache: no option {name!r}; known: {', '.join(known)}")
        self.model = model
        self.pool = CachePool(
            model, capacity=capacity, max_sequences=max_sequences, dtype=dtype, rollback=rollback,
            backend=backend,
        )  # fmt: skip
        self.pool.sequences.give_away()
        try:
            self.prefix = PrefixCache(self.pool.cache, **options)
        except BaseException:
            self.pool.close()
            raise

    def __repr__(self) -> str:
        return f"<MLXPrefixCache of a {type(self.model).__name__}; {self.prefix!r}>"

    def begin(self, tokens: Sequence[int], salt: str = "", shared: int = 0) -> MLXSession:
        """Start a conversation with a prompt, from the longest prefix of it that is there.

        ``salt`` and ``shared`` say whose it is, as in ``PrefixCache.begin``.
        """
        self.pool.sequences.current = None
        return MLXSession(self, self.prefix.begin(tokens, salt, shared))

    def generate(
        self,
        tokens: Sequence[int],
        *,
        prefill_size: int = 512,
        salt: str = "",
        shared: int = 0,
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """As mlx-lm's ``generate_step``, for one conversation, from what is there; ``options`` are its own.

        Yields tokens with their log-probabilities. What was yielded is kept, wherever the caller stops.
        """
        if "prompt_cache" in options:
            raise InvalidRangeError("generate: prompt_cache is given; the MLXPrefixCache passes its own")
        session, keep = self.begin(tokens, salt, shared), False
        said: list[int] = []
        try:
            last = session.prefill(prefill_size)
            for token, logprobs in generate_step(
                last, self.model, prompt_cache=session.prompt_cache, **options
            ):
                said.append(int(token))
                yield int(token), logprobs
            keep = True
        except GeneratorExit:  # the caller has heard enough
            keep = True
            raise
        finally:
            if keep:
                session.extend(said)
            session.close(keep)

    def close(self) -> None:
        """Close all conversations, write what is kept to the stores, and drop the caches."""
        self.prefix.close()
        self.pool.close()
