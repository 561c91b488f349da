"""What a config says of single layers: windows of several sizes, in HFCache and HFStaticCache."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

from kvcache.integrations.transformers import HFCache, HFStaticCache

from . import hf_models as hf

WINDOWS = {0: 4, 2: 7}


@pytest.fixture
def made() -> Any:
    """Four layers, two of them with windows of their own."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        sliding_window=None,
        per_layer_config={layer: {"sliding_window": size} for layer, size in WINDOWS.items()},
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
def test_each_layer_keeps_the_window_that_the_config_gives_it(made: Any, kind: Any) -> None:
    layers = kind(made.config, capacity=32).layers
    assert {i: layer.kind.size for i, layer in enumerate(layers) if layer.is_sliding} == WINDOWS


def test_mask_sizes_and_what_is_read_are_those_of_transformers_own_layers(made: Any) -> None:
    own = transformers.DynamicCache(config=made.config)
    cache = HFCache(made.config, capacity=32, lookback=0)
    torch.manual_seed(1)
    for tokens in (9, 1, 1, 3, 1):
        keys, values = torch.randn(2, 2, 2, tokens, 8)
        for layer in range(4):
            assert cache.get_mask_sizes(tokens, layer) == own.get_mask_sizes(tokens, layer)
            expected = own.update(keys, values, layer)
            found = cache.update(keys, values, layer)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_rows_are_selected_by_a_tensor_a_mask_or_a_sequence() -> None:
    model = hf.model("llama")
    held = []
    for chosen in (torch.tensor([0, 2]), torch.tensor([True, False, True]), (0, 2), [0, 2]):
        cache = HFCache(model.config, max_sequences=3, capacity=32)
        with torch.no_grad():
            model(hf.tokens(3), past_key_values=cache)
        cache.batch_select_indices(chosen)
        held.append(cache.layers[0].keys)
    assert held[0].shape[0] == 2
    assert all(torch.equal(keys, held[0]) for keys in held)
