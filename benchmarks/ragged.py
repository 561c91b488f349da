"""Attention of many sequences at once, which share prefixes or not: ``python -m benchmarks.ragged``.

Contenders take turns within one run, so that ratios count; floors are written by hand (``ragged_hand``).
The engine's tokens per second are compared between two checkouts by running this in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ml
from benchmarks import ragged_hand as hand
from benchmarks.counted import CountingBackend, CountingRaggedBackend
from benchmarks.pages import DOCS, load, save
from benchmarks.ragged_engine import engine, peers
from benchmarks.ragged_hand import DIM, GROWTH, HEADS, KV, SCALE, Case, Hand, Ops
from benchmarks.report import Row, rows_of, summary
from benchmarks.timing import machine
from kvcache import Batch, CausalCache
from kvcache.testing.bench import Contender, Trial, interleave
from kvcache_engine import bundled_model

RECORD = "ragged.json"
CELLS = 1 << 19
"""Of a cache at most: 1 GiB a layer. Sequences share them, so that one may be longer than its part."""
LARGE = 1 << 28
"""Bytes of K and V in a layer from which on fewer layers are timed."""
PARTS = ("shared", "ragged", "one", "read", "engine", "peers")


class Ours:
    """A CausalCache of the case, shared tokens by ``copy_prefix``; used as ``Hand`` is."""

    def __init__(self, ops: Ops, backend: ml.Backend, case: Case, layers: int) -> None:
        self.ops, self.case, self.grown, self.layers = ops, case, 0, layers
        self.ctx, self.cache = backend.new_context(), CausalCache()
        capacity = min(case.shared + case.capacity, max(1, CELLS // case.sequences))
        self.cache.init(backend, ml.DType.F32, case.sequences, capacity, 512)
        at = 0
        for (tokens, readers), host in zip(case.levels, case.prefixes, strict=True):
            for first in range(0, case.sequences, readers):
                self._fill(first, at, host[first // readers])
            at += tokens
            for seq in range(case.sequences):
                if seq % readers:
                    self.cache.copy_prefix(seq - seq % readers, seq, at)
        for seq, count in enumerate(case.own):
            self._fill(seq, at, case.tails[seq, :, :count])
        self.ends = at + np.array(case.own)

    def _fill(self, seq: int, at: int, host: np.ndarray) -> None:
        """Store (heads, tokens, dim) from position ``at`` on, in chunks as a prompt is."""
        for begin in range(0, host.shape[1], 512):
            part = self.ctx.from_numpy(host[:, begin : begin + 512].swapaxes(0, 1))
            count = part.shape[0]
            self.cache.start_forward(self.ctx, Batch(range(at + begin, at + begin + count), [seq] * count))
            for layer in range(self.layers):
                self.cache.set_layer(layer)
                self.cache.put(self.ctx, part, part)
            self.ctx.compute()

    def give(self, query: np.ndarray, token: np.ndarray) -> Ours:
        """What every step attends with and stores."""
        native = self.ops.native
        self.query, self.token = self.ctx.from_native(native(query)), self.ctx.from_native(native(token))
        return self

    def start(self) -> None:
        positions = (self.ends + self.grown).tolist()
        self.cache.start_forward(self.ctx, Batch(positions, list(range(self.case.sequences))))

    def layer(self, i: int) -> Any:
        self.cache.set_layer(i)
        self.cache.put(self.ctx, self.token, self.token)
        return self.cache.attend(self.ctx, self.query, SCALE).native

    def done(self, found: Any) -> object:
        return self.ops.done(found)

    def finish(self) -> None:
        self.grown = (self.grown + 1) % GROWTH
        if not self.grown:
            for seq, end in enumerate(self.ends.tolist()):
                self.cache.remove(seq, end)


class BatchKVCache(Hand):
    """mlx-lm's cache of its batch generator: every row padded on the left to the longest."""

    def tensors(self) -> list[np.ndarray]:
        return []

    def start(self) -> None:
        from mlx_lm.models.cache import BatchKVCache as Cache

        case = self.case
        if not self.layers[0]:
            most = max(case.own)
            rows = [np.roll(case.tails[i, :, :most], most - n, 1) for i, n in enumerate(case.own)]
            host = self.ops.native(np.stack(rows))
            for caches in self.layers:
                caches.append(Cache([most - count for count in case.own]))
                self.ops.done(caches[0].update_and_fetch(host, host))
            self.new = self.token[:, :, None]
        self.mask = self.layers[0][0].make_mask(1)

    def layer(self, i: int) -> Any:
        k, v = self.layers[i][0].update_and_fetch(self.new, self.new)
        query = self.query.reshape(self.case.sequences, HEADS, 1, DIM)
        return self.ops.attend(query, k, v, self.mask).reshape(-1, HEADS, DIM)

    def finish(self) -> None:
        super().finish()
        if not self.grown:
            for (cache,) in self.layers:
                cache.trim(GROWTH)


class Steps:
    """A decode step over the layers. Where work is done at once, the first one only prepares it."""

    def __init__(self, subject: Any, layers: int, eager: bool) -> None:
        self.subject, self.timed, self.eager = subject, range(int(eager), layers), eager
        self.starts: list[float] = []
        self.firsts: list[float] = []

    def prepare(self) -> None:
        began = time.perf_counter()
        self.subject.start()
        self.starts.append((time.perf_counter() - began) * 1e6)
        if self.eager:
            self.subject.layer(0)
            self.firsts.append((time.perf_counter() - began) * 1e6 - self.starts[-1])

    def step(self) -> list[Any]:
        found = [self.subject.layer(i) for i in self.timed]
        self.subject.done(found)
        return found

    def contender(self) -> Contender:
        return Contender(self.step, self.prepare, self.subject.finish)


def shared(quick: bool) -> Iterator[Case]:
    for tokens in (100, 1000) if quick else (100, 1000, 8000):
        for readers in (2, 8, 64) if quick else (2, 8, 64, 256):
            yield Case(f"{readers} readers of {tokens}", (20,) * readers, ((tokens, readers),))
    yield Case("64 readers of 1000, by eights of 500 more", (20,) * 64, ((1000, 64), (500, 8)))


def ragged(quick: bool) -> Iterator[Case]:
    draw = np.random.default_rng(0)
    for count in (5, 32) if quick else (5, 32, 64, 256):
        yield Case(f"{count} sequences of 10 to 120", tuple(draw.integers(10, 121, count).tolist()))
    for count in (32,) if quick else (32, 64):
        yield Case(f"{count} sequences of 100 to 2000", tuple(draw.integers(100, 2001, count).tolist()))
    if not quick:
        yield Case("one of 8000, 63 of 10 to 120", (8000, *draw.integers(10, 121, 63).tolist()))


def one(quick: bool) -> Iterator[Case]:
    for tokens in (128, 1024) if quick else (128, 1024, 8192):
        yield Case(f"1 sequence of {tokens}", (tokens,))


CASES = {"shared": shared, "ragged": ragged, "one": one}
FLOORS: dict[str, dict[str, type[Hand]]] = {
    "shared": {"floor (cascade)": hand.Cascade, "loop over copies": hand.Loop},
    "ragged": {"floor (loop)": hand.Loop, "floor (padded)": hand.Padded},
    "one": {"floor (one call)": hand.Padded},
}


def measure(part: str, case: Case, backend: ml.Backend, ops: Ops, quick: bool) -> Iterator[Row]:
    large = KV * DIM * 8 * (case.sequences * case.capacity + case.shared * case.sequences) > LARGE
    layers = 2 if large else 4 if ops.lazy else 3
    random = np.random.default_rng(9)
    query = random.standard_normal((case.sequences, HEADS, DIM), np.float32)
    token = random.standard_normal((case.sequences, KV, DIM), np.float32)
    kinds = dict(FLOORS[part])
    if part == "ragged" and ops.lazy and importlib.util.find_spec("mlx_lm"):
        kinds["mlx-lm BatchKVCache"] = BatchKVCache
    steps = {
        name: Steps(kind(ops, case, layers, query, token), layers, not ops.lazy)
        for name, kind in kinds.items()
    }
    steps["ours"] = Steps(Ours(ops, backend, case, layers).give(query, token), layers, not ops.lazy)
    _check(case, steps)
    floors = [name for name in kinds if name.startswith("floor")]
    trial = interleave(
        {name: step.contender() for name, step in steps.items()}, 20 if quick else 60, 3, floors,
        seconds=1.0 if quick else 8.0, own_threads=not ops.lazy,
    )  # fmt: skip
    group, mine = f"{backend.name} float32", steps["ours"]
    for row in rows_of(group, f"{part}, {case.name}", trial, per=len(mine.timed)):
        yield dataclasses.replace(row, note=_beside(trial)) if row.contender == "ours" else row
    yield summary(group, f"{part}, {case.name}", "ours, start_forward", mine.starts, note="once per pass")
    if mine.firsts:
        yield summary(group, f"{part}, {case.name}", "ours, first layer", mine.firsts, note="once per pass")


def _beside(trial: Trial) -> str:
    """Ours as a multiple of each that is not the floor."""
    others = [name for name in trial.times if name not in ("ours", trial.floor)]
    pairs = {name: zip(trial.times["ours"], trial.times[name], strict=True) for name in others}
    return ", ".join(
        f"{statistics.median(a / b for a, b in pair):.2f}x {name.removeprefix('floor ')}"
        for name, pair in pairs.items()
    )


def _check(case: Case, steps: dict[str, Steps]) -> None:
    """Let all take one step, and compare what they give; a loop over fewer copies gives fewer answers."""
    found = {}
    for name, step in steps.items():
        step.prepare()
        found[name] = np.asarray(step.step()[-1])
        step.subject.finish()
    for name, step in steps.items():
        rows = min(case.sequences, len(getattr(step.subject, "counts", case.own)))
        np.testing.assert_allclose(found[name][:rows], found["ours"][:rows], atol=1e-4, err_msg=name)


def read(quick: bool) -> Iterator[Row]:
    """Bytes that a step reads of a layer beside those that are there, and calls, counted on NumPy."""
    for part in ("shared", "ragged"):
        for case in CASES[part](quick):
            for who, kind in {"by calls": CountingBackend, "by a kernel": CountingRaggedBackend}.items():
                with kind() as counting:
                    yield from counts(f"{part}, {case.name}", case, counting, f"ours, {who}")


def counts(name: str, case: Case, backend: CountingBackend, who: str) -> Iterator[Row]:
    """Of the second layer: the first one also makes masks."""
    ours = Ours(Ops(), backend, case, 2)
    ours.give(*(np.ones((case.sequences, heads, DIM), np.float32) for heads in (HEADS, KV)))
    ours.start()
    ours.layer(0)
    backend.count(ours.cache, lambda: ours.layer(1))
    read, ratio = backend.read / 2**20, backend.read / case.distinct
    note = f"distinct: {case.distinct / 2**20:.3g} MiB"
    yield Row("counted", f"{name}: read", who, read, ratio=ratio, unit="MiB", note=note)
    yield Row("counted", f"{name}: put and attend", who, backend.calls, unit="calls")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    ops, quick = hand.ops_of(options.backend), options.quick
    ops.one_thread()
    with ml.open_backend(options.backend, device="cpu") as backend:
        for part in options.parts:
            if part in CASES:
                for case in CASES[part](quick):
                    yield from measure(part, case, backend, ops, quick)
            elif part == "read":
                yield from read(quick)
            elif part == "engine":
                yield from engine(backend, options.model, quick)
            elif options.backend == "torch":
                if importlib.util.find_spec("transformers"):
                    yield from peers(backend, quick)
                else:
                    print("peers: transformers is not installed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; a glance, no result")
    parser.add_argument("--backend", choices=["torch", "numpy", "mlx"], default="torch")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--model", type=Path, default=bundled_model(), help="the engine's; a Hugging Face folder"
    )
    parser.add_argument("--out", type=Path, default=DOCS / "benchmarks" / RECORD, help="JSON, added to")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # which NumPy and MLX read when they are imported
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.ragged", *sys.argv[1:]], one_thread)
    began, found = time.perf_counter(), []
    for row in rows(options):
        found.append(row)
        ratio = "" if row.ratio is None else f"  {row.ratio:.2f}x"
        spread = f" [{row.low:,.1f}, {row.high:,.1f}]" if row.high else ""
        print(
            f"{row.measurement} | {row.contender}: {row.median:,.1f}{spread} {row.unit}{ratio}  {row.note}",
            flush=True,
        )
        parts = load(options.out).get("parts", {})
        parts[options.backend] = {
            "quick": options.quick, "seconds": time.perf_counter() - began,
            "rows": [list(dataclasses.astuple(row)) for row in found],
        }  # fmt: skip
        save(options.out, {"machine": machine(), "parts": parts})


if __name__ == "__main__":
    main()
