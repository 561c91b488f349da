from __future__ import annotations

from importlib.metadata import version

from ...documented import documented


def test_what_runs_is_what_the_docs_say_was_run() -> None:
    assert version("sglang") == documented("sglang")
