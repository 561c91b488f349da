"""What HFCache and HFStaticCache refuse: a table of calls for each, which leave their content as it was.

What takes more than a call to refuse is in the files of its subject, what prefixes refuse in test_prefix.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import numpy as np
import torch

import ml
from kvcache import InvalidRangeError, InvalidSequenceError, NotSupportedError
from kvcache.integrations.transformers import HFCache, HFStaticCache, rope_shift
from kvcache.integrations.transformers.arguments import CacheOptions, check_options

from ...rigs import hf_models as hf
from ...rigs.refusals import Table, check_refused, refuses


def put(value_dim: int = 16, rows: int = 2, layer: int = 0) -> Callable[[Any], object]:
    """K and V of one token."""
    shape = rows, 2, 1
    return lambda c: c.update(torch.zeros(*shape, 16), torch.zeros(*shape, value_dim), layer)


MAKING: Table = {
    InvalidRangeError: {
        "HFCache: config is a LlamaForCausalLM; it must be the config": lambda config: HFCache(
            hf.model("llama")
        ),
        "HFCache: capacity=0; it must be": lambda config: HFCache(config, capacity=0),
        "HFCache: lookback=-1; it must be": lambda config: HFCache(config, lookback=-1),
        "HFCache: max_sequences=0; it must be": lambda config: HFCache(config, max_sequences=0),
        "HFStaticCache: capacity=0; it must be": lambda config: HFStaticCache(config, capacity=0),
        "HFCache: no option 'capcity'; known: backend, ": lambda config: HFCache(config, capcity=3),
        "HFCache: no backend 'nope'; known: ": lambda config: HFCache(config, backend="nope"),
    },
    ml.DTypeError: {
        "HFCache: dtype='half'; it must be an ml.DType, a torch.dtype": lambda config: HFCache(
            config, dtype="half"
        ),
    },
    NotSupportedError: {
        "HFStaticCache: minimax accepts caches of a class of its own only; use HFCache": lambda config: (
            HFStaticCache(hf.model("minimax").config, capacity=8)
        ),
        "rope_shift: the position encoding of t5 is not supported": lambda config: rope_shift(
            hf.model("t5").config
        ),
    },
}
BOTH: Table = {
    InvalidRangeError: {
        "crop: cannot keep 20 tokens; the cache has 12": lambda c: c.crop(20),
        "crop: cannot take back 30 tokens; the cache has 12": lambda c: c.crop(-30),
        "update: layer 7; this cache was made for a config of 2 layers": put(layer=7),
    },
    NotSupportedError: {
        "pickle: a cache's content is in buffers of an open backend; use HFCache.save": pickle.dumps,
    },
}
GROWING: Table = {
    InvalidRangeError: {
        "HFCache: rows [] of 2; keep at least one, or call reset()": lambda c: c.batch_select_indices([]),
        "HFCache: rows [] of 2; keep at least": lambda c: c.batch_select_indices(torch.zeros(2).bool()),
        "HFCache: rows []": lambda c: c.batch_repeat_interleave(0),
        "HFCache: rows [5] of 2": lambda c: c.batch_select_indices([5]),
        "HFCache: rows [0, 5] of 2": lambda c: c.reorder_cache(torch.tensor([0, 5])),
        "batch_select_indices: a mask of 1 for 2 rows": lambda c: c.batch_select_indices(
            torch.tensor([True])
        ),
        "crop: tokens is a float; it must be": lambda c: c.crop(1.5),
        "remove: [4, 2) of 12 tokens": lambda c: c.remove(4, 2),
        "restore: snapshot is a str; it must be what snapshot() gave": lambda c: c.restore("x"),
        "put: key (2, 2, 16) and value (2, 2, 8) in layer 0": put(value_dim=8),
    },
    TypeError: {
        "batch_select_indices: indices is a list; it must be": lambda c: c.batch_select_indices([0.0]),
        "batch_select_indices: indices is a list;": lambda c: c.batch_select_indices([[0]]),
    },
    InvalidSequenceError: {
        "HFCache: 4 sequences are needed and 1 are free": lambda c: c.batch_repeat_interleave(3),
        "HFCache: 2 sequences are needed and 1 are free; pass": lambda c: c.fork(),
    },
    NotSupportedError: {
        "remove: 8 tokens of sequence 0 have to move down by 2, and this cache has no shift": lambda c: (
            c.remove(2, 4)
        ),
        "HFCache: open the backend on the host instead: backend='numpy'": lambda c: c.offload(0),
        "HFCache: open the backend on the host": lambda c: c.prefetch(0),
    },
}
FIXED: Table = {
    InvalidRangeError: {
        "HFStaticCache: values (2, 2, 1, 8) in torch.float32 for layer 0, whose shapes are fixed": put(
            value_dim=8
        ),
        "HFStaticCache: keys (1, 2, 1, 16) in torch.float32 for layer 0": put(rows=1),
    },
    NotSupportedError: {
        "deepcopy: an HFStaticCache, whose buffers must keep their addresses; use an HFCache": copy.deepcopy,
    },
}


@refuses(MAKING)
def test_what_no_cache_is_made_of_is_refused(error: Any, says: str, call: Any) -> None:
    check_refused(error, says, call, hf.model("llama").config)


def check_content(cache: Any, error: Any, says: str, call: Any) -> None:
    made, ids = hf.model("llama"), hf.tokens(2, 14)
    hf.feed(made, cache, ids[:, :12])
    check_refused(error, says, call, cache)
    if says.startswith("put:"):  # the pass that it began is to be taken back
        cache.crop(-1)
    hf.close(hf.feed(made, cache, ids[:, 12:]), hf.fresh(made, ids[:, :12], ids[:, 12:]))


@refuses(BOTH)
@pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
def test_both_refuse(kind: Any, error: Any, says: str, call: Any) -> None:
    check_content(kind(hf.model("llama").config, capacity=32), error, says, call)


@refuses(GROWING)
def test_a_cache_that_grows_refuses(error: Any, says: str, call: Any) -> None:
    check_content(HFCache(hf.model("llama").config, max_sequences=3, capacity=32), error, says, call)


@refuses(FIXED)
def test_a_cache_of_fixed_shapes_refuses(error: Any, says: str, call: Any) -> None:
    check_content(HFStaticCache(hf.model("llama").config, capacity=32), error, says, call)


@pytest.mark.parametrize("number", [np.int64, np.uint8])
def test_sizes_given_as_numbers_of_numpy_are_ints(number: Any) -> None:
    given: Any = {name: number(100) for name in ("capacity", "lookback", "max_sequences", "interval")}
    options = CacheOptions(**given)
    check_options("HFCache", options)
    assert {type(getattr(options, name)) for name in given} == {int}
