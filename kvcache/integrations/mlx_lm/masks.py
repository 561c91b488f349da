"""What queries see beside the tokens that mlx-lm's RotatingKVCache keeps."""

from __future__ import annotations

import numpy as np

__all__ = ["seen_beside_kept"]


def seen_beside_kept(
    read: np.ndarray, queries: np.ndarray, before: int, max_size: int, keep: int
) -> np.ndarray:
    """BOOL (queries, read): which of the positions ``read`` (-1: no token) queries at ``queries`` see. The
    first tokens stay visible as in mlx-lm's RotatingKVCache(max_size, keep). ``before`` is the number of
    tokens before the pass. The positions may be in any order, and include more than mlx-lm's cache stores.

    In mlx-lm, a pass of several tokens reads the first ``keep`` tokens, the last ``max_size - 1 - keep``
    before it and its own, in this order, and a query sees the last ``max_size`` of these columns up to
    itself. So later queries of a pass do not see the first tokens, but the next pass does; the last token of
    a prompt, which ``generate`` evaluates separately, sees them. ``max_size`` 7, ``keep`` 2, the tokens at 20
    to 23::

        column    0  1  2  3  4  5  6  7  8  9
        position  0  1 16 17 18 19 20 21 22 23
        at 20     x  x  x  x  x  x  x                 as a pass of one token
        at 21     .  x  x  x  x  x  x  x
        at 23     .  .  .  x  x  x  x  x  x  x

    Source: mlx_lm/models/cache.py (``_update_concat``, ``make_mask``) of mlx-lm 0.32.2.
    """
    lowest = max(keep, before - (max_size - 1 - keep))
    there = (read >= lowest) | ((read >= 0) & (read < keep))
    columns, own = (np.where(x < keep, x, x - lowest + keep) for x in (read, queries[:, None]))
    seen: np.ndarray = there & (columns <= own) & (columns > own - max_size)
    return seen
