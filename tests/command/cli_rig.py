"""``kvcache`` in this process: its exit code, and what it writes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from kvcache_engine.command.app import app

__all__ = ["run"]


def run(*arguments: object, text: str | bytes = "", env: dict[str, str] | None = None) -> Any:
    """What a command line ends with; ``text`` is its standard input."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text, env=env)
