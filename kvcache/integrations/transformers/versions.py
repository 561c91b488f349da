"""The supported versions of transformers; importing this module refuses older ones."""

from __future__ import annotations

import re

import transformers

from kvcache import NotSupportedError

__all__ = ["check_version"]

OLDEST = (5, 19)
"""See docs/versions.md."""


def check_version(version: str) -> None:
    """Raise NotSupportedError for a version of transformers whose configs describe layers differently."""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NotSupportedError(
            f"kvcache.integrations.transformers: transformers {version}; at least {oldest} is needed: "
            f"pip install 'transformers>={oldest}'"
        )


check_version(transformers.__version__)
