"""What keeps content apart: composed so that nothing imitates something else, on every face."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from kvcache.integrations.lmcache.chunks import chunk_key
from kvcache.integrations.sglang.page_store import PageKind, PageStore
from kvcache.integrations.vllm.naming import Pages
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import MemoryStore, StoreValueError, compose

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=12),
    st.sampled_from(["", "s", "1", b"1", 1, 1.0, True, 0, -0.0, None, "None", "[]", "\ud800"]),
)  # fmt: skip
PARTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def told(part: Any) -> Any:
    """A part with the types of all that it contains, to be compared."""
    if isinstance(part, list | tuple):
        return "list", [told(each) for each in part]
    if isinstance(part, dict):
        return "dict", {key: told(value) for key, value in part.items()}
    return type(part).__name__, part


@hypothesis.given(st.lists(PARTS, max_size=3), st.lists(PARTS, max_size=3))
def test_the_same_bytes_are_of_the_same_parts(one: list[Any], other: list[Any]) -> None:
    assert (compose(*one) == compose(*other)) == (told(one) == told(other))
    assert compose(*one) + compose(*other) == compose(*one, *other)


@hypothesis.given(st.lists(PARTS, max_size=3), st.integers(0, 200))
def test_what_is_composed_is_no_beginning_of_another(parts: list[Any], cut: int) -> None:
    """So that it may stand before anything."""
    whole = compose(parts)
    assert not any(compose(other).startswith(whole) for other in ([*parts, None], [parts], whole))
    assert whole[:cut] == whole or not whole[:cut] or all(whole[:cut] != compose(part) for part in parts)


def test_parts_that_have_no_form_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for part in (object(), {1, 2}, 1j, [b"", [object]], endless):
        with pytest.raises(StoreValueError, match="compose: "):
            compose(part)


@dataclass
class ChunkKey:
    """The fields of LMCache's ``CacheEngineKey``, as of 0.5.6; it has ``__slots__``."""

    chunk_hash: int | bytes = 7
    model_name: str = "m"
    world_size: int = 1
    worker_id: int = 0
    dtype: Any = "torch.bfloat16"
    request_configs: dict[str, Any] | None = None
    tags: tuple[tuple[str, Any], ...] | None = field(init=False, default=None)
    _dtype_str: str = field(init=False, default="bfloat16")

    def __post_init__(self) -> None:
        given = (self.request_configs or {}).items()
        found = tuple((name[12:], value) for name, value in given if name.startswith("lmcache.tag."))
        self.tags = found or None


@dataclass
class LayerKey(ChunkKey):
    """Of its ``LayerCacheEngineKey``."""

    layer_id: int = 0


def tagged(*tags: tuple[str, Any], **more: Any) -> ChunkKey:
    return ChunkKey(request_configs={**{f"lmcache.tag.{name}": value for name, value in tags}, **more})


def lmcache_names() -> list[str]:
    """Pairs of these have one ``to_string``."""
    keys = [
        ChunkKey(), ChunkKey(b"\x07"), ChunkKey(model_name="m@1"), ChunkKey(world_size=11, worker_id=0),
        ChunkKey(dtype="torch.float16"), LayerKey(), LayerKey(layer_id=1), tagged(("a", "1")),
        tagged(("a", 1)), tagged(("a", "1@b%2")), tagged(("a", "1"), ("b", "2")),
        tagged(("b", "2"), ("a", "1")), tagged(("a%1@b", "2")), tagged(("a", "1%@b%2")),
        tagged(("a", None)), tagged(("a", "None")),
    ]  # fmt: skip
    identities: list[dict[str, Any]] = [{"m": 1}, {"m": "1"}, {"m": {"1": 1}}]
    assert chunk_key({"a": 1, "b": 2}, keys[0]) == chunk_key({"b": 2, "a": 1}, tagged(other="x"))
    return [chunk_key(identity, key) for identity, key in itertools.product(identities, keys)]


def sglang_names() -> list[str]:
    store = PageStore(StoreTier([MemoryStore()], 0))
    kinds: list[dict[str, Any]] = [{"a": "1"}, {"a": 1}, {"a": [1, None]}, {"a1": None}]
    pages = ["", "x", "/x", "x/", "a" * 64]
    found = [store.key(PageKind(kind, (4,)), page) for kind, page in itertools.product(kinds, pages)]
    store.rename()
    return found + [store.key(PageKind(kind, (4,)), page) for kind, page in itertools.product(kinds, pages)]


def vllm_names() -> list[str]:
    pages = Pages({"model": "m"}, {"kind": "CausalCache"}, 2)
    pages._adapter = lambda lora: lora  # type: ignore[method-assign]

    def image(identifier: str, offset: int = 0) -> Any:
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))

    requests: list[tuple[str | None, str | None, list[Any]]] = [
        (None, None, []), ("a", None, []), (None, "a", []), ("a", "a", []), (None, None, [image("a")]),
        ("a", None, [image("a")]), (None, "a", [image("a")]), (None, None, [image("a"), image("a")]),
        (None, None, [image("aa")]), (None, None, [image("lora"), image("a")]), (None, None, [image("a", 1)]),
        ('[5, "lora", "a"]', None, []), (compose(("lora", "a")).hex(), None, []), ("\ud800", None, []),
    ]  # fmt: skip
    found = []
    for salt, lora, images in requests:
        request: Any = SimpleNamespace(
            all_token_ids=[5, 6], cache_salt=salt, lora_request=lora, mm_features=images, prompt_embeds=None
        )
        found += pages.keys(request, 2)[0]
    return found


@pytest.mark.parametrize("names", [lmcache_names, sglang_names, vllm_names])
def test_two_keys_of_a_runtime_have_two_names(names: Any) -> None:
    found = names()
    assert len(set(found)) == len(found)
