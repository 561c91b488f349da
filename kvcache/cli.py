"""Starts the ``kvcache`` command, whose parts are in kvcache.command.

This module imports without the packages of the ``cli`` extra, to say so where they are missing.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

__all__ = ["app", "main"]

MISSING = "kvcache: {name} is not installed; the command needs: pip install 'ml-kvcache[cli]'"
INTERRUPTED = 130
_EXTRA = {"click", "rich", "typer"}

app: Any  # the typer application: __getattr__ loads it when it is asked for


def main() -> None:
    """Run the command and exit: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without some character shows a "?"
            stream.reconfigure(errors="replace")
    try:
        _app()(prog_name="kvcache")
    except KeyboardInterrupt:
        print("kvcache: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)


def _app() -> Any:
    try:
        # They add theirs to the same app.
        from kvcache.command import chat, conformance, inspection, saved  # noqa: F401
        from kvcache.command.app import app
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in _EXTRA:
            raise
        print(MISSING.format(name=name), file=sys.stderr)  # noqa: T201
        sys.exit(1)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
