"""Sessions of agents in the prefix cache of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import InvalidRangeError

__all__ = ["check_that_what_only_a_closed_one_used_goes_first"]


def check_that_what_only_a_closed_one_used_goes_first(
    cache: Any, prompts: list[list[int]], say: Callable[..., Any]
) -> None:
    """Of three prompts of 24 tokens the cache has room for two; ``say(prompt, **options)`` generates."""
    for prompt, agent in zip(prompts[:2], ("one", "two"), strict=True):
        say(prompt, session_id=agent, next_use=5.0)
    with cache.lock:
        agents = cache.prefix.agent_sessions
        assert [each.session_id for each in agents.list()] == ["one", "two"]
        assert agents.close("two")
    say(prompts[2])  # which needs room
    found = []
    for prompt in prompts[:2]:
        with cache.begin(prompt) as session:
            found.append(session.cached)
            session.close(keep=False)
    assert found[0] == 23
    assert found[1] < 16
    with pytest.raises(InvalidRangeError, match="next_use"):
        cache.begin(prompts[0], session_id="one", next_use=-1.0)
    with cache.lock:
        assert agents.delete("one")
    assert agents.inspect("one") is None
