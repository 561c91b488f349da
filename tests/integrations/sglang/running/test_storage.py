"""Pages of SGLang's host pools go to our stores and come back, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.runtime_context import create_context, use_context
from sglang.srt.server_args import ServerArgs

from kvcache import InvalidRangeError
from kvcache.integrations.sglang.host_pages import FlatPages
from kvcache.stores import UnknownModelError

from .pools import PAGE, fill, host_pool, page_of, slots, storage

KEYS = [f"{i:064x}" for i in range(1, 9)]
LAYOUTS = [
    (kind, layout)
    for kind in ("mha", "uneven", "mla")
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    if layout != "page_head" or kind == "mha"
    if layout not in ("page_first_direct", "layer_first") or kind != "uneven"
]


def server(folder: Path, **options: Any) -> Any:
    """As in a scheduler of a server with these arguments, and a model written to ``folder``."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **heads}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "model.safetensors").write_bytes(b"weights")
    args = ServerArgs(model_path=str(folder), device="cpu", **options)
    args.resolve_once()
    args.check_server_args()
    return use_context(create_context(args, role="scheduler"))


def assert_pages_equal(pool: Any, other: Any, pages: dict[int, int]) -> None:
    for page, twin in pages.items():
        assert torch.equal(page_of(pool, page), page_of(other, twin))


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_come_back_in_another_process_whatever_their_layout(
    url: str, kind: str, layout: str, dtype: torch.dtype
) -> None:
    pool, other = host_pool(kind, layout, dtype), host_pool(kind, layout, dtype)
    fill(pool)
    first = storage(pool, url, is_mla_model=kind == "mla")
    assert first.batch_exists(KEYS[:3]) == 0
    assert first.batch_set_v1(KEYS[:3], slots(5, 2, 7)) == [True] * 3
    first.close()
    second = storage(other, url, is_mla_model=kind == "mla")
    assert second.batch_exists(KEYS) == 3
    assert second.batch_get_v1(KEYS[:3], slots(0, 9, 4)) == [True] * 3
    assert_pages_equal(pool, other, {5: 0, 2: 9, 7: 4})
    untouched = page_of(other, 1)
    assert torch.equal(untouched, torch.zeros_like(untouched))
    second.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_flat_pages_which_sglang_copies_itself_come_back(url: str, layout: str) -> None:
    pool, other = host_pool("mha", layout), host_pool("mha", layout)
    fill(pool)
    first = storage(pool, url, extra={"interface_v1": 0})
    assert first.batch_set(KEYS[:2], [pool.get_data_page(page * PAGE) for page in (1, 3)])
    second = storage(other, url, extra={"interface_v1": 0})
    assert [second.exists(key) for key in KEYS[:3]] == [True, True, False]
    found = second.batch_get(KEYS[:3], [other.get_dummy_flat_data_page() for _ in range(3)])
    assert found[2] is None
    for page, flat in zip((6, 0), found, strict=False):
        other.set_from_flat_data_page(page * PAGE, flat)
    assert_pages_equal(pool, other, {1: 6, 3: 0})
    with pytest.raises(InvalidRangeError, match="flat page of 8 bytes"):
        second.set(KEYS[4], torch.zeros(2))
    for one in (first, second):
        one.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"extra": {"identity": {"model": "n"}}},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 0, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
    ids=["model", "tensor parallel", "pipeline", "context parallel"],
)
def test_pages_of_another_model_or_rank_are_misses(url: str, changed: dict[str, Any]) -> None:
    pool = host_pool("mha", "page_first")
    fill(pool)
    first, second = storage(pool, url), storage(pool, url, **changed)
    assert first.batch_set_v1(KEYS[:1], slots(0)) == [True]
    assert (first.batch_exists(KEYS[:1]), second.batch_exists(KEYS[:1])) == (1, 0)
    before = page_of(pool, 0).clone()
    assert second.batch_get_v1(KEYS[:1], slots(0)) == [False]
    assert torch.equal(page_of(pool, 0), before)


def test_pages_of_another_layout_or_dtype_are_misses(url: str) -> None:
    pool = host_pool("mha", "page_first")
    fill(pool)
    assert storage(pool, url).batch_set_v1(KEYS[:1], slots(0)) == [True]
    for other in (host_pool("mha", "layer_first"), host_pool("mha", "page_first", torch.bfloat16)):
        assert storage(other, url).batch_exists(KEYS[:1]) == 0


@pytest.mark.parametrize("identity", [None, {"model": "m"}], ids=["files", "given"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_of_another_fp8_are_misses(
    url: str, tmp_path: Path, kind: str, identity: dict[str, Any] | None
) -> None:
    """Pools hold both as bytes, and do not tell which."""
    for name, dtype in (("fp8_e5m2", torch.float8_e5m2), ("fp8_e4m3", torch.float8_e4m3fn)):
        with server(tmp_path, kv_cache_dtype=name):
            pool = host_pool(kind, "page_first", dtype)
            assert pool.dtype == torch.uint8
            one = storage(pool, url, is_mla_model=kind == "mla", extra={"identity": identity})
            assert one.batch_exists(KEYS[:1]) == 0
            assert one.batch_set_v1(KEYS[:1], slots(0)) == [True]
            assert one.batch_exists(KEYS[:1]) == 1
            one.close()


def test_pages_of_other_layers_of_a_pipeline_are_misses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of as many layers each, cut elsewhere: pools of states do not tell their layers."""
    stages = [host_pool("mha", "page_first", first=first) for first in (1, 2)]
    first, second = (storage(pool, url, pp_rank=1, pp_size=3) for pool in stages)
    assert first.batch_set_v1(KEYS[:1], slots(0)) == [True]
    assert (first.batch_exists(KEYS[:1]), second.batch_exists(KEYS[:1])) == (1, 0)
    found = []
    for cut in ("1,3,2", "2,3,1"):
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", cut)
        found.append(first._settings(PoolName.MAMBA, object(), FlatPages(stages[0])))
    assert found[0] != found[1]


def test_pages_of_an_adapter_that_was_trained_again_are_misses(url: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    pool = host_pool("mha", "page_first")
    with server(tmp_path, lora_paths=[f"fine={adapter}"]):
        for weights in (b"old", b"trained again"):
            (adapter / "adapter_model.safetensors").write_bytes(weights)
            one = storage(pool, url, extra={"identity": None})
            assert one.batch_exists(KEYS[:1]) == 0
            assert one.batch_set_v1(KEYS[:1], slots(0)) == [True]
            one.close()


def test_latents_are_the_same_on_all_ranks_of_tensor_parallelism(url: str) -> None:
    pool, other = host_pool("mla", "page_first"), host_pool("mla", "page_first")
    fill(pool)
    assert storage(pool, url, is_mla_model=True, tp_size=2).batch_set_v1(KEYS[:1], slots(0)) == [True]
    second = storage(other, url, is_mla_model=True, tp_rank=1, tp_size=2)
    assert second.batch_get_v1(KEYS[:1], slots(3)) == [True]
    assert_pages_equal(pool, other, {0: 3})


def test_a_damaged_page_fails_with_those_behind_it_and_is_dropped(url: str, tmp_path: Path) -> None:
    pool, other = host_pool("mha", "page_first"), host_pool("mha", "page_first")
    fill(pool)
    storage(pool, url, extra={"threads": 1}).batch_set_v1(KEYS[:3], slots(0, 1, 2))
    second = storage(other, url, extra={"threads": 1})
    files = sorted((tmp_path / "store").rglob("*.entry"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 3
    raw = bytearray(files[1].read_bytes())
    raw[-1] ^= 1
    files[1].write_bytes(raw)
    assert second.batch_get_v1(KEYS[:3], slots(0, 1, 2)) == [True, False, False]
    assert second.batch_exists(KEYS[:3]) == 1
    assert second.batch_set_v1(KEYS[1:2], slots(1)) == [True], "it can be written again"


def test_what_was_cleared_is_not_found_any_more(url: str) -> None:
    pool = host_pool("mha", "page_first")
    first = storage(pool, url)
    first.batch_set_v1(KEYS[:2], slots(0, 1))
    first.clear()
    assert first.batch_exists(KEYS[:2]) == 0
    assert first.batch_set_v1(KEYS[:2], slots(0, 1)) == [True, True]
    assert first.batch_exists(KEYS[:2]) == 2


def test_other_pools_limit_the_prefix_by_their_hit_policies(url: str) -> None:
    """Sidecars: every page of an indexer's, and the last pages of windows or states."""
    pool, window = host_pool("mha", "page_first"), host_pool("mha", "layer_first")
    fill(pool), fill(window, 1)
    first = storage(pool, url)
    for name, registered in ((PoolName.KV, pool), (PoolName.SWA, window), (PoolName.INDEXER, pool)):
        first.register_mem_host_pool_v2(registered, name)
    everything = PoolTransfer(PoolName.KV, host_indices=slots(0, 1, 2, 3, 4), keys=KEYS[:5])
    ends = PoolTransfer(
        PoolName.SWA, host_indices=slots(1, 2, 5, 6), keys=[KEYS[1], KEYS[2], KEYS[3], KEYS[0]]
    )
    assert first.batch_set_v2([everything, ends]) == {PoolName.KV: [True] * 5, PoolName.SWA: [True] * 4}
    last_two = PoolTransfer(PoolName.SWA, keys=["?", "?"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = first.batch_exists_v2(KEYS, [last_two])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.SWA: 4}
    indexer = PoolTransfer(PoolName.INDEXER, keys=KEYS, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert first.batch_exists_v2(KEYS, [last_two, indexer]).kv_hit_pages == 0
    first.batch_set_v2([PoolTransfer(PoolName.INDEXER, host_indices=slots(0, 1, 2), keys=KEYS[:3])])
    assert first.batch_exists_v2(KEYS, [last_two, indexer]).restorable_prefix_pages == [1, 2, 3]
    nowhere = PoolTransfer(PoolName.SWA, keys=KEYS[5:7])
    more = PoolTransfer(PoolName.INDEXER, host_indices=slots(3), keys=KEYS[3:4])
    assert first.batch_set_v2([nowhere, more]) == {PoolName.SWA: [False] * 2, PoolName.INDEXER: [True]}
    other = host_pool("mha", "layer_first")
    first.register_mem_host_pool_v2(other, PoolName.SWA)
    back = PoolTransfer(PoolName.SWA, host_indices=slots(8), keys=KEYS[3:4])
    assert first.batch_get_v2([back]) == {PoolName.SWA: [True]}
    assert_pages_equal(window, other, {5: 8})


def test_several_stores_are_read_in_order_and_all_written(tmp_path: Path) -> None:
    near, far = (f"file://{tmp_path / name}" for name in ("near", "far"))
    pool, other = host_pool("mha", "page_first"), host_pool("mha", "page_first")
    fill(pool)
    storage(pool, [near, far]).batch_set_v1(KEYS[:2], slots(0, 1))
    for url in (near, far):
        assert storage(other, url).batch_get_v1(KEYS[:2], slots(2, 3)) == [True, True]
        assert_pages_equal(pool, other, {0: 2, 1: 3})


def test_metrics_count_the_pages_moved_since_they_were_last_asked(url: str) -> None:
    pool = host_pool("mha", "page_first")
    first = storage(pool, url, enable_storage_metrics=True)
    first.batch_set_v1(KEYS[:2], slots(0, 1))
    first.batch_get_v1(KEYS[:3], slots(0, 1, 2))
    stats = first.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert first.get_stats().backup_pgs == []


def test_options_and_models_that_are_not_known_are_errors(url: str, tmp_path: Path) -> None:
    pool = host_pool("mha", "page_first")
    with pytest.raises(InvalidRangeError, match="'treads' is not an option; known options: store, threads"):
        storage(pool, url, extra={"treads": 4})
    with pytest.raises(InvalidRangeError, match="threads=0; it must be at least 1"):
        storage(pool, url, extra={"threads": 0})
    with pytest.raises(
        UnknownModelError,
        match=r'no local files identify the weights of the model; name them in .*"identity"',
    ):
        storage(pool, url, extra={"identity": None})
    with pytest.raises(InvalidRangeError, match="3 slots for 1 pages; there must be 4 for each"):
        storage(pool, url).batch_set_v1(KEYS[:1], slots(0)[:3])
