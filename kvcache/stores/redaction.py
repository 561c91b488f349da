"""URLs as they may be shown: without passwords."""

from __future__ import annotations

import re

__all__ = ["without_secrets"]

_USER = re.compile(r"//.*@", re.DOTALL)
_FIELD = re.compile(r"\b((?:\w*_)?(?:password|secret|token))=.*", re.IGNORECASE | re.DOTALL)


def without_secrets(url: str) -> str:
    """The URL with *** for what may be a user, a password or a secret; too much rather than too little."""
    return _USER.sub("//***@", _FIELD.sub(r"\1=***", url))
