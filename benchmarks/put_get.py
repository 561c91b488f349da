"""put + get of one token and of a chunk, and the slowest steps of decoding, on PyTorch and MLX."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml
from benchmarks.report import Row, rows_of
from benchmarks.timing import joined
from kvcache.testing.bench import DIM, HEADS, LAYERS, Contender, Decoding, Trial, floors_for, interleave

GROUPS = 4
"""Query heads per KV head."""
LENGTHS = (128, 1024, 8192, 32768)
WINDOW = 1024
DTYPES = {"float32": ml.DType.F32, "bfloat16": ml.DType.BF16}
DRAWS = 6
"""How often a chunk's buffers are made anew: what it moves, 2 or 4 MiB a layer, stays in the processor's
caches, and where in memory it lies makes two floors that do the same differ by a third."""
CAPACITY = 32768
"""Cells of the cache that decodes from empty."""


class OursOnMlx(Decoding):
    """All layers in one evaluation, on the backend's stream, as engines decode. The views of the step before
    are still held.
    """

    held: Any = None

    def prepare(self) -> None:
        """The pass, and what it reads: the mask, which the first ``get`` would make, is timed apart."""
        self.start()
        if self.at:
            assert self.cache._pass is not None
            self.cache._pass.reading.shared(self.ctx)
            self._drain()

    def step(self) -> None:
        views, backend = [], self.backend
        with backend.shared_stream():  # type: ignore[attr-defined]
            for i in range(self.layers):
                key, value = self.layer(i)
                # What attention does with them: an array each, for as long as the step lasts.
                views.append((key, value, key.read(), value.read()))  # type: ignore[attr-defined]
        self.held = [pair[:2] for pair in views]
        del views
        self._drain()

    def _drain(self) -> None:
        backend: Any = self.backend
        backend.work.drain(backend.work.epoch)


@dataclass(frozen=True, slots=True)
class Framework:
    """``hand``: floors and peers; a step's time is spread over ``per`` layers."""

    name: str
    hand: Any
    ours: type[Decoding]
    per: int
    eager: bool

    def decoding(self, *args: Any, **options: Any) -> Contender:
        return self.ours(*args, **{"layers": self.hand.LAYERS, **options}).contender()

    def interleave(self, contenders: dict[str, Contender], rounds: int, **options: Any) -> Trial:
        return interleave(contenders, rounds, own_threads=self.eager, **options)


@dataclass(frozen=True, slots=True)
class Case:
    """A step that puts ``new`` tokens after ``history``; ``grow`` and ``window`` as Decoding has them."""

    name: str
    dtype: str
    history: int
    new: int
    grow: bool = True
    window: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int, str, bool, int]:
        """As floors and peers take it."""
        return self.history, self.new, HEADS, DIM, self.dtype, self.grow, self.window


def opened(framework: str) -> tuple[ml.Backend, Framework]:
    hand = floors_for(framework)
    if framework == "torch":
        hand.fix_threads(1)
        found = Framework(framework, hand, Decoding, LAYERS - 1, True)
    else:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        found = Framework(framework, hand, OursOnMlx, hand.LAYERS, False)
    return ml.open_backend(framework, device="cpu"), found


def run(quick: bool, framework: str) -> Iterator[Row]:
    backend, on = opened(framework)
    for case in cases(quick):
        yield from _measure(backend, on, case, quick)
    if framework == "mlx":
        yield from _deep(backend, on, 20 if quick else 200)
        yield from tail(quick, framework)


def cases(quick: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        for history in (128, 8192) if quick else LENGTHS:
            yield Case(f"put + get, 1 token, {history}", dtype, history, 1)
        if not quick:
            yield Case(f"put + get, 1 token, window {WINDOW}, 32768", dtype, 32768, 1, window=WINDOW)
        yield Case("put + get, 512 tokens, 8192", dtype, 8192, 512, grow=False)


def _measure(backend: ml.Backend, on: Framework, case: Case, quick: bool) -> Iterator[Row]:
    rounds = 60 if quick else 200 if case.new == 1 else 120
    group = f"{on.name} {case.dtype}"

    def peers() -> dict[str, Contender]:
        return dict(on.hand.peers(*case.shape))

    static = [name for name in peers() if "StaticCache" in name and not case.window]

    def make() -> dict[str, Contender]:
        made = dict(on.hand.floors(*case.shape))
        options = {"grow": case.grow, "window": case.window}
        made["ours"] = on.decoding(backend, case.history, case.new, DTYPES[case.dtype], **options)
        return made | {name: peer for name, peer in peers().items() if name in static}

    trial, contenders = _drawn(on, case, make, rounds)
    yield from rows_of(group, case.name, trial, per=on.per)
    # By themselves: they copy the history at each step, and whoever runs next finds the caches empty.
    for name, peer in peers().items():
        if name in static:
            continue
        beside = {trial.floor: contenders[trial.floor], name: peer}
        apart = on.interleave(beside, rounds // 4, warmup=2, seconds=0.3 if quick else 3)
        worst = max(apart.times[name]) / statistics.median(apart.times[name])
        rows = rows_of(group, case.name, apart, per=on.per)
        yield from (
            replace(row, note=f"worst step {worst:.0f} x its median") for row in rows if row.contender == name
        )


def _drawn(
    on: Framework, case: Case, make: Callable[[], dict[str, Contender]], rounds: int
) -> tuple[Trial, dict[str, Contender]]:
    """``rounds`` of the contenders that ``make`` gives, a chunk's in DRAWS parts; and the last of them."""
    draws = DRAWS if case.new > 1 else 1
    contenders: dict[str, Contender] = {}
    trials: list[Trial] = []
    for _ in range(draws):
        contenders.clear()  # and their buffers
        contenders = make()
        trials.append(on.interleave(contenders, rounds // draws, floors=on.hand.FLOORS, seconds=20))
    return joined(trials, on.hand.FLOORS), contenders


def _deep(backend: ml.Backend, on: Framework, rounds: int) -> Iterator[Row]:
    """24 layers in one evaluation: what a step costs once is spread over more of them."""
    layers = 24
    floor = on.hand.Slices(2048, 1, HEADS, DIM, "bfloat16", grow=True, layers=layers)
    ours = on.decoding(backend, 2048, 1, ml.DType.BF16, layers=layers)
    trial = on.interleave({on.hand.FLOORS[0]: floor.contender(), "ours": ours}, rounds, seconds=20)
    yield from rows_of(f"{on.name} bfloat16", "put + get, 1 token, 2048, 24 layers", trial, per=layers)


def tail(quick: bool, framework: str) -> Iterator[Row]:
    """The slowest of 5,000 steps from an empty cache of 32k: growth, page faults, garbage."""
    backend, on = opened(framework)
    for dtype in DTYPES:
        floor = getattr(on.hand, "Strided" if on.eager else "Slices")(0, 1, HEADS, DIM, dtype, grow=True)
        floor.resize(CAPACITY)
        contenders = {
            on.hand.FLOORS[0]: floor.contender(),
            "ours": on.decoding(backend, 0, 1, DTYPES[dtype], capacity=CAPACITY),
        }
        growing = ("mlx-lm KVCache",)
        peers = on.hand.peers(1, 1, HEADS, DIM, dtype)
        contenders |= {name: peer for name, peer in peers.items() if name in growing}
        trial = on.interleave(contenders, 1000 if quick else 5000, seconds=90)
        base = _quantile(trial.times[on.hand.FLOORS[0]])
        for name, values in trial.times.items():
            slow, worst = _quantile(values), max(values) / on.per
            yield Row(
                f"{on.name} {dtype}",
                f"decode from empty, p99.9 of {len(values)} steps",
                name,
                slow / on.per,
                worst,
                worst,
                slow / base,
                rounds=len(values),
                dropped=trial.dropped,
                target=2.0 if name == "ours" else None,
                note="p99.9; the worst step",
            )


def _quantile(values: list[float], q: float = 0.999) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
