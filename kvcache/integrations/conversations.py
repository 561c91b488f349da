"""What the caches of runtimes have in common: names of options, and conversations over a PrefixCache."""

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
from kvcache.cache import ClosedError, InvalidRangeError, NotSupportedError, OrderError, check_whole
from kvcache.prefix.options import PrefixOptions
from kvcache.prefix.prefix_cache import PrefixCache, PrefixStats, Session
from kvcache.snapshots.layer_shapes import Layers
from kvcache.stores.closing import Closing

__all__ = [
    "MOST_DRAFTS", "Conversation", "SharedPrefixes", "check_known", "check_missing", "invariant_config",
    "names_of", "prefix_options",
]  # fmt: skip

MOST_DRAFTS = 64
"""Drafted tokens behind the last one of a prompt that are taken for drafts."""


_FIELDS = [field.name for field in fields(PrefixOptions)]


def names_of(*inits: Callable[..., Any]) -> list[str]:
    """The options of constructors: the parameters behind their first two, ``**options`` left out."""
    found = [list(inspect.signature(init).parameters.values())[2:] for init in inits]
    return [one.name for each in found for one in each if one.kind is not one.VAR_KEYWORD]


def check_known(
    op: str,
    options: Collection[str],
    known: Collection[str],
    theirs: Mapping[str, str] | None = None,
    error: type[Exception] = InvalidRangeError,
) -> None:
    """Raise ``error`` for an option that is not known; ``theirs``: a runtime's, by our names."""
    for name in options:
        if name not in known:
            other = (theirs or {}).get(name)
            similar = "".join(f"; do you mean {one!r}?" for one in difflib.get_close_matches(name, known, 1))
            listed = f"known: {', '.join(known)}{similar}"
            remedy = f"it is called {other} here" if other in known else listed
            raise error(f"{op}: no option {name!r}; {remedy}")


def check_missing(op: str, prompt: int, held: int, count: int, drafts: int = 0) -> None:
    """Refuse a pass over tokens that a conversation's cache has already: OrderError.

    The conversation was begun with ``prompt`` tokens (0: not known), of which the cache has ``held``. A pass
    may end the prompt, and ``drafts`` tokens may follow its last one.
    """
    most = drafts + 1 if held == prompt - 1 else prompt - held
    if held < prompt and count > most:
        raise OrderError(
            f"{op}: {count} tokens from position {held} on, in a conversation of {prompt} tokens; give the "
            f"model only what is missing, session.remaining ({prompt - held}; prefill returns or leaves the "
            "last one); extend the session before a further turn"
        )


class Conversation:
    """One conversation, of whose prompt ``cached`` tokens were there."""

    _owner: Any
    """The SharedPrefixes that began it."""

    def __init__(self, session: Session, rows: Any, held: Callable[[], int]) -> None:
        """``rows`` are the runtime's, which ``held`` tokens of the conversation are in."""
        self._session, self._rows, self._held = session, rows, held
        self.cached = session.cached
        rows.prompt = len(session.tokens)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}; {self._session!r}>"

    @property
    def lock(self) -> Any:
        """That of the SharedPrefixes: held by the thread whose call is made."""
        return self._owner.lock

    @property
    def tokens(self) -> list[int]:
        """The prompt and all tokens that were added."""
        tokens: list[Any] = list(self._session.tokens)
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell what was generated, or is said next: later conversations may share it once it is evaluated."""
        with self.lock:
            self._owner.check_ids("extend", tokens)
            self._session.extend(tokens)
            self._rows.prompt = len(self._session.tokens)

    @property
    def remaining(self) -> list[int]:
        """The tokens to evaluate next: of the prompt, and of ``extend``, what the cache lacks."""
        return self.tokens[self._held() :]

    def _parts(self, size: int) -> Iterator[tuple[int, int]]:
        """Where the parts of ``remaining`` but its last token begin and end, for a pass each.

        They have at most ``size`` tokens, and end where a snapshot is due. What was evaluated before a part
        is whole, whatever comes next.
        """
        check_whole("prefill", "size", size, least=1)
        session = self._session
        if session.closed:
            raise ClosedError(
                "prefill: the conversation is closed; begin another with its tokens, and prefill that before "
                "it is closed"
            )
        begin = self._held()
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
        """Lets go of the rows behind the block, in which the session ends."""
        raise NotImplementedError

    def close(self, keep: bool = True) -> None:
        """End the conversation; what the cache holds of it stays for others, unless ``keep`` is False."""
        with self.lock, self._ending():
            self._session.close(keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Left by an exception, it keeps what was evaluated by ``prefill``, or before an ``extend``."""
        with self.lock, self._ending():
            self._session.__exit__(kind, error, trace)


def prefix_options(given: Mapping[str, Any], shapes: Callable[[], Layers | None]) -> dict[str, Any]:
    """The options of a PrefixCache under a runtime: it writes through unless told not to.

    ``shapes`` finds what the model stores in each layer; it is called where no ``layers`` are given.
    """
    named = {name: value for name, value in given.items() if name in _FIELDS}
    options = PrefixOptions.of(given.get("options"), named)
    through = options.write_through is not False
    layers = shapes() if options.layers is None else options.layers
    options = replace(options, write_through=through, layers=layers)
    return {**{name: given[name] for name in given if name not in named}, "options": options}


def invariant_config(backend: ml.Backend) -> ml.CacheConfig:
    """How caches are arranged for answers that do not depend on what is cached."""
    asked: ml.CacheConfig = getattr(backend, "cache_config", ml.CacheConfig)()
    return replace(asked, batch_invariant=True)


class SharedPrefixes(Closing):
    """A PrefixCache for one ``model`` of a runtime. Its calls wait for those of other threads."""

    model: Any
    prefix: PrefixCache
    lock: AbstractContextManager[object]
    """Held by the thread whose call is made."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of a {type(self.model).__name__}; {self.prefix!r}>"

    def _check_options(
        self,
        cls: type[SharedPrefixes],
        options: Mapping[str, Any],
        ranks: int,
        theirs: Mapping[str, str] | None = None,
        error: type[Exception] = InvalidRangeError,
    ) -> None:
        """Refuse what is no option of ``cls`` or PrefixCache, and tiers of a model that is split over ranks.

        Each rank has other heads under the same keys, and a tier may give one of them more than another.
        """
        op, known = cls.__name__, [*names_of(cls.__init__, PrefixCache.__init__), *_FIELDS]
        check_known(op, options, known, theirs, error)
        if ranks > 1 and options.get("tiers"):
            raise NotSupportedError(
                f"{op}: tiers= of a model split over {ranks} ranks, whose heads differ under the same keys; "
                "leave tiers= out, or use kvcache_engine.Engine on a model loaded with group="
            )

    def vocabulary(self) -> int | None:
        """How many token ids the model's embedding has; None: not known."""
        raise NotImplementedError

    def check_open(self, op: str) -> None:
        """Raise ClosedError after ``close``."""
        if self.prefix.closed:
            raise ClosedError(f"{op}: the {type(self).__name__} is closed; make a new one")

    def check_ids(self, op: str, tokens: Sequence[int]) -> None:
        """Refuse ids that the model has no embedding of, which some devices read past its end."""
        size = self.vocabulary()
        try:
            ids = np.asarray(tokens)
        except ValueError:
            return  # the PrefixCache says what is wrong
        if size is None or ids.dtype.kind not in "iu" or not ids.size:
            return
        for id in (int(ids.min()), int(ids.max())):
            if not 0 <= id < size:
                raise InvalidRangeError(
                    f"{op}: token {id}; the model's ids are 0 to {size - 1}: does the tokenizer belong to "
                    "another model?"
                )

    @property
    def stats(self) -> PrefixStats:
        """What was asked for, and where it came from: ``reused`` of ``tokens`` were not computed again.

        The one call that waits for nobody: a server asks while answers are generated.
        """
        return self.prefix.stats

    def clear(self) -> None:
        """Discard what is kept in memory, as when the weights have changed: see ``PrefixCache.clear``."""
        with self.lock:
            self.prefix.clear()

    def flush(self) -> None:
        """Write what is kept to the stores, and wait for that."""
        with self.lock:
            self.prefix.flush()

    def write_through(self, nbytes: int | str | None = None) -> bool:
        """Have a thread write what no store has yet: see ``PrefixCache.write_through``."""
        with self.lock:
            return self.prefix.write_through(nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``close``; left by an exception, each conversation keeps what it would as a context manager."""
        with self.lock:
            try:
                self.prefix.__exit__(kind, error, trace)
            finally:
                self.close()

    def close(self) -> None:
        """Close all conversations, and write what is kept to the stores."""
        with self.lock:
            self.prefix.close()
