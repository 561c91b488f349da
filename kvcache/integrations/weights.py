"""Detects whether the weights of a model have changed since the kept tokens were computed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence

from kvcache.stores import compose

__all__ = ["SAMPLES", "Marks", "WatchedWeights"]

SAMPLES = 16
"""The number of sampled elements of each tensor."""
Marks = Sequence[tuple[object, ...]]
"""Marks of changes in some tensors: their objects, versions, and a few elements of each."""


class WatchedWeights:
    """Detects changed weights by their ``Marks``, in negligible time. An adapter is identified by a digest of
    its content, computed when its marks change, so that a reloaded adapter is recognized under any name.
    Other changed weights get a unique name.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        """The version of the weights outside adapters; None: the original ones."""
        self._marks: Marks | None = None
        self._digests: dict[str, tuple[Marks, str]] = {}

    def look(self, marks: Marks) -> None:
        """Compare the weights outside adapters with the last check."""
        if self._marks is not None and marks != self._marks:
            self.version = secrets.token_hex(16)
        self._marks = marks

    def forget(self, adapters: Collection[str]) -> None:
        """Forget all other adapters."""
        self._digests = {name: known for name, known in self._digests.items() if name in adapters}

    def digest(self, adapter: str, marks: Marks, content: Callable[[], Iterable[tuple[str, bytes]]]) -> str:
        """The digest of an adapter's tensors; ``content`` is a description and the bytes of each."""
        known = self._digests.get(adapter)
        if known is None or known[0] != marks:
            total = hashlib.sha256()
            for what, data in content():
                total.update(compose(what, len(data)))
                total.update(data)
            known = self._digests[adapter] = marks, total.hexdigest()
        return known[1]
