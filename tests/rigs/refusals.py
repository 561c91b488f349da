"""A table of refusals: by the error that is raised, how its message begins and the call that is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

Table = Mapping[Any, Mapping[str, Callable[..., object]]]


def refuses(table: Table) -> pytest.MarkDecorator:
    """The test takes ``error``, ``says`` and ``call`` of each row, and hands them to ``check_refused``."""
    rows = [(error, says, call) for error, calls in table.items() for says, call in calls.items()]
    return pytest.mark.parametrize(("error", "says", "call"), rows, ids=[says for _, says, _ in rows])


def check_refused(error: type[Exception], says: str, call: Callable[..., object], *given: Any) -> None:
    with pytest.raises(error, match=f"^{re.escape(says)}"):
        call(*given)
