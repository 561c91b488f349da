"""SGLang's own names of pages, of its trees in Python and in Rust, under ours: every context and pair."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.tree_core_registry import create_tree_core

from ....isolation import faces
from ....isolation.cells import cells, check_cell, walks
from ....isolation.contexts import BLOCK, DIMENSIONS, NAMES, WHOLE, Context, prompt_of
from .pools import PAGE, allocator, device_pool

walked = walks()


class OfTree(faces.OfSGLang):
    """An adapter is its id, which SGLang makes of name and path, and joins to the request's ``extra_key``."""

    backend: str
    face = replace(
        faces.OfSGLang.face, tiers={name: NAMES for name in DIMENSIONS if name != "embeddings"}, told={}
    )

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator(device_pool("mha")),
            page_size=PAGE, tree_components=(ComponentType.FULL,), tree_core_backend=self.backend,
        )  # fmt: skip
        cache: Any = SimpleNamespace(enable_session_radix_cache=False)
        self.tree = create_tree_core(self.backend, params, {ComponentType.FULL: FullComponent(cache, params)})
        assert type(self.tree).__name__.startswith("Rust") == (self.backend == "rust")

    def hashes(self, context: Context) -> list[str]:
        """Those that the tree gives to the pages of a request, when it has computed them."""
        adapter = LoRARef.deterministic_id("two" if "adapter" in context else "one", "path")
        key = RadixKey(
            array("q", [token_of(item) for item in prompt_of(context)[:WHOLE]]), extra_key=adapter,
            cache_salt="tenant" if "salt" in context else None,
        )  # fmt: skip
        step = self.tree.begin_insert(InsertParams(key=key, value=torch.arange(WHOLE)))
        while step.result is None:
            step = self.tree.resume_insert()
        node = self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        self.tree.backfill_missing_hash_values()
        return [*self.tree.get_prefix_hash_values(node), *self.tree.get_hash_values(node)]


def token_of(item: int | str) -> int:
    """As SGLang: of an image's tokens, ids beyond the vocabulary that are made of its hash."""
    if isinstance(item, int):
        return item
    return 1 << 40 | int.from_bytes(hashlib.sha256(item.encode()).digest()[:5])


class OfPython(OfTree):
    backend = "python"


class OfRust(OfTree):
    backend = "rust"


@cells([OfPython])
def test_pages_of_the_tree_in_python(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)


@cells([OfRust])
def test_pages_of_the_tree_in_rust(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)


def test_both_trees_give_one_name_to_one_page(tmp_path: Path) -> None:
    one, other = (made("names", tmp_path) for made in (OfPython, OfRust))
    for context in (frozenset(), frozenset(["salt"]), frozenset(["salt", "adapter"]), frozenset(["image"])):
        assert one.hashes(context) == other.hashes(context)
    assert PAGE == BLOCK


@pytest.mark.parametrize("made", [OfPython, OfRust])
def test_no_salt_is_taken_for_an_adapter(made: Any, tmp_path: Path) -> None:
    tree = made("names", tmp_path).tree
    names = set()
    for extra, salt in ((None, None), ("x", None), (None, "x"), ("x", "x"), ("xx", None), (None, "xx")):
        key = RadixKey(array("q", range(PAGE)), extra_key=extra, cache_salt=salt)
        tree.begin_insert(InsertParams(key=key, value=torch.arange(PAGE)))
        node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        tree.backfill_missing_hash_values()
        names.update(tree.get_hash_values(node))
    assert len(names) == 6
