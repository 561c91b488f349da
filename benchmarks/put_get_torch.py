"""One layer on torch: store K and V and hand back what a query reads; one token, and a chunk of 512."""

from __future__ import annotations

from collections.abc import Iterator

import ml
from benchmarks.record import Row, rows_of
from benchmarks.shapes import DIM, DTYPES, HEADS, LAYERS, LENGTHS, WINDOW
from kvcache.bench import Decoding
from kvcache.bench_timing import Contender, interleave
from kvcache.integrations import bench_torch

__all__ = ["run"]


def run(quick: bool) -> Iterator[Row]:
    bench_torch.fix_threads(1)
    backend = ml.open_backend("torch", device="cpu")
    for dtype in DTYPES:
        for history in (128, 8192) if quick else LENGTHS:
            yield from _measure(backend, f"put + get, 1 token, {history}", history, 1, dtype, quick)
        if not quick:
            name = f"put + get, 1 token, window {WINDOW}, 32768"
            yield from _measure(backend, name, 32768, 1, dtype, quick, window=WINDOW)
        yield from _measure(backend, "put + get, 512 tokens, 8192", 8192, 512, dtype, quick, grow=False)


def _measure(
    backend: ml.Backend,
    name: str,
    history: int,
    new: int,
    dtype: str,
    quick: bool,
    grow: bool = True,
    window: int = 0,
) -> Iterator[Row]:
    shape = (history, new, HEADS, DIM, dtype, grow, window)
    contenders = bench_torch.floors(*shape)
    contenders["ours"] = Decoding(backend, history, new, DTYPES[dtype], grow, window).contender()
    peers = bench_torch.peers(*shape)
    static = {key: peer for key, peer in peers.items() if "StaticCache" in key and not window}
    rounds = 60 if quick else 200 if new == 1 else 60
    trial = interleave(contenders | static, rounds, floors=bench_torch.FLOORS, seconds=20)
    yield from rows_of(f"torch {dtype}", name, trial, per=LAYERS - 1)
    # By themselves: they copy the history at each step, and whoever runs next finds the caches empty.
    for key, peer in peers.items():
        if key not in static:
            beside: dict[str, Contender] = {trial.floor: contenders[trial.floor], key: peer}
            apart = interleave(beside, rounds // 4, warmup=2, seconds=0.3 if quick else 1.5)
            yield from (
                row for row in rows_of(f"torch {dtype}", name, apart, per=LAYERS - 1) if row.contender == key
            )
