"""What stores keep beside an entry's bytes (manifests, headers, digests), and parts on their way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.stores.digests import Digests
from kvcache.stores.manifest import Manifest
from kvcache.stores.mooncake.transfer import HEADER, FramedDigest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.stores.valkey.replies import BLOCK
from kvcache.stores.valkey.transfer import blocks

LOCAL = Manifest("k", 1000, "f" * 32)
REMOTE = RemoteManifest("k", 2 * CHUNK + 5, CHUNK, "0" * 32, "f" * 32)
KINDS: dict[str, tuple[Any, Callable[[bytes, str], Any]]] = {
    "local": (LOCAL, Manifest.parse),
    "remote": (REMOTE, RemoteManifest.parse),
}


def test_manifests_come_back_as_they_were() -> None:
    for manifest, parse in KINDS.values():
        assert parse(manifest.encoded(), "k") == manifest
    assert (list(REMOTE.sizes), REMOTE.count) == ([CHUNK, CHUNK, 5], 3)
    empty = RemoteManifest("k", 0, CHUNK, "0" * 32, "f" * 32)
    assert (list(empty.sizes), empty.count) == ([], 0)
    assert [json.loads(manifest.encoded()) for manifest in (LOCAL, REMOTE)] == [
        {"format": "kvcache.entry/2", "key": "k", "nbytes": 1000, "xxh3_128": "f" * 32},
        {"format": "kvcache.remote/1", "key": "k", "nbytes": 2 * CHUNK + 5, "chunk": CHUNK,
         "writer": "0" * 32, "digest": "f" * 32},
    ]  # fmt: skip


RAW: list[Any] = [b"", b"{}", b"[]", b"null", b"nonsense", b"\xff\xfe", b"[" * 4000]
CHANGED: list[tuple[str, list[Any]]] = [
    ("key", ["j", 5]), ("format", ["kvcache.remote/2", "kvcache.entry/1"]), ("more", [1]),
    ("nbytes", [-1, 1.0, True, "5", None, float("nan")]), ("xxh3_128", [None, 5]),
    ("nbytes of many", [1 << 41]), ("chunk", [0, -4, 1, None]), ("writer", ["../x", "A" * 32, "0" * 31, 5]),
    ("digest", ["", None, "g" * 32, "f" * 5000]),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_manifest_is_refused(kind: str) -> None:
    manifest, parse = KINDS[kind]
    good = manifest.encoded()
    fields = json.loads(good)
    raws = [*RAW, good[:-3], good + b"x", good.replace(b"{", b'{"key":"k",', 1)]
    for name, values in CHANGED:
        field = name.partition(" ")[0]
        if (field in fields and not (kind == "local" and " " in name)) or name == "more":
            raws += [json.dumps({**fields, field: value}).encode() for value in values]
            raws.append(
                json.dumps({key: value for key, value in fields.items() if key != field} | {"x": 1}).encode()
            )
    for raw in raws:
        with pytest.raises(ValueError, match=r"."):
            parse(raw, "k")


def test_stores_that_digest_otherwise_do_not_see_one_another() -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    options: list[tuple[Any, ...]] = [("xxh3_128",), ("blake3",), ("blake3", "one"), ("blake3", "two")]
    made = [Digests("Store", "extra", *each) for each in options]
    assert len({digests.family for digests in made}) == 4
    assert (
        len({digests.start(*of).hexdigest() for digests in made for of in (("a", 1), ("b", 1), ("a", 2))})
        == 12
    )
    assert made[2].family == Digests("Store", "extra", *options[2]).family == "blake3-ff56444a52ce3783"


def test_the_header_says_whose_bytes_follow_and_how_many() -> None:
    headers = []
    for key, data in (("a", b"xy"), ("b", b"xy"), ("a", b"xz"), ("a", b"x"), ("a", b"")):
        digest = FramedDigest(Digests("MooncakeStore", "mooncake"), key, len(data))
        digest.update(data)
        headers.append(digest.header())
    assert len(set(headers)) == 5
    assert {len(header) for header in headers} == {HEADER}
    assert headers[0][:24] == b"kvcache.frame/1\n" + (2).to_bytes(8, "little")


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_the_parts_one_after_another_and_none_crosses_a_chunk(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 7, 1000, 40_000, BLOCK, BLOCK + 1, 3 * BLOCK + 5]) for _ in range(60)]
    parts = [rng.randbytes(size) for size in sizes] + [b"ab"] * 10_000 + [rng.randbytes(1000)] * 1500
    pieces = list(blocks([memoryview(part) for part in parts]))
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) < 2 * BLOCK
    assert len(pieces) < 400
    at = 0
    for piece in pieces:
        assert at // CHUNK == (at + len(piece) - 1) // CHUNK
        at += len(piece)
    part = memoryview(bytearray(3 * BLOCK))
    assert all(piece.obj is part.obj for piece in blocks([part])), "large parts are not copied"
