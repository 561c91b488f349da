"""The failures of docs/peers-caches.md in a few lines of mlx-lm alone, as one would report them.

``python -m benchmarks.peers_reports`` prints what is seen and what should be. Keys are the numbers of tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    ChunkedKVCache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)


def feed(cache: Any, *rows: Sequence[int]) -> np.ndarray:
    """Keys as (sequences, history)."""
    keys = mx.array(rows, mx.float32)[:, None, :, None]
    return np.array(cache.update_and_fetch(keys, keys)[0])[:, 0, :, 0].astype(int)


def chunked_trim() -> tuple[object, object]:
    """ChunkedKVCache.trim goes back into a chunk whose beginning maybe_trim_front has dropped."""
    cache = ChunkedKVCache(4)
    feed(cache, [1, 2, 3, 4, 5])
    cache.maybe_trim_front()
    feed(cache, [6])
    assert trim_prompt_cache([cache], 5) == 5
    return feed(cache, [7])[0].tolist(), [1, 7]


def rotating_mask_of_padding() -> tuple[object, object]:
    """BatchRotatingKVCache.make_mask goes by the order of a wrapped buffer; update_and_fetch changes it."""
    cache = BatchRotatingKVCache(5, [0, 4])
    feed(cache, [1, 2, 3, 4, 5], [0, 0, 0, 0, 6])
    feed(cache, [8], [9])
    mask = np.array(cache.make_mask(2))
    keys = feed(cache, [11, 12], [13, 14])
    return keys[1][mask[1, 0, 0]].tolist(), [6, 9, 13]


def rotating_mask_after_extend() -> tuple[object, object]:
    """The same of a sequence that BatchRotatingKVCache.extend has padded."""
    cache, other = BatchRotatingKVCache(5, [0]), BatchRotatingKVCache(5, [0])
    feed(cache, [1])
    feed(other, [2, 3, 4, 5, 6, 7, 8])
    cache.extend(other)
    feed(cache, [9], [10])
    mask = np.array(cache.make_mask(2))
    keys = feed(cache, [11, 12], [13, 14])
    return keys[0][mask[0, 0, 0]].tolist(), [1, 9, 11]


def rotating_loaded() -> tuple[object, object]:
    """BatchRotatingKVCache: load_prompt_cache sets none of the attributes that only __init__ sets."""
    cache = BatchRotatingKVCache(5, [0])
    feed(cache, [1])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "cache.safetensors"))
        save_prompt_cache(path, [cache])
        (loaded,) = load_prompt_cache(path)
    try:
        return feed(loaded, [2])[0].tolist(), [1, 2]
    except AttributeError as error:
        return repr(error), [1, 2]


REPORTS = (chunked_trim, rotating_mask_of_padding, rotating_mask_after_extend, rotating_loaded)


def main() -> None:
    print(f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}")
    for report in REPORTS:
        seen, expected = report()
        print(f"{report.__doc__}\n    {seen}, not {expected}")


if __name__ == "__main__":
    main()
