"""Pages of host pools like SGLang's: how they are named, what they are made of, and what is read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import InvalidRangeError
from kvcache.integrations.open_stores import StoresInUse
from kvcache.integrations.sglang.host_pages import FlatPages, HostPages, pages_of
from kvcache.integrations.sglang.identity import identity_of_server, share_of
from kvcache.integrations.sglang.options import StorageOptions
from kvcache.integrations.sglang.page_store import PageKind, PageStore
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import MemoryStore, SerializedSnapshot, StoreUnavailableError, UnknownModelError, pack

PAGE, PAGES, LAYERS, WIDTH = 4, 8, 3, 5


class Pool:
    """K and V by page, (2, pages, layers, tokens, width); ``in_place`` pools say where a page lies."""

    page_size = PAGE

    def __init__(self, in_place: bool, seed: int | None = None) -> None:
        shape = (2, PAGES, LAYERS, PAGE, WIDTH)
        random = np.random.default_rng(seed)
        values = np.zeros(shape) if seed is None else random.normal(size=shape)
        self.kv = torch.tensor(values, dtype=torch.bfloat16)
        if in_place:
            self.get_page_buffer_meta = self._meta

    def _meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [int(index) // PAGE for index in indices[::PAGE]]
        found = [self.kv[half, page] for page in pages for half in range(2)]
        return [part.data_ptr() for part in found], [part.numel() * 2 for part in found]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * PAGE * WIDTH, dtype=torch.bfloat16)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv[:, index // PAGE].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv[:, index // PAGE] = page.reshape(2, LAYERS, PAGE, WIDTH)


class Unreadable(MemoryStore):
    """Has everything and gives nothing."""

    def reader(self, key: str) -> Any:
        raise StoreUnavailableError("reader: gone")

    def view(self, key: str) -> memoryview | None:
        raise StoreUnavailableError("view: gone")


def write_model(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def slots(*pages: int) -> torch.Tensor:
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])


def kind_of(pages: HostPages, **settings: Any) -> PageKind:
    return PageKind({"form": pages.form, **settings}, pages.sizes)


def store_of(*stores: Any) -> PageStore:
    return PageStore(StoreTier(stores, 0))


def write(store: PageStore, pool: Pool, names: Sequence[str], *pages: int) -> list[bool]:
    reached = pages_of(pool)
    places = reached.split(slots(*pages), len(pages))
    kind = kind_of(reached)
    return [store.write(kind, name, reached.source(place)) for name, place in zip(names, places, strict=True)]


def read(store: PageStore, pool: Pool, name: str, page: int) -> bool:
    reached = pages_of(pool)
    (place,) = reached.split(slots(page), 1)
    parts = reached.target(place)
    if not store.read(kind_of(reached), name, parts):
        return False
    reached.filled(place, parts)
    return True


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "flat"])
def test_pages_come_back_into_other_slots_of_another_pool(tmp_path: Path, in_place: bool) -> None:
    pool, other = Pool(in_place, seed=0), Pool(in_place)
    assert len(pages_of(pool).sizes) == (2 if in_place else 1)
    opened = StoresInUse([f"file://{tmp_path / 'kv'}"], 0)
    store = PageStore(opened.tier)
    assert write(store, pool, ["a", "b"], 6, 1) == [True, True]
    assert [read(store, other, *asked) for asked in (("a", 0), ("b", 7), ("c", 3))] == [True, True, False]
    assert torch.equal(other.kv[:, 0], pool.kv[:, 6])
    assert torch.equal(other.kv[:, 7], pool.kv[:, 1])
    assert not other.kv[:, 1:7].any()
    opened.close()


def test_a_page_is_named_by_its_settings_and_by_all_tokens_up_to_its_end() -> None:
    store, reached = store_of(MemoryStore()), pages_of(Pool(True, seed=0))
    (place,) = reached.split(slots(0), 1)
    mine, others = kind_of(reached, model="m"), kind_of(reached, model="n")
    assert store.write(mine, "a", reached.source(place))
    assert [store.leading(kind, ["a", "b"]) for kind in (mine, others)] == [1, 0]
    assert store.stored(mine, ["b", "a", "c"]) == [False, True, False]
    store.rename()
    assert store.leading(mine, ["a"]) == 0


def test_what_stands_under_a_pages_name_and_is_another_one_is_dropped(caplog: Any) -> None:
    memory = MemoryStore()
    store, pool = store_of(memory), Pool(True)
    kind = kind_of(pages_of(pool))
    short = [np.zeros(size - 1, np.uint8) for size in kind.sizes]
    for page in (
        SerializedSnapshot({"sglang_page": {}}, {}),
        SerializedSnapshot(kind.meta, {str(i): part for i, part in enumerate(short)}),
    ):
        memory.put(store.key(kind, "a"), pack(page))
        assert not read(store, pool, "a", 0)
        assert store.leading(kind, ["a"]) == 0
    assert not pool.kv.any()
    assert "its content is computed again" in caplog.text


def test_the_next_store_is_read_where_the_first_one_fails() -> None:
    first, second = Unreadable(), MemoryStore()
    store, pool, other = store_of(first, second), Pool(True, seed=0), Pool(True)
    assert write(store, pool, ["a"], 2) == [True]
    assert read(store, other, "a", 2)
    assert torch.equal(other.kv[:, 2], pool.kv[:, 2])
    assert store_of(first).leading(kind_of(pages_of(pool)), ["a"]) == 1
    assert not read(store_of(first), other, "a", 3)


def test_slots_that_are_no_whole_pages_are_an_error() -> None:
    for reached in (pages_of(Pool(True)), FlatPages(Pool(False))):
        with pytest.raises(InvalidRangeError, match="7 slots for 2 pages; there must be 4 for each"):
            reached.split(slots(0, 1)[:7], 2)


def test_the_model_is_named_by_its_files_and_what_changes_them(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    args = SimpleNamespace(model_path=path, dtype="auto", load_format="auto", quantization=None)
    plain = identity_of_server(args)
    quantized = identity_of_server(SimpleNamespace(**{**vars(args), "quantization": "fp8"}))
    assert plain["files"] == quantized["files"]
    assert quantized["sglang"] == {"quantization": "fp8"}
    assert quantized.keys() - plain.keys() == {"sglang"}
    write_model(tmp_path, b"Weights")
    assert identity_of_server(args)["files"] != plain["files"]
    for unknown in (None, SimpleNamespace(**{**vars(args), "load_format": "dummy"})):
        with pytest.raises(UnknownModelError, match="no files tell which weights"):
            identity_of_server(unknown)


def test_an_adapter_without_files_is_refused(tmp_path: Path) -> None:
    args = SimpleNamespace(model_path=write_model(tmp_path), dtype="auto", load_format="auto")
    missing = SimpleNamespace(lora_name="x", lora_path=str(tmp_path / "no"))
    with pytest.raises(UnknownModelError, match=r"which weights the adapter '.*' has"):
        identity_of_server(args, [missing])


def test_a_draft_model_is_named_by_its_files_wherever_they_lie(tmp_path: Path) -> None:
    def identity(host: str, draft: str, weights: bytes = b"draft") -> Any:
        path = write_model(tmp_path / host / "model")
        write_model(tmp_path / host / "draft", weights)
        given = {"load_format": "auto", "speculative_draft_model_path": str(tmp_path / host / draft)}
        return identity_of_server(SimpleNamespace(model_path=path, dtype="auto", **given))

    assert identity("a", "draft") == identity("b", "draft") != identity("c", "draft", b"others")
    assert "sglang" not in identity("d", "model")  # layers of the model itself
    with pytest.raises(UnknownModelError, match=r"which weights the draft model '.*' has"):
        identity("e", "no")


def test_ranks_share_what_is_replicated_and_nothing_else() -> None:
    config = SimpleNamespace(tp_rank=1, tp_size=2, pp_rank=0, pp_size=3, attn_cp_rank=0, attn_cp_size=1)
    assert share_of(config, replicated=False) == {"tensor_parallel": "1/2", "pipeline": "0/3"}
    assert share_of(config, replicated=True) == {"pipeline": "0/3"}


def test_the_options_of_sglang_itself_are_left_alone() -> None:
    found = StorageOptions.parse(
        {"store": "memory:", "backend_name": "x", "module_path": "y", "class_name": "z", "interface_v1": 1}
    )
    assert (found.store, found.threads, found.interface_v1) == (("memory:",), 2, True)
    with pytest.raises(InvalidRangeError, match="'stores' is not an option"):
        StorageOptions.parse({"stores": "memory:"})
