"""Pictures for rich: a panel, and one that follows a cache while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.text import Text

from kvcache.cache import ClosedError
from kvcache.views.colors import rich_style
from kvcache.views.text import Line

if TYPE_CHECKING:
    from rich.console import RenderableType


class Drawn:
    """Lines for the width that the console has for them."""

    def __init__(self, lines: Callable[[int], list[Line]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self._lines(options.max_width):
            text = Text(no_wrap=True, overflow="crop", end="\n")
            for span, style in line:  # Text, and not markup: what tokens say is never interpreted
                text.append(span, rich_style(style))
            yield text


class Shown(Protocol):
    """A picture."""

    def lines(self, width: int) -> list[Line]: ...


class Watched:
    """Draws anew whenever it is shown: ``Live(Watched(lambda: render(prefix)))`` follows a PrefixCache.

    ``take`` gives the picture of the moment. Once the cache is closed, the last one stays. Draw where the
    cache is used, between its calls: a look from another thread may find it in the middle of a change
    (``Live(..., auto_refresh=False)`` and ``refresh()`` see to that).
    """

    def __init__(self, take: Callable[[], Shown]) -> None:
        self._take = take
        self._last = take()

    def __rich__(self) -> RenderableType:
        with contextlib.suppress(ClosedError):
            self._last = self._take()
        return Drawn(self._last.lines)


class Beneath:
    """Text as it comes, and below it a picture that follows; the last one stays below the whole text.

    Whole lines are printed above the live part, so that a long text scrolls as any other output does.
    """

    def __init__(self, take: Callable[[], Shown], console: Console) -> None:
        self._console = console
        self._watched = Watched(take)
        self._line = ""
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        self._live.update(self._watched, refresh=True)
        return self

    def write(self, text: str) -> None:
        """Add ``text``, and draw the picture anew."""
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._console.print(Text(line))
        self._live.update(Group(Text(self._line), self._watched), refresh=True)

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._line:
            self._console.print(Text(self._line), end="\n" if self._console.is_terminal else "")
        if self._console.is_terminal:
            self._console.print(self._watched, end="")
