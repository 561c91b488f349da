"""The slowest of 5,000 decoding steps from an empty cache of 32k on PyTorch; MLX's are with put + get."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import put_get
from benchmarks.report import Row

__all__ = ["run"]


def run(quick: bool, framework: str) -> Iterator[Row]:
    yield from put_get.tail(*put_get.opened(framework), quick)
