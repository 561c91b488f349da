"""docs/compared.md: what it says of us is tested where it says, and what it says of peers is so."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
FEATURES = [row for row in ROWS if row[1] != "here"]
PROOFS: dict[str, list[str]] = json.loads((ROOT / "docs" / "compared.json").read_text(encoding="utf-8"))
EVERY = sorted({proof for proofs in PROOFS.values() for proof in proofs})


def test_every_test_that_the_page_names_is_in_that_file() -> None:
    named = [proof.split("::") for proof in EVERY]
    text = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in named}
    assert all(name.startswith("test_") for _, name in named)
    assert [name for path, name in named if f"def {name}(" not in text[path]] == []


def test_every_yes_of_ours_has_tests_and_no_tests_are_left_over() -> None:
    assert len(FEATURES) > 35
    assert [name for name, here, *_ in FEATURES if here != "no"] == [*PROOFS]
    assert all(PROOFS.values())


def test_every_row_has_a_cell_for_everyone() -> None:
    assert {len(row) for row in ROWS} == {9}


def test_the_versions_are_those_that_are_installed() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    assert f"transformers {transformers.__version__}" in PAGE
    assert f"mlx-lm {mlx_lm.__version__}" in PAGE


def cell(row: str, column: int) -> str:
    (found,) = [cells for cells in FEATURES if cells[0] == row]
    return found[column]


DYNAMIC, STATIC, QUANTIZED, MLX_LM = 2, 3, 4, 5


class Transformers:
    """What the cells say, done with transformers' own caches."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        self.api = pytest.importorskip("transformers", reason="transformers is not installed")
        shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 97}
        self.plain = self.api.LlamaConfig(num_hidden_layers=1, **shape)
        kinds = ["sliding_attention", "full_attention"]
        self.sliding = self.api.Gemma3TextConfig(
            num_hidden_layers=2,
            head_dim=32,
            intermediate_size=48,
            sliding_window=8,
            layer_types=kinds,
            **shape,
        )
        kinds = ["linear_attention", "full_attention"]
        self.hybrid = self.api.Qwen3NextConfig(
            num_hidden_layers=2, intermediate_size=48, layer_types=kinds, **shape
        )

    def filled(self, cache: Any, *lengths: int) -> Any:
        for length in lengths:
            cache.update(self.torch.ones(1, 2, length, 32), self.torch.ones(1, 2, length, 32), 0)
        return cache

    def of(self, column: int, config: Any) -> Any:
        """A cache of the column, with room for 8 tokens."""
        if column == STATIC:
            return self.api.StaticCache(config, max_cache_len=8)
        return self.api.DynamicCache(config=config)

    def fp8(self) -> Any:
        return self.api.QuantizedCache("fp8", self.plain)


@pytest.fixture
def hf() -> Transformers:
    return Transformers()


def test_a_static_cache_that_is_full_raises_an_index_error(hf: Transformers) -> None:
    assert cell("A batch that does not fit", STATIC) == "IndexError of `index_copy_`"
    with pytest.raises(IndexError, match="index_copy_"):
        hf.filled(hf.api.StaticCache(hf.plain, max_cache_len=8), 8, 1)


def test_a_static_cache_is_cropped_after_its_window_has_wrapped_too(hf: Transformers) -> None:
    assert cell("Remove from the end", STATIC) == "`crop`, by a negative number"
    assert cell("... of a window that has wrapped", STATIC) == "`crop` does it nevertheless, with wrong keys"
    for config, length in ((hf.plain, 4), (hf.sliding, 20)):
        cache = hf.filled(hf.api.StaticCache(config, max_cache_len=32), length)
        with pytest.raises(RuntimeError, match="negative"):
            cache.layers[0].crop(1)
        cache.layers[0].crop(-1)
        assert cache.get_seq_length() == length - 1
    window = hf.api.StaticCache(hf.sliding, max_cache_len=32).layers[0]
    keys = hf.torch.arange(20.0).reshape(1, 1, 20, 1).expand(1, 2, 20, 32)
    window.update(keys, keys)
    window.crop(-3)
    seen, _ = window.update(keys[:, :, 17:18], keys[:, :, 17:18])
    assert seen[0, 0, :, 0].tolist() == [13, 14, 15, 16, 17, 18, 19, 17]  # and not 10 to 17


def test_a_static_cache_of_a_hybrid_model_goes_not_back(hf: Transformers) -> None:
    assert cell("Rollback of recurrent states", STATIC) == "RuntimeError"
    with pytest.raises(RuntimeError, match="does not track past states"):
        hf.api.StaticCache(hf.hybrid, max_cache_len=8).crop(-1)


def test_a_static_cache_with_windows_is_refused_for_drafts(hf: Transformers) -> None:
    assert cell("Speculation past the window's wrap", STATIC) == "refused by `generate`"
    prompt = hf.torch.arange(3, 9).repeat(3).reshape(1, -1)
    options = {"prompt_lookup_num_tokens": 2, "cache_implementation": "static"}
    windows = hf.api.Gemma3ForCausalLM(hf.sliding).eval()
    with pytest.raises(ValueError, match="a cache that can be cropped"):
        windows.generate(prompt, max_new_tokens=3, do_sample=False, **options)


def test_a_quantized_cache_takes_full_attention_only(hf: Transformers) -> None:
    for row in ("Sliding window", "Chunked attention", "Recurrent states", "Quantized windows"):
        assert cell(row, QUANTIZED) == "no: ValueError"
    for config in (hf.sliding, hf.hybrid):
        with pytest.raises(ValueError, match="only full attention"):
            hf.api.QuantizedCache("fp8", config)


def test_a_quantized_cache_cannot_be_cropped(hf: Transformers) -> None:
    assert cell("Remove from the end", QUANTIZED).startswith("no: `crop` raises")
    with pytest.raises(IndexError):
        hf.filled(hf.fp8(), 4).crop(-1)


def test_a_dynamic_window_is_cropped_only_where_it_was_recorded(hf: Transformers) -> None:
    assert cell("... of a window that has wrapped", DYNAMIC) == "if recorded, else RuntimeError"
    with pytest.raises(RuntimeError, match="does not track past states"):
        hf.filled(hf.api.DynamicCache(config=hf.sliding), 20).crop(-1)
    cache = hf.api.DynamicCache(config=hf.sliding)
    cache.activate_past_recording()
    hf.filled(cache, 20).layers[0].crop(-3)
    assert cache.get_seq_length() == 17


def test_a_dynamic_cache_takes_negative_numbers_only(hf: Transformers) -> None:
    assert cell("Remove from the end", DYNAMIC) == "`crop`, by a negative number"
    cache = hf.filled(hf.api.DynamicCache(config=hf.plain), 4)
    with pytest.raises(ValueError, match="positive value"):
        cache.crop(2)
    cache.crop(-1)
    assert cache.get_seq_length() == 3


def test_a_dynamic_cache_takes_new_memory_at_every_step(hf: Transformers) -> None:
    for column in (DYNAMIC, QUANTIZED):
        assert cell("Memory is allocated once", column) == "no: each step concatenates"
    cache = hf.filled(hf.api.DynamicCache(config=hf.plain), 4)
    before = cache.layers[0].keys
    hf.filled(cache, 1)
    assert cache.layers[0].keys.data_ptr() != before.data_ptr()


@pytest.mark.parametrize("column", [DYNAMIC, STATIC])
def test_caches_of_transformers_keep_a_layer_where_its_first_keys_are(hf: Transformers, column: int) -> None:
    assert cell("Layers over devices", column) == "yes: where a layer's first keys are"
    cache = hf.of(column, hf.sliding)
    for layer, device in enumerate(("cpu", "meta")):
        key = hf.torch.ones(1, 2, 3, 32, device=device)
        cache.update(key, key, layer)
        assert cache.layers[layer].keys.device.type == device


def test_models_of_mlx_lm_are_split_over_processes() -> None:
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    assert cell("Tensor parallelism", MLX_LM) == "yes: `shard`"
    assert cell("Layers over devices", MLX_LM) == "one process each: `pipeline`"
    assert hasattr(pytest.importorskip("mlx_lm.models.llama").Model, "shard")
    assert {"pipeline_group", "tensor_group"} <= inspect.signature(utils.sharded_load).parameters.keys()


def test_rotating_caches_of_mlx_lm_do_as_the_page_says() -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    caches = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    rotating = caches.RotatingKVCache(8)
    for _ in range(12):
        rotating.update_and_fetch(mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 64)))
    assert cell("... of a window that has wrapped", MLX_LM).startswith(
        "`is_trimmable` returns False; `trim` does"
    )
    assert not rotating.is_trimmable()
    assert rotating.trim(2) == 2
    assert cell("Quantized windows", MLX_LM) == "no: NotImplementedError"
    with pytest.raises(NotImplementedError):
        rotating.to_quantized()
    assert cell("Keeps the first tokens for good", MLX_LM) == "yes: `keep=`"
    assert caches.RotatingKVCache(8, keep=4).keep == 4
    assert cell("Rollback of recurrent states", MLX_LM) == "no"
    assert not caches.ArraysCache(2).is_trimmable()


def test_a_cache_of_mlx_lm_grows_by_256_tokens() -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    caches = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    assert cell("Memory is allocated once", MLX_LM) == "no: copied every 256 tokens"
    cache = caches.KVCache()
    for length, room in ((1, 256), (255, 256), (1, 512)):
        cache.update_and_fetch(mx.ones((1, 2, length, 8)), mx.ones((1, 2, length, 8)))
        assert cache.keys.shape[2] == room
    assert cell("Share a prefix without a copy", MLX_LM).startswith("`deepcopy`")
    assert copy.deepcopy(cache).offset == cache.offset
