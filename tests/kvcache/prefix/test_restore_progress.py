"""How far a restore is: what a PrefixCache tells, and the bar that ``kvcache chat`` makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xxhash")

import kvcache
import ml
from kvcache import Batch, HostTier, PrefixCache, PrefixOptions
from kvcache.stores import FileStore, MemoryStore

from .rigs.stores import PlainStore

LENGTH, CHUNK = 48, 8
TOKENS = list(range(LENGTH))

Told = list[tuple[int, int]]


def over(backend: ml.Backend, window: int | None, *tiers: Any) -> PrefixCache:
    cache: Any = kvcache.CausalCache() if window is None else kvcache.SlidingWindowCache(window)
    cache.init(backend, ml.DType.F32, 2, 2 * LENGTH, LENGTH)
    options = PrefixOptions(interval=CHUNK)
    return PrefixCache(cache, tiers=tiers, identity={"model": "a"}, block_size=CHUNK, options=options)


def evaluate(prefix: PrefixCache, tokens: Sequence[int]) -> int:
    """A session with these tokens; how many of them were there."""
    cache: Any = prefix.cache
    with prefix.begin(tokens) as session:
        at = session.cached
        for chunk in session.chunks(LENGTH):
            with cache.backend.new_context() as ctx:
                cache.start_forward(ctx, Batch(range(at, at + len(chunk)), [session.seq] * len(chunk)))
                cache.set_layer(0)
                rows = ctx.from_numpy(np.array(chunk, np.float32).reshape(-1, 1, 1).repeat(4, axis=2))
                cache.put(ctx, rows, rows)
            at += len(chunk)
            session.keep()
        return session.cached


def file_store(folder: Path) -> Any:
    return FileStore(folder / "store", durable=False)


STORES: dict[str, Callable[[Path], Any]] = {
    "straight": file_store,
    "ahead": lambda folder: PlainStore(MemoryStore()),
}


@pytest.mark.parametrize("window", [None, 12], ids=["attention", "window"])
@pytest.mark.parametrize("kind", STORES)
def test_a_restore_from_a_store_tells_how_far_it_is(
    kind: str, window: int | None, backend: ml.Backend, tmp_path: Path
) -> None:
    store = STORES[kind](tmp_path)
    with over(backend, window, store) as prefix:
        assert evaluate(prefix, TOKENS) == 0
    told: Told = []
    with over(backend, window, store) as prefix:
        prefix.on_restore = lambda done, total: told.append((done, total))
        cached = evaluate(prefix, [*TOKENS, 99])
    store.close()
    assert cached == LENGTH
    assert told[-1] == (LENGTH, LENGTH)
    assert {total for _, total in told} == {LENGTH}
    done = [done for done, _ in told]
    assert done == sorted(set(done))
    assert len(done) > 1 or window is not None


def test_a_restore_from_host_memory_tells_too_and_one_on_the_device_does_not(backend: ml.Backend) -> None:
    told: Told = []
    with over(backend, None, HostTier()) as prefix:
        prefix.on_restore = lambda done, total: told.append((done, total))
        evaluate(prefix, TOKENS)
        assert evaluate(prefix, [*TOKENS, 98]) == LENGTH
        assert told == []
        assert prefix.evict() > 0
        assert evaluate(prefix, [*TOKENS, 99]) == LENGTH
    assert told == [(LENGTH, LENGTH)]


def test_nothing_is_told_where_nothing_is_restored_and_nobody_asks(
    backend: ml.Backend, tmp_path: Path
) -> None:
    with file_store(tmp_path) as store, over(backend, None, store) as prefix:
        assert prefix.on_restore is None
        told: Told = []
        prefix.on_restore = lambda done, total: told.append((done, total))
        evaluate(prefix, TOKENS)
        assert told == []


# The command.


def test_a_chat_shows_a_bar_while_a_store_gives_back_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    import kvcache_engine.command.main
    from kvcache_engine.command.progress import Bars

    shown: list[str] = []
    monkeypatch.setattr(
        Bars, "show", lambda self, what, done, total, counts: shown.append(f"{what} {counts}")
    )
    line = ["chat", "--max-tokens", "2", "--store", str(tmp_path / "kept")]
    prompt = "And God said unto Noah, Make thee an ark of gopher wood. " * 20
    assert CliRunner().invoke(kvcache_engine.command.main.app, line, input=f"{prompt}\n").exit_code == 0
    assert not any(each.startswith("restoring") for each in shown)
    shown.clear()
    result = CliRunner().invoke(kvcache_engine.command.main.app, line, input=" and he\n")
    assert result.exit_code == 0, result.output
    restored = [re.fullmatch(r"restoring (\d+)/(\d+) tokens", each) for each in shown]
    done, total = [(int(each[1]), int(each[2])) for each in restored if each][-1]
    assert done == total > 200
    assert shown.index(f"restoring {done}/{total} tokens") < shown.index(next(filter(is_prompt, shown)))


def is_prompt(shown: str) -> bool:
    return shown.startswith("prompt ")
