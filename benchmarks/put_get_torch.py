"""One layer on torch: store K and V and hand back what a query reads; one token, and a chunk of 512."""

from __future__ import annotations

from collections.abc import Iterator

import ml
from benchmarks.cases import PutGet, drawn, put_get
from benchmarks.record import Row, rows_of
from benchmarks.shapes import LAYERS
from kvcache.bench.decoding import Decoding
from kvcache.bench.timing import Contender, interleave
from kvcache.integrations import bench_torch

__all__ = ["run"]


def run(quick: bool) -> Iterator[Row]:
    bench_torch.fix_threads(1)
    backend = ml.open_backend("torch", device="cpu")
    for case in put_get(quick):
        yield from _measure(backend, case, quick)


def _measure(backend: ml.Backend, case: PutGet, quick: bool) -> Iterator[Row]:
    rounds = 60 if quick else 200 if case.new == 1 else 120
    static: list[str] = []

    def make() -> dict[str, Contender]:
        made = bench_torch.floors(*case.shape)
        made["ours"] = Decoding(backend, *case.decoding).contender()
        peers = bench_torch.peers(*case.shape)
        static[:] = [key for key in peers if "StaticCache" in key and not case.window]
        return made | {key: peers[key] for key in static}

    trial, contenders = drawn(case, make, rounds, bench_torch.FLOORS, seconds=20)
    yield from rows_of(f"torch {case.dtype}", case.name, trial, per=LAYERS - 1)
    # By themselves: they copy the history at each step, and whoever runs next finds the caches empty.
    for key, peer in bench_torch.peers(*case.shape).items():
        if key not in static:
            beside: dict[str, Contender] = {trial.floor: contenders[trial.floor], key: peer}
            apart = interleave(beside, rounds // 4, warmup=2, seconds=0.3 if quick else 1.5)
            yield from (
                row
                for row in rows_of(f"torch {case.dtype}", case.name, apart, per=LAYERS - 1)
                if row.contender == key
            )
