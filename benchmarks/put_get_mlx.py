"""One decoding step of put and get on MLX: all layers, one evaluation; one token, and a chunk of 512."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

import ml
from benchmarks.cases import PutGet, drawn, put_get
from benchmarks.record import Row, rows_of
from benchmarks.shapes import DIM, DTYPES, HEADS
from kvcache.bench.decoding import Decoding
from kvcache.bench.timing import Contender, interleave
from kvcache.integrations import bench_mlx
from kvcache.integrations.bench_mlx import LAYERS

__all__ = ["run"]


class OursOnMlx(Decoding):
    """All layers in one evaluation. The views of the step before are still held."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **({"layers": LAYERS} | options))
        self.held: Any = None

    def prepare(self) -> None:
        """The pass, and what it reads: the mask is made in the first ``get``, and timed apart."""
        self.start()
        if self.at:
            self.cache.set_layer(0)
            self.cache.get(self.ctx)

    def step(self) -> None:
        views = []
        for i in range(self.layers):
            key, value = self.layer(i)
            # What attention does with them: an array each, for as long as the step lasts.
            views.append((key, value, _array(key), _array(value)))
        self.held = [pair[:2] for pair in views]
        del views
        backend: Any = self.backend
        backend.work.drain(backend.work.epoch)


def _array(tensor: Any) -> Any:
    return tensor.storage.read(tensor.offset, tensor.shape, tensor.strides)


def run(quick: bool) -> Iterator[Row]:
    mx.set_default_device(mx.cpu)
    backend = ml.open_backend("mlx", device="cpu")
    for case in put_get(quick):
        yield from _measure(backend, case, quick)
    yield from _deep(backend, 20 if quick else 200)
    for dtype in DTYPES:
        yield from _tail(backend, dtype, 1000 if quick else 5000)


def _measure(backend: ml.Backend, case: PutGet, quick: bool) -> Iterator[Row]:
    rounds = 60 if quick else 200 if case.new == 1 else 120

    def make() -> dict[str, Contender]:
        ours = OursOnMlx(backend, *case.decoding).contender()
        return bench_mlx.floors(*case.shape) | {"ours": ours}

    trial, contenders = drawn(case, make, rounds, bench_mlx.FLOORS, seconds=15, own_threads=False)
    yield from rows_of(f"mlx {case.dtype}", case.name, trial, per=LAYERS)
    for key, peer in bench_mlx.peers(*case.shape).items():
        beside: dict[str, Contender] = {trial.floor: contenders[trial.floor], key: peer}
        apart = interleave(beside, 2 * rounds, warmup=3, seconds=0.5 if quick else 3, own_threads=False)
        worst = max(apart.times[key])
        note = f"worst step {worst / statistics.median(apart.times[key]):.0f} x its median"
        for row in rows_of(f"mlx {case.dtype}", case.name, apart, per=LAYERS):
            if row.contender == key:
                yield Row(**(row.as_dict() | {"note": note}))


def _deep(backend: ml.Backend, rounds: int) -> Iterator[Row]:
    """24 layers in one evaluation: what a step costs once is spread over more of them."""
    layers = 24
    floor = bench_mlx.Slices(2048, 1, HEADS, DIM, "bfloat16", grow=True, layers=layers)
    ours = OursOnMlx(backend, 2048, 1, ml.DType.BF16, layers=layers)
    contenders = {bench_mlx.FLOORS[0]: floor.contender(), "ours": ours.contender()}
    trial = interleave(contenders, rounds, seconds=20, own_threads=False)
    yield from rows_of("mlx bfloat16", "put + get, 1 token, 2048, 24 layers", trial, per=layers)


def _tail(backend: ml.Backend, dtype: str, steps: int) -> Iterator[Row]:
    """Decoding from an empty cache with room for 32k; mlx-lm's cache grows by 256 tokens at a time."""
    floor = bench_mlx.Slices(0, 1, HEADS, DIM, dtype, grow=True)
    floor.resize(32768)
    ours = OursOnMlx(backend, 0, 1, DTYPES[dtype], capacity=32768)
    contenders = {"floor (slices)": floor.contender(), "ours": ours.contender()}
    contenders |= {
        name: peer
        for name, peer in bench_mlx.peers(1, 1, HEADS, DIM, dtype).items()
        if name == "mlx-lm KVCache"
    }
    trial = interleave(contenders, steps, seconds=90, own_threads=False)
    base = _quantile(trial.times["floor (slices)"])
    for name, values in trial.times.items():
        worst = max(values) / LAYERS
        yield Row(
            f"mlx {dtype}",
            f"decode from empty, p99.9 of {len(values)} steps",
            name,
            _quantile(values) / LAYERS,
            worst,
            worst,
            _quantile(values) / base,
            rounds=len(values),
            dropped=trial.dropped,
            target=2.0 if name == "ours" else None,
            note="p99.9; the worst step",
        )


def _quantile(values: list[float], q: float = 0.999) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
