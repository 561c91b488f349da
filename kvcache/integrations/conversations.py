"""Shared by the caches for all runtimes: names of options, and conversations over a PrefixCache."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

import ml
from kvcache import LayerShape, PrefixCache, PrefixOptions, PrefixStats, Session
from kvcache.cache import ClosedError, InvalidRangeError, NotSupportedError, OrderError, check_whole
from kvcache.stores import Closing

__all__ = [
    "MOST_DRAFTS", "Conversation", "LayerShapes", "SharedPrefixes", "check_known", "check_missing",
    "invariant_config", "names_of", "prefix_options", "show_options",
]  # fmt: skip

MOST_DRAFTS = 64
"""The most tokens after the end of a prompt that count as drafts."""


LayerShapes = Mapping[int, LayerShape]
"""By layer, what a model stores of a token."""
_FIELDS = [field.name for field in fields(PrefixOptions)]


def names_of(*inits: Callable[..., Any]) -> list[str]:
    """The options of constructors: their parameters after the first two, without ``**options``."""
    parameters = [list(inspect.signature(init).parameters.values())[2:] for init in inits]
    return [one.name for each in parameters for one in each if one.kind is not one.VAR_KEYWORD]


def show_options(shown: Callable[..., Any], first: str, options: Callable[..., Any]) -> None:
    """Make help and completion of ``shown`` list the parameters of ``options`` by name, after ``first``."""
    parameters = [
        inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(one.replace(kind=one.KEYWORD_ONLY) for one in inspect.signature(options).parameters.values()),
    ]
    setattr(shown, "__signature__", inspect.Signature(parameters))  # noqa: B010


def check_known(
    op: str,
    options: Collection[str],
    known: Collection[str],
    theirs: Mapping[str, str] | None = None,
    error: type[Exception] = InvalidRangeError,
) -> None:
    """Raise ``error`` for an unknown option; ``theirs`` maps our names to a runtime's."""
    for name in options:
        if name not in known:
            other = (theirs or {}).get(name)
            similar = "".join(f"; do you mean {one!r}?" for one in difflib.get_close_matches(name, known, 1))
            listed = f"known: {', '.join(known)}{similar}"
            remedy = f"it is called {other} here" if other in known else listed
            raise error(f"{op}: no option {name!r}; {remedy}")


def check_missing(op: str, prompt: int, stored: int, count: int, drafts: int = 0) -> None:
    """Raise OrderError for a pass over tokens that a conversation's cache already has.

    The conversation began with ``prompt`` tokens (0: unknown), and the cache has ``stored``. A pass may
    complete the prompt, and up to ``drafts`` tokens may follow it.
    """
    most = drafts + 1 if stored == prompt - 1 else prompt - stored
    if stored < prompt and count > most:
        raise OrderError(
            f"{op}: {count} tokens from position {stored} on, in a conversation of {prompt} tokens; give "
            f"the model only what is missing, session.remaining ({prompt - stored}; prefill returns or "
            "leaves the last one); extend the session before a further turn"
        )


class Conversation:
    """One conversation; ``cached`` tokens of its prompt were found in the cache."""

    _owner: Any
    """The SharedPrefixes that created it."""

    def __init__(self, session: Session, rows: Any, stored_tokens: Callable[[], int]) -> None:
        """``rows`` are the runtime's, and contain ``stored_tokens()`` tokens of the conversation."""
        self._session, self._rows, self._stored_tokens = session, rows, stored_tokens
        self.cached = session.cached
        rows.prompt = len(session.tokens)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}; {self._session!r}>"

    @property
    def lock(self) -> Any:
        """The lock of the SharedPrefixes, held during each call."""
        return self._owner.lock

    @property
    def tokens(self) -> list[int]:
        """The prompt and all tokens that were added."""
        tokens: list[Any] = list(self._session.tokens)
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append generated tokens or the next turn; later conversations may share them once they are
        evaluated.
        """
        with self.lock:
            self._session.extend(self._owner.check_ids("extend", tokens))
            self._rows.prompt = len(self._session.tokens)

    @property
    def remaining(self) -> list[int]:
        """The tokens to evaluate next: those of the prompt and of ``extend`` that the cache lacks."""
        return self.tokens[self._stored_tokens() :]

    def _parts(self, size: int) -> Iterator[tuple[int, int]]:
        """(begin, end) of each part of ``remaining`` without its last token; each part is one pass. A part
        has at most ``size`` tokens and ends where a snapshot is due. If a part fails, the earlier ones remain
        valid.
        """
        check_whole("prefill", "size", size, least=1)
        session = self._session
        if session.closed:
            raise ClosedError(
                "prefill: the conversation is closed; begin another with its tokens, and prefill that before "
                "it is closed"
            )
        begin = self._stored_tokens()
        session.extend([])
        last = len(session.tokens) - 1
        while begin < last:
            cut, due = session.next_cut(begin), self._owner.prefix.next_snapshot(session.seq)
            end = min(begin + size if cut is None else cut, last)
            if due is not None and begin < due < end:
                end = due
            yield begin, end
            session.extend([])
            begin = end

    def _ending(self) -> AbstractContextManager[object]:
        """Release the rows after the block, in which the session ends."""
        raise NotImplementedError

    def close(self, keep: bool = True) -> None:
        """End the conversation; others can reuse its cached tokens, unless ``keep`` is False."""
        with self.lock, self._ending():
            self._session.close(keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an exception, the cache keeps what ``prefill`` evaluated, and what was evaluated before an
        ``extend``.
        """
        with self.lock, self._ending():
            self._session.__exit__(kind, error, trace)


def prefix_options(passed: Mapping[str, Any], shapes: Callable[[], LayerShapes | None]) -> dict[str, Any]:
    """The options of a PrefixCache under a runtime, where write-through is the default. ``shapes`` returns
    what the model stores in each layer; it is called if there is no option ``layers``.
    """
    named = {name: value for name, value in passed.items() if name in _FIELDS}
    options = PrefixOptions.of(passed.get("options"), named)
    through = options.write_through is not False
    layers = shapes() if options.layers is None else options.layers
    options = replace(options, write_through=through, layers=layers)
    return {**{name: passed[name] for name in passed if name not in named}, "options": options}


def invariant_config(backend: ml.Backend) -> ml.CacheConfig:
    """The configuration of caches for answers that do not depend on the cache's content."""
    asked: ml.CacheConfig = getattr(backend, "cache_config", ml.CacheConfig)()
    return replace(asked, batch_invariant=True)


class SharedPrefixes(Closing):
    """A PrefixCache for one ``model`` of a runtime. Calls from several threads wait for one another."""

    model: Any
    prefix: PrefixCache
    lock: AbstractContextManager[object]
    """Held during each call."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of a {type(self.model).__name__}; {self.prefix!r}>"

    def _check_options(
        self,
        cls: type[SharedPrefixes],
        options: Mapping[str, Any],
        of_caches: Sequence[str],
        ranks: int,
        theirs: Mapping[str, str] | None = None,
        error: type[Exception] = InvalidRangeError,
    ) -> None:
        """Refuse options other than those of ``cls``, ``of_caches`` and a PrefixCache, and tiers for a model
        that is split over ranks. Ranks store different heads under the same keys, and a tier may have more
        for one rank than for another.
        """
        op, own = cls.__name__, names_of(cls.__init__)
        known = [*own, *of_caches, *names_of(PrefixCache.__init__), *_FIELDS]
        check_known(op, options, known, theirs, error)
        if ranks > 1 and options.get("tiers"):
            raise NotSupportedError(
                f"{op}: tiers= of a model split over {ranks} ranks, whose heads differ under the same keys; "
                "omit tiers=, or use kvcache_engine.Engine on a model loaded with group="
            )

    def vocabulary(self) -> int | None:
        """How many token ids the model's embedding has; None: not known."""
        raise NotImplementedError

    def check_open(self, op: str) -> None:
        """Raise ClosedError after ``close``."""
        if self.prefix.closed:
            raise ClosedError(f"{op}: the {type(self).__name__} is closed; make a new one")

    def check_ids(self, op: str, tokens: Any) -> Any:
        """The tokens, converted once if they are ids. Refuses ids that the model has no embedding of, which
        some devices read past its end.
        """
        size = self.vocabulary()
        try:
            ids = np.asarray(tokens)
        except ValueError:
            return tokens  # the PrefixCache says what is wrong
        if size is None or ids.dtype.kind not in "iu" or not ids.size:
            return tokens
        for id in (int(ids.min()), int(ids.max())):
            if not 0 <= id < size:
                raise InvalidRangeError(
                    f"{op}: token {id}; the model's ids are 0 to {size - 1}: does the tokenizer belong to "
                    "another model?"
                )
        return ids

    @property
    def stats(self) -> PrefixStats:
        """Counts of requested tokens and their origin: ``reused`` of ``tokens`` were not computed again. The
        only call that does not wait for the lock, so that a server can poll it while generating.
        """
        return self.prefix.stats

    def clear(self) -> None:
        """Discard everything kept in memory, for example after the weights have changed: see
        ``PrefixCache.clear``.
        """
        with self.lock:
            self.prefix.clear()

    def flush(self) -> None:
        """Write everything kept to the stores, and wait until it is written."""
        with self.lock:
            self.prefix.flush()

    def write_through(self, nbytes: int | str | None = None) -> bool:
        """Start writing entries that no store has yet, in a thread: see ``PrefixCache.write_through``."""
        with self.lock:
            return self.prefix.write_through(nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``close``; after an exception, each conversation keeps what it would keep as a context
        manager.
        """
        with self.lock:
            try:
                self.prefix.__exit__(kind, error, trace)
            finally:
                self.close()

    def close(self) -> None:
        """Close all conversations, and write everything kept to the stores."""
        with self.lock:
            self.prefix.close()
