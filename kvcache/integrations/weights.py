"""Whether the weights of a model are still those that computed what is kept."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence

from kvcache.stores import compose

__all__ = ["SAMPLES", "Marks", "WatchedWeights"]

SAMPLES = 16
"""Elements of each tensor that are looked at each time."""
Marks = Sequence[tuple[object, ...]]
"""Of some tensors, what changes with them as a rule: their objects, versions, a few elements of each."""


class WatchedWeights:
    """Tells changed weights from those before, by their ``Marks``, in a time that no session notices.

    An adapter is known by a digest of its content, which is computed when its marks change: loaded again, it
    is found again, whatever it is called. Other weights that change get a name that nobody else has.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        """Of the weights that are no adapter's; None: those that the model was given with."""
        self._marks: Marks | None = None
        self._digests: dict[str, tuple[Marks, str]] = {}

    def look(self, marks: Marks) -> None:
        """Compare the weights that are no adapter's with the last time."""
        if self._marks is not None and marks != self._marks:
            self.version = secrets.token_hex(16)
        self._marks = marks

    def digest(self, adapter: str, marks: Marks, content: Callable[[], Iterable[tuple[str, bytes]]]) -> str:
        """Of an adapter's tensors; ``content``: what each is, and its bytes."""
        known = self._digests.get(adapter)
        if known is None or known[0] != marks:
            total = hashlib.sha256()
            for what, data in content():
                total.update(compose(what, len(data)))
                total.update(data)
            known = self._digests[adapter] = marks, total.hexdigest()
        return known[1]
