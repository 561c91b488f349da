"""Reading prompts from the command line, files, and standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache_engine.errors import RequestError

__all__ = ["STDIN", "gathered", "text_or_stdin"]

STDIN = "-"
"""The name of standard input, as a prompt or as a file."""


def gathered(texts: Sequence[str], files: Sequence[Path], lines: Sequence[Path]) -> list[str]:
    """``texts``, then each whole file of ``files``, then every non-blank line of ``lines``. Lines end at line
    feeds, as for other commands: a form feed or U+2028 is part of a prompt. Without any of these, standard
    input is the prompt unless it is a terminal. Trailing line ends of a file are removed. Empty if there is
    no prompt. Raises RequestError for unreadable files, standard input named twice, and a file without text.
    """
    named = [*texts, *map(str, files), *map(str, lines)]
    if named.count(STDIN) > 1:
        raise RequestError("prompt: '-' is given more than once, but standard input can be read only once")
    if not named:
        if sys.stdin.isatty():
            return []
        text = _read(STDIN)
        return [text] if text.strip() else []
    prompts = [text_or_stdin(text) for text in texts]
    prompts += [_read_some(path) for path in files]
    for path in lines:
        prompts += [line for line in _read_some(path).split("\n") if line.strip()]
    return prompts


def text_or_stdin(text: str) -> str:
    """The text itself; for "-" the text of standard input."""
    return _read_some(Path(STDIN)) if text == STDIN else text


def _read_some(path: Path) -> str:
    text = _read(str(path))
    if not text.strip():
        raise RequestError(f"prompt: {_name(str(path))} is empty")
    return text


def _read(name: str) -> str:
    try:
        if name == STDIN:
            text = sys.stdin.read()
        else:
            text = Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt: {_name(name)} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise RequestError(f"prompt: {name}: cannot be read ({error.strerror or error})") from error
    return text.removeprefix("\ufeff").rstrip("\r\n")  # a byte order mark is not text


def _name(name: str) -> str:
    return "standard input" if name == STDIN else name
