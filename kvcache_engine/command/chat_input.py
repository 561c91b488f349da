"""Lines for ``kvcache chat``: typed at a prompt, with history and completion, or read from a pipe."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from collections.abc import Callable
from typing import Any

from kvcache_engine.errors import RequestError

__all__ = ["Complete", "Reader", "words_of"]

Complete = Callable[[str, str], list[str]]
"""(line before the word, word) -> its completions."""
LEAVES = "\n/quit or Ctrl-D leaves"


class Reader:
    """``read`` returns the next line, and None at the end."""

    def __init__(self, complete: Complete, say: Callable[[str], None]) -> None:
        self.typed = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):  # invalid bytes are refused line by line
            sys.stdin.reconfigure(errors="surrogateescape")
        self._say = say
        self._complete = complete
        self._completions: list[str] = []
        self._editor = _editor() if self.typed else None
        if self._editor is not None:
            self._editor.set_completer_delims(" \t")
            self._editor.set_completer(self._offer)
            libedit = "libedit" in (self._editor.__doc__ or "")
            self._editor.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")

    def read(self, prompt: str) -> str | None:
        if not self.typed:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                return input(prompt)
            except EOFError:
                return None
            except KeyboardInterrupt:
                self._say(LEAVES)

    def _offer(self, word: str, index: int) -> str | None:
        """readline's interface: completion number ``state`` of a word, None after the last."""
        if index == 0:
            assert self._editor is not None
            before = self._editor.get_line_buffer()[: self._editor.get_begidx()]
            self._completions = []
            with contextlib.suppress(Exception):  # readline would print errors into the line
                self._completions = self._complete(before, word)
        return self._completions[index] if index < len(self._completions) else None


def _editor() -> Any:
    """The readline module, which provides history and editing for ``input``; None if there is none."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def words_of(line: str) -> list[str]:
    """The words of a command without its slash; quotes allow spaces in file names. Raises RequestError for an
    unclosed quote.
    """
    if '"' not in line and "'" not in line:
        return line.split()
    try:
        return shlex.split(line)
    except ValueError:
        raise RequestError(f"/{line}: the quotation mark is not closed") from None
