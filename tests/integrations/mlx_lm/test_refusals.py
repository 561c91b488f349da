"""What CachePool and the entries of its prompt caches refuse: a table of calls for each.

What takes more than a call to refuse is in the files of its subject.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import ml
from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm import (
    Attention,
    CachePool,
    adopt,
    install,
    make_prompt_cache,
    rewind,
)
from kvcache.integrations.mlx_lm.storage import PoolOptions

from ...rigs import mlx_lm_models as models
from ...rigs.refusals import Table, check_refused, refuses

MAKING: Table = {
    InvalidRangeError: {
        "CachePool: model is a str; it must be the model": lambda model: CachePool("model"),
        "CachePool: model is a str; it must": lambda model: make_prompt_cache("model"),
        "CachePool: model is a str;": lambda model: install("model"),
        "CachePool: no option 'max_size'; known: capacity, ": lambda model: CachePool(model, max_size=16),
        "make_prompt_cache: no option 'max_size'; known": lambda model: make_prompt_cache(model, max_size=16),
        "CachePool: capacity=0; it must be": lambda model: CachePool(model, capacity=0),
        "CachePool: rollback=-1; it must be": lambda model: CachePool(model, rollback=-1),
        "CachePool: max_sequences=0; it must be": lambda model: CachePool(model, max_sequences=0),
        "put: head_dim 16 in a cache of AFFINE8_64, whose blocks are 64 values": lambda model: CachePool(
            model, capacity=64, dtype="AFFINE8_64"
        ),
        "make_prompt_cache: max_kv_size=4; it must be": lambda model: make_prompt_cache(model, max_kv_size=4),
        "make_prompt_cache: max_kv_size=7.5; it": lambda model: make_prompt_cache(model, max_kv_size=7.5),
        "CachePool: max_kv_size=8 with a list of layers; set it in the layers": lambda model: CachePool(
            [Attention()], max_kv_size=8
        ),
    },
    NotSupportedError: {
        "make_prompt_cache: max_kv_size=32; this model's make_cache decides": lambda model: make_prompt_cache(
            models.shared("gemma"), max_kv_size=32
        ),
    },
}
ENTRIES: Table = {
    InvalidRangeError: {
        "filter: True for a row; give the numbers of the rows, not a mask": lambda c: c[0].filter(
            mx.array([True])
        ),
        "filter: row 3; the prompt cache has 1": lambda c: c[0].filter([0, 3]),
        "filter: row -4; the prompt cache has 1": lambda c: c[0].filter([-4]),
        "extract: row 3; the prompt cache has 1": lambda c: c[0].extract(3),
        "extract: True for a row; give the numbers": lambda c: c[0].extract(True),
        "rewind: position 1000; the prompt cache has 3 tokens": lambda c: rewind(c, 1000),
        "rewind: position=-1; it must be": lambda c: rewind(c, -1),
    },
    NotSupportedError: {
        "state: a KVCache of a CachePool is not made from one; adopt(prompt_cache, pool)": lambda c: type(
            c[0]
        ).from_state(c[0].state),
        "state: a KVCache of a CachePool is not made from one;": lambda c: setattr(c[0], "state", c[0].state),
        "keys: ": lambda c: setattr(c[0], "keys", c[0].keys),
        "values: ": lambda c: setattr(c[0], "values", c[0].values),
        "merge: the prompt caches come from different pools; those in one batch": lambda c: c[0].merge(
            [c[0], make_prompt_cache(models.shared("llama"), capacity=16)[0]]
        ),
    },
}
POOLS: Table = {
    InvalidRangeError: {
        "adopt: 3 entries for a model of 2 layers": lambda p: adopt(
            own_prompt_cache(models.shared("gemma")), p
        ),
        "adopt: tokens=3 of a prompt cache that holds 0": lambda p: adopt(
            own_prompt_cache(models.shared("llama")), p, tokens=3
        ),
    },
    NotSupportedError: {
        "adopt: entry 0 is of a CachePool already; copy.deepcopy": lambda p: adopt(p.make_prompt_cache(), p),
    },
    ml.NotSupportedError: {
        "pickle: backend 'mlx' cannot be pickled": pickle.dumps,
        "pickle: backend 'mlx' cannot": copy.deepcopy,
    },
}


@refuses(MAKING)
def test_what_no_pool_is_made_of_is_refused(error: Any, says: str, call: Any) -> None:
    check_refused(error, says, call, models.shared("llama"))


@refuses(ENTRIES)
def test_a_prompt_cache_refuses(error: Any, says: str, call: Any) -> None:
    model, tokens = models.shared("llama"), models.prompt_of(3)
    cache = CachePool(model, capacity=32).make_prompt_cache()
    model(mx.array([tokens]), cache=cache)
    check_refused(error, says, call, cache)
    assert models.greedy(model, [5], 3, cache) == models.greedy(
        model, [*tokens, 5], 3, own_prompt_cache(model)
    )


@refuses(POOLS)
def test_a_pool_refuses(error: Any, says: str, call: Any) -> None:
    pool = CachePool(models.shared("llama"), capacity=32, max_sequences=3)
    check_refused(error, says, call, pool)
    assert pool.free_sequences == 3


@pytest.mark.parametrize("number", [np.int64, np.uint8])
def test_sizes_given_as_numbers_of_numpy_are_ints(number: Any) -> None:
    given = {name: number(100) for name in ("capacity", "max_sequences", "rollback", "max_batch")}
    options = PoolOptions.of("CachePool", given)
    assert {type(getattr(options, name)) for name in given} == {int}
