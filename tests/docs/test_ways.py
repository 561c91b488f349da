"""The files that docs/concepts.md lists for a token's way are those through which it goes."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache import Batch, CausalCache, PrefixCache

from ..rigs.each_backend import need_backend

ROOT = Path(__file__).parents[2]
GEOMETRY = {"backends/torch/tensor.py", "ml/base/backend.py"}
"""What wraps an array into a tensor."""


def listed(step: str) -> set[str]:
    """The files of a row, from the root of the project."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `?{step}`? \| (.*) \|$", page, re.MULTILINE)
    found: set[str] = set()
    for path in re.findall(r"`([^`]+)`", row):
        before, names, after = re.fullmatch(r"([^{]*)(?:\{(.*)\})?(.*)", path).groups()  # type: ignore[union-attr]
        each = [f"{before}{name}{after}" for name in (names or "").split(",")]
        found |= {name if name.startswith("backends/") else f"kvcache/{name}" for name in each}
    return found


@contextmanager
def traced() -> Iterator[set[str]]:
    """The project's files whose functions are called meanwhile, by any thread that begins or goes on."""
    found: set[str] = set()

    def trace(frame: Any, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            found.add(path.relative_to(ROOT).as_posix())

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def test_a_decoded_token_passes_these_files_and_no_others() -> None:
    """In a layer after the first, which has prepared the calls."""
    pytest.importorskip("numba")
    need_backend("torch")
    with ml.open_backend("torch") as backend, backend.new_context() as ctx:
        cache = CausalCache()
        cache.init(backend, ml.DType.F32, 1, 64, 16)
        key, query = ctx.zeros((1, 2, 16), ml.DType.F32), ctx.zeros((1, 4, 16), ml.DType.F32)
        for position, layer in itertools.product(range(3), range(2)):
            if not layer:
                cache.start_forward(ctx, Batch([position], [0]))
            cache.set_layer(layer)
            with traced() as put:
                cache.put(ctx, key, key)
            with traced() as attend:
                cache.attend(ctx, query, 0.25)
        cache.close()
    here = {Path(__file__).relative_to(ROOT).as_posix()}
    assert put - here == listed("put")
    assert attend - here - GEOMETRY == listed("attend")
    assert len((put | attend) - here - GEOMETRY) <= 6


def test_a_page_out_and_a_restore_pass_these_files(tmp_path: Path) -> None:
    with ml.open_backend("numpy") as backend:
        for step in ("page-out", "restore"):
            cache = CausalCache()
            cache.init(backend, ml.DType.F32, 1, 64, 16)
            with PrefixCache(cache, 0, [tmp_path], identity={"model": "m"}, block_size=8) as prefix:
                with traced() as found, backend.new_context() as ctx:
                    session = prefix.begin(range(1, 17))
                    if not session.cached:
                        cache.start_forward(ctx, Batch(range(16), [session.seq] * 16))
                        cache.set_layer(0)
                        key = ctx.zeros((16, 1, 8), ml.DType.F32)
                        cache.put(ctx, key, key)
                    session.close()
                    prefix.flush()
                assert listed(step) <= found
            cache.close()
