"""What conversations over a PrefixCache have in common, whatever runtime evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from kvcache.integrations.session_rules import names_of, unknown_option
from kvcache.prefix.prefix_cache import PrefixCache, PrefixStats, Session
from kvcache.stores.closing import Closing

__all__ = ["Conversation", "SharedPrefixes"]


class Conversation:
    """One conversation, of whose prompt ``cached`` tokens were there."""

    def __init__(self, session: Session, rows: Any, held: Callable[[], int]) -> None:
        """``rows`` are the runtime's, which ``held`` tokens of the conversation are in."""
        self._session, self._rows, self._held = session, rows, held
        self.cached = session.cached
        rows.prompt = len(session.tokens)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}; {self._session!r}>"

    def extend(self, tokens: Sequence[int]) -> None:
        """Tell what was generated, or is said next: later conversations may share it once it is evaluated."""
        self._session.extend(tokens)
        self._rows.prompt = len(self._session.tokens)

    @property
    def remaining(self) -> list[int]:
        """The tokens to evaluate next: of the prompt, and of ``extend``, what the cache lacks."""
        tokens: list[Any] = list(self._session.tokens)
        return tokens[self._held() :]

    def _ending(self) -> AbstractContextManager[object]:
        """Lets go of the rows behind the block, in which the session ends."""
        raise NotImplementedError

    def close(self, keep: bool = True) -> None:
        """End the conversation; what the cache holds of it stays for others, unless ``keep`` is False."""
        with self._ending():
            self._session.close(keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Left by an exception, it keeps what was evaluated by ``prefill``, or before an ``extend``."""
        with self._ending():
            self._session.__exit__(kind, error, trace)


class SharedPrefixes(Closing):
    """A PrefixCache for one ``model`` of a runtime."""

    model: Any
    prefix: PrefixCache

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of a {type(self.model).__name__}; {self.prefix!r}>"

    @classmethod
    def _wrong_option(cls, options: Collection[str], theirs: Mapping[str, str] | None = None) -> str | None:
        """What is to be said of the first option that is not known; ``theirs`` as of ``unknown_option``."""
        known = names_of(cls.__init__, PrefixCache.__init__)
        return unknown_option(cls.__name__, options, known, theirs)

    @property
    def stats(self) -> PrefixStats:
        """What was asked for, and where it came from: ``reused`` of ``tokens`` were not computed again."""
        return self.prefix.stats

    def flush(self) -> None:
        """Write what is kept to the stores, and wait for that."""
        self.prefix.flush()

    def write_through(self, nbytes: int | None = None) -> bool:
        """Have a thread write what no store has yet: see ``PrefixCache.write_through``."""
        return self.prefix.write_through(nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``close``; left by an exception, each conversation keeps what it would as a context manager."""
        try:
            self.prefix.__exit__(kind, error, trace)
        finally:
            self.close()

    def close(self) -> None:
        """Close all conversations, and write what is kept to the stores."""
        self.prefix.close()
