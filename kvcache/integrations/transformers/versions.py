"""Which versions of transformers this package works with: to import this module refuses older ones."""

from __future__ import annotations

import re

from kvcache import NotSupportedError

try:
    import torch  # noqa: F401
    import transformers
except ImportError as error:
    raise ImportError(
        "kvcache.integrations.transformers needs transformers and PyTorch: "
        f"pip install 'ml-kvcache[transformers]' ({error})",
        name=error.name,
    ) from error

__all__ = ["check_version"]

OLDEST = (5, 19)
"""See docs/versions.md."""


def check_version(version: str) -> None:
    """Raise NotSupportedError for a version of transformers whose configs say otherwise what layers keep."""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NotSupportedError(
            f"kvcache.integrations.transformers: transformers {version}; at least {oldest} is needed: "
            f"pip install 'transformers>={oldest}'"
        )


check_version(transformers.__version__)
