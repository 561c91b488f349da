"""Reporting of errors, warnings and Ctrl-C on stderr, and the exit codes."""

from __future__ import annotations

import contextlib
import errno
import logging
import traceback
from collections.abc import Iterator

import typer

import ml
from kvcache_engine.command.exit_codes import INTERRUPTED

__all__ = ["one_line", "reported"]

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def one_line(text: object) -> str:
    return " ".join(str(text).split())


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Errors as one line on stderr and exit code 1; Ctrl-C as a short message and 130; warnings as a line."""
    try:
        with _warnings_told(debug):
            yield
    except KeyboardInterrupt as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"kvcache: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"kvcache: {_told(error)}", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _warnings_told(debug: bool) -> Iterator[None]:
    """Print the library's log from level WARNING on, one line each on stderr, with tracebacks for
    ``debug``.
    """

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                typer.echo(f"kvcache: {one_line(record.getMessage())}", err=True)
                if debug and record.exc_info:
                    traceback.print_exception(record.exc_info[1])

    handler, log = Lines(logging.WARNING), logging.getLogger("kvcache")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _told(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM:
        return f"the output cannot be written ({error.strerror})"
    if isinstance(error, ml.MLError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({text})' if text else ''}; use a smaller --capacity or a narrower --dtype"
    return f"{type(error).__name__}: {text}; --debug shows the traceback"
