"""Draws the pictures of the docs from real caches: ``python -m examples.pictures FOLDER``."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml
from kvcache import Batch, CausalCache, ChunkedCache, HostTier, PrefixCache, SlidingWindowCache
from kvcache.stores import MemoryStore
from kvcache.views import Occupancy, Picture, look_at_mask, render

Tokens = Sequence[tuple[int, int]]
"""(sequence, position) of each token of a batch."""


class Desk:
    """A backend, and caches whose keys and values are zeros, since only ownership of cells is drawn."""

    def __init__(self, backend: ml.Backend) -> None:
        self.backend = backend

    def bind(self, cache: Any, sequences: int, capacity: int, batch: int = 32) -> Any:
        cache.init(self.backend, ml.DType.F32, sequences, capacity, batch)
        return cache

    def store(self, cache: Any, tokens: Tokens) -> None:
        """One pass over these tokens."""
        with self.backend.new_context() as ctx:
            cache.start_forward(ctx, Batch([at for _, at in tokens], [seq for seq, _ in tokens]))
            cache.set_layer(0)
            zeros = ctx.zeros((len(tokens), 2, 16), ml.DType.F32)
            cache.put(ctx, zeros, zeros)

    def say(self, prefix: PrefixCache, text: str) -> Any:
        """A session over a prompt of one token for each character."""
        session = prefix.begin([ord(c) for c in text])
        for chunk in session.chunks(512):
            at = prefix.cache.offset(session.seq)
            self.store(prefix.cache, [(session.seq, at + i) for i in range(len(chunk))])
        return session


def run_of(seq: int, begin: int, end: int) -> Tokens:
    return [(seq, position) for position in range(begin, end)]


def cells(desk: Desk) -> Picture:
    """Two sequences that share a prefix."""
    cache = desk.bind(CausalCache(), 2, 8)
    desk.store(cache, run_of(0, 0, 4))
    cache.copy_prefix(0, 1, 2)
    desk.store(cache, run_of(1, 2, 5))
    return render(cache)


def kept(desk: Desk) -> Picture:
    """A snapshot that has copied nothing, and the holes that two removals left."""
    cache = desk.bind(CausalCache(), 3, 8)
    for seq in range(3):
        desk.store(cache, run_of(seq, 0, 7))
    snapshot = cache.snapshot(0, 0, 5)
    cache.remove(0, 0)
    cache.remove(1, 4)
    picture: Picture = render(cache)
    assert snapshot.in_cache
    return picture


def window(desk: Desk) -> Picture:
    """A window after twenty tokens: only what it reaches is still stored, whatever cells it lies in."""
    cache = desk.bind(SlidingWindowCache(3, memory=6), 2, 1000, batch=8)
    desk.store(cache, run_of(0, 0, 8))
    desk.store(cache, run_of(1, 0, 4))
    for position in range(8, 20):
        desk.store(cache, [(0, position)])
    return render(cache)


def mask(cache: Callable[[], Any], batches: Sequence[Tokens]) -> Callable[[Desk], Picture]:
    """What the tokens of the last of these passes see."""

    def draw(desk: Desk) -> Picture:
        bound = desk.bind(cache(), 2, 16)
        for tokens in batches:
            desk.store(bound, tokens)
        return look_at_mask(bound)

    return draw


def prefix_tree(desk: Desk) -> Picture:
    """Conversations of one assistant, in all tiers."""
    cache = desk.bind(CausalCache(), 3, 160, 512)
    system = "You are a helpful assistant. "
    with PrefixCache(cache, tiers=[HostTier(64 << 10), MemoryStore()], identity={"model": "drawn"}) as prefix:
        desk.say(prefix, "Translate into Latin: bread").close()
        prefix.evict()
        prefix.flush()
        desk.say(prefix, f"{system}Tell me of Noah.").close()
        desk.say(prefix, f"{system}Tell me of Moses. And then?").close()
        desk.say(prefix, f"{system}Sing a song.")
        return render(prefix, lambda ids: "".join(map(chr, ids)))


def occupancy(desk: Desk) -> Any:
    """Three conversations that come and go, as matplotlib axes."""
    from kvcache.views import plots

    cache = desk.bind(CausalCache(), 3, 128, 256)
    with PrefixCache(cache, budget=24 << 10) as prefix:
        samples = Occupancy(prefix)
        for turn in range(6):
            session = desk.say(prefix, "You are a helpful assistant. " + "abcdef"[turn] * 10)
            for step in range(40):
                session.extend([65 + step])
                desk.store(cache, [(session.seq, cache.offset(session.seq))])
                samples.sample()
            session.close()
        return plots.occupancy(samples.samples)


PICTURES: dict[str, Callable[[Desk], Picture]] = {
    "cells": cells,
    "kept": kept,
    "window": window,
    "mask-causal": mask(CausalCache, [run_of(0, 0, 8)]),
    "mask-window": mask(lambda: SlidingWindowCache(2), [run_of(0, 0, 8)]),
    "mask-chunk": mask(lambda: ChunkedCache(4), [run_of(0, 0, 8)]),
    "mask-batch": mask(
        CausalCache, [[*run_of(0, 0, 5), *run_of(1, 0, 3)], [(0, 5), (1, 3), (1, 4), (0, 6), (0, 7)]]
    ),
    "prefix-tree": prefix_tree,
}


def drawings() -> dict[str, bytes]:
    """Those that our own code draws, as SVG, by name: the same bytes everywhere."""
    with ml.open_backend("numpy") as backend:
        return {name: make(Desk(backend)).svg().encode() for name, make in PICTURES.items()}


def occupancy_plot() -> bytes:
    """The one that matplotlib draws."""
    import matplotlib

    stream = io.BytesIO()
    with ml.open_backend("numpy") as backend, matplotlib.rc_context({"svg.hashsalt": "ml-kvcache"}):
        occupancy(Desk(backend)).figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"pictures: {folder}: {error.strerror}")
    try:
        drawn = drawings() | {"occupancy": occupancy_plot()}
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        sys.exit("pictures: occupancy.svg needs matplotlib: pip install 'ml-kvcache[plots]'")
    for name, content in drawn.items():
        (folder / f"{name}.svg").write_bytes(content)
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
