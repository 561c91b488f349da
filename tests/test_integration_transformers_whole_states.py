"""Layers that give whole states, and the number of tokens with K and V alone: ZAYA and MiniMax in HFCache."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvcache import NotSupportedError, OrderError
from kvcache.integrations.transformers import HFCache, HFStaticCache
from kvcache.stores import MemoryStore

from . import hf_models as hf

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "num_experts_per_tok": 1,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = {
    "states first": ("minimax", [LINEAR, LINEAR, FULL, LINEAR]),
    "attention first": ("minimax", [FULL, LINEAR, FULL]),
    "both in one layer": ("zaya", ["hybrid", "hybrid", "hybrid"]),
    "windows and states in one layer": ("zaya", ["hybrid_sliding", "hybrid", "hybrid_sliding"]),
}
EVERY = pytest.mark.parametrize("layers", LAYERS)


def build(layers: str, dtype: torch.dtype = torch.float32) -> Any:
    name, types = LAYERS[layers]
    config: Any
    if name == "minimax":
        config = transformers.MiniMaxConfig(
            **SIZES, layer_types=types, num_hidden_layers=len(types), intermediate_size=32, block_size=4,
            num_local_experts=4,
        )  # fmt: skip
        kind: Any = transformers.MiniMaxForCausalLM
    else:
        config = transformers.ZayaConfig(
            **SIZES, layer_types=types, num_hidden_layers=len(types), moe_intermediate_size=32, num_experts=4,
            router_hidden_size=16, sliding_window=5,
        )  # fmt: skip
        kind = transformers.ZayaForCausalLM
    torch.manual_seed(0)
    made = kind(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    made.set_attn_implementation("eager")
    return made.to(dtype)


def parts_of(made: Any, cache: Any, ids: torch.Tensor, *counts: int) -> torch.Tensor:
    return torch.cat([hf.feed(made, cache, part) for part in ids.split(counts, 1)], 1)


@EVERY
def test_passes_of_any_length_continue_as_one_pass_over_all(layers: str) -> None:
    made, ids = build(layers), hf.tokens(2)[:, :13]
    hf.close(
        parts_of(made, HFCache(made.config, capacity=32), ids, 5, 1, 3, 1, 1, 2), hf.feed(made, None, ids)
    )


@pytest.mark.parametrize("layers", [*LAYERS][1:])  # MiniMaxCache has no masks for states first
def test_states_keep_their_dtype(layers: str) -> None:
    made, ids = build(layers, torch.bfloat16), hf.tokens(2)[:, :9]
    own: Any = MiniMaxCache() if "one layer" not in layers else transformers.DynamicCache(config=made.config)
    ours = parts_of(made, HFCache(made.config, capacity=32), ids, 5, 3, 1)
    assert torch.equal(ours, parts_of(made, own, ids, 5, 3, 1))


@EVERY
def test_forks_copies_and_what_is_saved_go_on_alike(layers: str) -> None:
    made, ids = build(layers), hf.tokens(2)[:, :11]
    cache, store = HFCache(made.config, capacity=32, max_sequences=4), MemoryStore()
    hf.feed(made, cache, ids[:, :7])
    loaded = HFCache(made.config, capacity=32)
    assert cache.save(store, "key")
    assert loaded.load(store, "key")
    fork, copied = cache.fork(), copy.deepcopy(cache)
    hf.feed(made, cache, ids[:, :2])
    expected = hf.feed(made, None, ids)[:, 7:]
    for other in (fork, copied, loaded):
        hf.close(parts_of(made, other, ids[:, 7:], 1, 3), expected)


@EVERY
@pytest.mark.parametrize(("at", "tokens"), [(0, 3), (1, 1), (1, 3)])
def test_after_an_exception_the_advice_works(layers: str, at: int, tokens: int) -> None:
    """It is raised in the attention of one of the layers, behind what the layer has fetched."""
    made, ids = build(layers), hf.tokens(2)[:, :10]
    cache = HFCache(made.config, capacity=32)
    hf.feed(made, cache, ids[:, :6])
    cache.checkpoint()
    with hf.failing(projection(made, at)):
        hf.feed(made, cache, ids[:, :tokens])
    with pytest.raises(OrderError, match="did not reach all layers") as caught:
        hf.feed(made, cache, ids[:, 6:7])
    advice = re.search(r"Call crop\((-\d+)\)", str(caught.value))
    assert advice is not None, str(caught.value)
    cache.crop(int(advice[1]))
    assert cache.get_seq_length() == 6
    hf.close(parts_of(made, cache, ids[:, 6:], 1, 3), hf.feed(made, None, ids)[:, 6:])


def test_a_first_pass_that_ends_before_any_k_and_v_leaves_nothing() -> None:
    made, ids = build("states first"), hf.tokens(2)[:, :9]
    cache = HFCache(made.config, capacity=32)
    with hf.failing(projection(made, 1)):
        hf.feed(made, cache, ids[:, :4])
    assert cache.get_seq_length() == 0
    hf.close(parts_of(made, cache, ids, 6, 3), hf.feed(made, None, ids))


def test_minimax_is_served_by_a_subclass_of_its_own_class() -> None:
    config = build("attention first").config
    cache = HFCache(config)
    assert isinstance(cache, MiniMaxCache)
    assert isinstance(cache.fork(), MiniMaxCache)
    assert not isinstance(HFCache(transformers.LlamaConfig()), MiniMaxCache)
    with pytest.raises(NotSupportedError, match="class of its own only; use HFCache"):
        HFStaticCache(config, capacity=8)


def projection(made: Any, at: int) -> Any:
    """What attention of layer ``at`` ends with."""
    attention = made.model.layers[at].self_attn
    return attention.out_proj if hasattr(attention, "out_proj") else attention.o_proj
