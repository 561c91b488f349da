"""What is closed when a ``with`` block ends."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing(abc.ABC):
    """Gives ``close`` the form of a context manager, whatever ends the block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what is held open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
