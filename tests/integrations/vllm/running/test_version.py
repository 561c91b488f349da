from __future__ import annotations

from kvcache.integrations.vllm.versions import installed_version

from ...documented import documented


def test_what_runs_is_what_the_docs_say_was_run() -> None:
    assert installed_version() == documented("vllm")
