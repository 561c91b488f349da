"""What ``kvcache bench`` measures: decoding through a cache, on the user's backend and machine.

The floors (hand-written writes and views) and the caches of other runtimes use a framework directly: they are
in kvcache/integrations/bench_*.py and are loaded by the backend's name if its framework is installed. Other
CPU backends are compared with NumPy. A row without a floor says why.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml
from kvcache.attention.step_reads import StepReads
from kvcache.cache import Batch, CacheDType
from kvcache.caches.causal import CausalCache
from kvcache.caches.windows import SlidingWindowCache
from kvcache.testing.bench import by_hand
from kvcache.testing.bench.batch import CASES, BatchDecoding, Case, fill
from kvcache.testing.bench.batch import LAYERS as BATCH_LAYERS
from kvcache.testing.bench.timing import Contender, Trial, interleave
from kvcache.views.words import counted

HEADS = 8
"""KV heads of a layer, as many as there are query heads."""
DIM = 128
"""Numbers of a head."""
LAYERS = 4
"""The first layer includes the preparation of a step; the others are timed together."""
ROOM = 2048
"""Cells beyond the history, for steps that append."""
APART = "ours, a pass for each"
_LENGTHS = (128, 1024, 8192, 32768)
_NAMES = {ml.DType.F32: "float32", ml.DType.F16: "float16", ml.DType.BF16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one contender: median, 10th and 90th percentile, and the ratio to the floor.

    For batches, the ratio of one pass per sequence is to one pass for all.
    """

    measurement: str
    contender: str
    median: float
    low: float
    high: float
    ratio: float | None
    rounds: int
    dropped: int
    reads: StepReads | None = None
    """What a step of a batch reads in each layer."""
    no_floor: str = ""
    """Why there is no ratio."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def shown(row: Measured) -> str:
    """Microseconds per layer, and the multiple of the floor; for a batch, a second line says what it
    reads.
    """
    times = f"{row.median:12,.1f} us [{row.low:,.1f}, {row.high:,.1f}]"
    what = "one pass" if row.contender == APART else "floor"
    ratio = f"  ({row.no_floor})" if row.ratio is None else f"  {row.ratio:,.2f} x {what}"
    first = f"{row.measurement:32} {row.contender:40} {times:40}{ratio}".rstrip()
    if (reads := row.reads) is None:
        return first
    calls = counted(reads.calls, "call")
    return (
        f"{first}\n{'':32} reads {reads.cells:,} cells in {calls}: {reads.shared:,} once for several "
        f"sequences ({reads.saved:,} saved), {reads.gathered:,} gathered, {reads.padding:,} padding"
    )


class Decoding:
    """One sequence after ``history`` tokens; a step puts ``new`` tokens into every layer and gets them all.

    ``start_forward`` and the first layer are the preparation, so that work done once per pass is not timed.
    ``grow``: steps append; otherwise each step's tokens are removed again. ``window``: the number of
    positions that a query sees, including its own; 0: all. ``capacity`` 0: the history, and room for the
    steps of a trial. K and V are put as ``dtype``, and stored as ``stored`` (None: as ``dtype``).
    """

    def __init__(
        self,
        backend: ml.Backend,
        history: int,
        new: int,
        dtype: ml.DType,
        grow: bool = True,
        window: int = 0,
        capacity: int = 0,
        layers: int = LAYERS,
        stored: CacheDType | None = None,
    ) -> None:
        self.backend, self.new, self.grow, self.at = backend, new, grow, history
        self.layers = layers
        self.ctx = backend.new_context()
        capacity = capacity or history + (ROOM if grow else new)
        self.cache = SlidingWindowCache(window - 1) if window else CausalCache()
        self.cache.init(backend, stored or dtype, 1, capacity, max(new, min(history, 512)))
        # Head-major, as models pass it after rotary embedding.
        self.token = self.ctx.full((HEADS, new, DIM), 1, dtype).permute(self.ctx, 1, 0, 2)
        fill(self.cache, self.ctx, self.ctx.full((512, HEADS, DIM), 0.5, dtype), layers, 0, history)

    def start(self) -> None:
        self.cache.start_forward(self.ctx, Batch(range(self.at, self.at + self.new), [0] * self.new))

    def prepare(self) -> None:
        self.start()
        self.layer(0)

    def step(self) -> Any:
        """Put the tokens; returns native K and V of all layers but the first."""
        natives = []
        for i in range(1, self.layers):
            key, value = self.layer(i)
            natives.append((key.native, value.native))
        return natives

    def layer(self, i: int) -> tuple[ml.Tensor, ml.Tensor]:
        cache, ctx, token = self.cache, self.ctx, self.token
        cache.set_layer(i)
        cache.put(ctx, token, token)
        key, value, _ = cache.get(ctx)
        return key, value

    def finish(self) -> None:
        if self.grow:
            self.at += self.new
        else:
            self.cache.remove(0, self.at)

    def contender(self) -> Contender:
        return Contender(self.step, self.prepare, self.finish)


class _Evaluated(Decoding):
    """A step of all layers until a row is in host memory, for lazy backends and devices."""

    def prepare(self) -> None:
        self.start()

    def step(self) -> Any:
        views = [self.layer(i) for i in range(self.layers)]
        self.ctx.compute()
        last = views[-1][0]
        return last.slice(self.ctx, 0, last.shape[0] - 1, last.shape[0]).to_numpy()


def measure(
    backend: ml.Backend,
    dtype: ml.DType,
    quick: bool = False,
    lengths: Sequence[int] = (),
    prompted: int = 8192,
    peers: bool = True,
    stored: CacheDType | None = None,
    cases: Sequence[Case] = CASES,
) -> Iterator[Measured]:
    """Measure put and get after each of ``lengths`` and of a chunk of 512 after ``prompted``, start_forward,
    and batches. ``peers``: also measure the installed caches of other runtimes. These store ``dtype``; this
    library's caches store ``stored`` (None: ``dtype``).

    Each contender allocates four layers: 64 KiB per token of history in F32.
    """
    hand = _by_hand(backend)
    for history in lengths or (_LENGTHS[:3:2] if quick else _LENGTHS):
        yield from _steps(backend, hand, dtype, history, 1, quick, peers, stored)
    yield from _steps(backend, hand, dtype, prompted, 512, quick, peers, stored)
    for history in (1024, 32768):
        yield _start_forward(backend, dtype, history)
    with contextlib.suppress(ml.NotSupportedError):  # a backend that only stores does not attend
        for case in cases:
            yield from _batch(backend, case, dtype, quick, stored)


def _by_hand(backend: ml.Backend) -> Any:
    """The module of floors and peers for this backend, or NumPy's; None if the device is not a CPU."""
    if backend.devices[0].kind != "cpu":
        return None
    try:
        return floors_for(backend.name)
    except ImportError:
        return by_hand


def floors_for(name: str) -> Any:
    """The module of what a backend is compared with, by the backend's name.

    ``floors(history, new, heads, dim, dtype, grow, window)`` are writes and views by hand, ``peers`` with
    these arguments the installed caches of other runtimes: contenders by name. ``FLOORS`` names the floors.
    Raises ImportError if there is no such module, or if its framework is not installed.
    """
    return importlib.import_module(f"kvcache.integrations.bench_{name}")


def _steps(
    backend: ml.Backend, hand: Any, dtype: ml.DType, history: int, new: int, quick: bool, compare: bool,
    stored: CacheDType | None,
) -> Iterator[Measured]:  # fmt: skip
    grow, name = new == 1, f"put + get of {new} after {history}"
    eager = hand is not None and hand.EAGER
    layers = LAYERS if hand is None else hand.LAYERS
    kind = Decoding if eager else _Evaluated
    ours = kind(backend, history, new, dtype, grow, layers=layers, stored=stored)
    contenders: dict[str, Contender] = {"ours": ours.contender()}
    peers: dict[str, Contender] = {}
    floors: tuple[str, ...] = ("ours",)
    if hand is not None and dtype in _NAMES:
        shape = (history, new, HEADS, DIM, _NAMES[dtype], grow)
        floors = hand.FLOORS
        contenders = {**hand.floors(*shape), **contenders}
        peers = hand.peers(*shape) if compare else {}
    rounds = 40 if quick else 200
    trial = interleave(contenders, rounds, floors=floors, seconds=10, own_threads=eager)
    layers -= eager
    why = "" if contenders.keys() > {"ours"} else _no_floor(hand, dtype)
    for key in trial.times:
        yield _row(name, key, trial, layers, no_floor=why)
    for key, peer in peers.items():
        beside = {trial.floor: contenders[trial.floor], key: peer}
        apart = interleave(beside, rounds // 4, warmup=2, seconds=1, own_threads=eager)
        yield _row(name, key, apart, layers)


def _no_floor(hand: Any, dtype: ml.DType) -> str:
    """Why there is no hand-written floor."""
    return "no floor: only on a CPU" if hand is None else f"no floor: not available for {dtype.name}"


def _row(
    name: str, key: str, trial: Trial, layers: int, no_floor: str = "", reads: StepReads | None = None
) -> Measured:
    """A contender's times per layer, and their ratio to the floor unless ``no_floor`` says why there is
    none.
    """
    sample = trial.sample(key)
    times = (sample.median / layers, sample.low / layers, sample.high / layers)
    ratio = None if no_floor else sample.ratio
    return Measured(name, key, *times, ratio, len(trial.times[key]), trial.dropped, reads, no_floor)


def _start_forward(backend: ml.Backend, dtype: ml.DType, history: int) -> Measured:
    """Measure only ``start_forward`` of one token after ``history``; without a ``put`` nothing is
    allocated.
    """
    cache = CausalCache()
    rounds = 200
    cache.init(backend, dtype, 1, history + rounds, history)
    times = []
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(history), [0] * history))
        for i in range(rounds):
            batch = Batch([history + i], [0])
            began = time.perf_counter()
            cache.start_forward(ctx, batch)
            times.append((time.perf_counter() - began) * 1e6)
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    name = f"start_forward of 1 after {history}"
    why = "no floor: the host's bookkeeping, whatever the backend"
    return Measured(
        name, "ours", statistics.median(times), cuts[0], cuts[-1], None, len(times), 0, no_floor=why
    )


def _batch(
    backend: ml.Backend, case: Case, dtype: ml.DType, quick: bool, stored: CacheDType | None
) -> Iterator[Measured]:
    """Measure one pass for all sequences of a case, and one pass for each of them."""
    together, apart = (BatchDecoding(backend, case, dtype, stored) for _ in range(2))
    contenders = {"ours": together.together(), APART: apart.one_by_one()}
    rounds, seconds = (10, 2) if quick else (50, 10)
    reads = together.reads
    trial = interleave(contenders, rounds, warmup=2, seconds=seconds, own_threads=False)
    why = "no floor: attention is the backend's"
    yield _row(case.name, "ours", trial, BATCH_LAYERS, why, reads)
    yield _row(case.name, APART, trial, BATCH_LAYERS)
