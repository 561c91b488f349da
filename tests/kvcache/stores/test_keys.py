"""Keys: one for each prefix under each identity, stable, and never shared by different ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from kvcache.stores import SNAPSHOT_FORMAT, Keys, SaltedToken, StoreValueError, check_key

IDENTITY = {"model": "m", "weights": "w", "dtype": "F16", "rope": {"base": 10000.0, "scale": None}, "rank": 0}


def every_key(tokens: Any, block_size: int = 4, **identity: Any) -> list[str]:
    chain = Keys({**IDENTITY, **identity}, block_size).chain(tokens)
    return [chain.at(position) for position in range(len(chain) + 1)]


def test_a_key_is_the_sha256_chain_that_is_documented() -> None:
    """Written out by hand, with nothing but hashlib: keys on disk must not change unnoticed."""
    text = json.dumps(
        {"format": SNAPSHOT_FORMAT, "chunk": 4, "identity": IDENTITY}, sort_keys=True, separators=(",", ":")
    )
    root = hashlib.sha256(text.encode()).digest()
    first = hashlib.sha256(root + b"i" + np.arange(4, dtype="<i8").tobytes()).digest()
    mixed = b"m" + b"i" + np.array([4], "<i8").tobytes() + b"m" + (3).to_bytes(8, "little") + b"img"
    second = hashlib.sha256(first + mixed + b"i" + np.array([5], "<i8").tobytes()).digest()
    chain = Keys(IDENTITY, 4).chain([0, 1, 2, 3, 4, b"img", 5])
    assert (chain.at(0), chain.at(4), chain.at(7)) == (root.hex(), first.hex(), second.hex())
    assert chain.aligned == [first.hex()]


def test_known_keys_stay_as_they_are() -> None:
    """Computed with printf and sha256sum."""
    chain = Keys({"model": "m"}, 2).chain([1, 2, 3])
    assert (chain.at(2)[:16], chain.at(3)[:16]) == ("6764bd5a959ed5f2", "1eeb032d968e0026")


def test_aligned_keys_are_those_of_the_full_blocks_and_keys_for_a_store() -> None:
    keys = Keys(dict(reversed(IDENTITY.items())), 4)
    chain = keys.chain(range(11))
    assert len(chain) == 11
    assert chain.aligned == [chain.at(4), chain.at(8)]
    assert keys.chain([]).at(0) == chain.at(0) == keys.root == Keys(IDENTITY, 4).root
    assert keys.chain([]).aligned == []
    assert len(Keys(IDENTITY).chain(np.arange(100_000)).aligned) == 100_000 // 128
    assert all(check_key(key) == key and len(key) == 64 for key in every_key([1, b"x", 3]))


def test_the_same_tokens_in_another_type_have_the_same_keys() -> None:
    tokens = [5, 0, -1, 2**31, 2**63 - 1]
    expected = every_key(tokens)
    assert every_key(tuple(tokens)) == expected
    assert every_key(np.array(tokens)) == expected
    assert every_key(np.array(tokens, ">i8")) == expected
    assert every_key(np.repeat(tokens, 2)[::2]) == expected
    assert every_key([np.int64(token) for token in tokens]) == expected
    assert every_key(np.arange(9, dtype=np.uint16)) == every_key(range(9))


def test_what_stands_between_ids_may_be_given_beside_them() -> None:
    keys, others = Keys(IDENTITY, 4), {0: SaltedToken("a", 0), 5: b"image", 9: SaltedToken("b", b"image")}
    mixed = [others.get(place, place) for place in range(12)]
    assert keys.chain(np.arange(12), others=others).aligned == keys.chain(mixed).aligned


def test_no_two_prefixes_share_a_key() -> None:
    """All sequences of up to three items from a set made to be confused, and all their prefixes."""
    items: list[int | bytes] = [0, 1, 0x69, b"", b"\0", b"\0" * 8, b"i" + b"\0" * 8]
    keys = Keys(IDENTITY, 2)
    found: dict[str, tuple[Any, ...]] = {}
    for count in range(4):
        for tokens in itertools.product(items, repeat=count):
            key = keys.chain(tokens).at(count)
            assert found.setdefault(key, tokens) == tokens
    assert len(found) == sum(len(items) ** count for count in range(4))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"}, {"weights": "v"}, {"dtype": "BF16"}, {"rank": 1}, {"rank": "0"}, {"salt": "x"},
        {"rank": None}, {"rope": {"base": 10001.0, "scale": None}}, {"rope": {"base": 10000.0}},
        {"rope": [10000.0, None]},
    ],
    ids=repr,
)  # fmt: skip
def test_another_identity_shares_no_key(change: dict[str, Any]) -> None:
    assert not set(every_key(range(9))) & set(every_key(range(9), **change))
    assert not set(every_key(range(9), 4)) & set(every_key(range(9), 3))


def test_one_changed_token_changes_every_key_behind_it_and_none_before() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(50_000) for _ in range(23)]
    expected = every_key(tokens)
    for place in range(23):
        assert every_key(tokens[:place]) == expected[: place + 1], "whatever follows"
        changed = every_key([*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]])
        assert changed[: place + 1] == expected[: place + 1]
        assert not set(changed[place + 1 :]) & set(expected)


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_chain_is_refused(position: int) -> None:
    with pytest.raises(StoreValueError, match=r"\[0, 9\]"):
        Keys(IDENTITY).chain(range(9)).at(position)
