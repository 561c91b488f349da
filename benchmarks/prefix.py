"""Prefix reuse: conversations in turn, restoring, and finding a prefix: ``python -m benchmarks.prefix``."""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvcache
import ml
from benchmarks.models import SMALL, random_model
from benchmarks.pages import milliseconds, show
from benchmarks.timing import machine
from kvcache import Batch, HostTier, PrefixCache, serialize
from kvcache.prefix import loading as arriving
from kvcache.prefix.loading import restore_serialized
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.stores import FileStore
from kvcache.testing.bench import Contender, Trial, interleave
from kvcache_engine.loading import load_model

MIB = 1 << 20


@dataclass(slots=True)
class Talk:
    """What a run of conversations came to."""

    prompts: int = 0
    evaluated: int = 0
    ideal: int = 0
    gains: list[float] = field(default_factory=list)
    """Processor time to the first token from nothing, in times of that with the cache; every 25th prompt."""
    host_peak: int = 0
    growth: int = 0


def talk(backend: ml.Backend, folder: Path, conversations: int, turns: int, system: int, budget: int) -> Talk:
    """Let conversations that share a system prompt take turns, and count what is computed."""
    model = load_model(folder, backend, ml.DType.F32)
    random = np.random.default_rng(1)
    shared = random.integers(0, 2048, system).tolist()
    histories = [list(shared) for _ in range(conversations)]
    cache, found = _cache(backend, model, system), Talk()
    seen: dict[int, Any] = {}
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with PrefixCache(cache, tiers=(HostTier(budget),)) as prefix:
        for turn in range(turns):
            for i, history in enumerate(histories):
                history += random.integers(0, 2048, 30).tolist()
                found.ideal += len(history) - walk(seen, history, len(history) - 1)[0]
                start = time.process_time()
                with prefix.begin(history) as session:
                    _evaluate(backend, model, cache, session.seq, session.cached, session.remaining)
                    spent = time.process_time() - start
                    found.evaluated += len(session.remaining)
                    answer = random.integers(0, 2048, 20).tolist()
                    session.extend(answer)
                    _evaluate(backend, model, cache, session.seq, len(history), answer)
                found.prompts += len(history)
                if (turn * conversations + i) % 25 == 7:
                    found.gains.append(_from_nothing(backend, model, system, history) / spent)
                history += answer
                walk(seen, history)
                found.host_peak = max(found.host_peak, prefix.nbytes["host"])
    found.growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) * 1024
    return found


def walk(tree: dict[int, Any], tokens: Sequence[int], most: int = 0) -> tuple[int, int]:
    """(leading tokens that were there, ``most`` at most; tokens that are added)."""
    known = 0
    for token in tokens:
        if token not in tree:
            break
        tree = tree[token]
        known += 1
    for token in tokens[known:]:
        tree[token] = tree = {}
    return min(known, most), len(tokens) - known


def _cache(backend: ml.Backend, model: object, system: int) -> kvcache.CausalCache:
    cache = kvcache.CausalCache()
    cache.init(backend, ml.DType.F32, 2, 2 * system + 2048, 512)
    return cache


def _evaluate(
    backend: ml.Backend, model, cache: kvcache.CausalCache, seq: int, begin: int, tokens: Sequence[int]
) -> None:
    for start in range(0, len(tokens), 512):
        part = list(tokens[start : start + 512])
        positions = range(begin + start, begin + start + len(part))
        with backend.new_context() as ctx:
            batch = Batch(positions, [seq] * len(part), inputs=part, outputs=[len(part) - 1])
            cache.start_forward(ctx, batch)
            ctx.compute(model.forward(ctx, batch, cache))


def _from_nothing(backend: ml.Backend, model, system: int, tokens: list[int]) -> float:
    cache = _cache(backend, model, system)
    _evaluate(backend, model, cache, 0, 0, tokens[:64])  # its buffers are there then
    cache.remove(0, 0)
    start = time.process_time()
    _evaluate(backend, model, cache, 0, 0, tokens)
    spent = time.process_time() - start
    cache.close()
    return spent


# Restoring.

LAYERS, HEADS, DIM = 4, 8, 128


def _filled(backend: ml.Backend, dtype: ml.DType, count: int) -> kvcache.CausalCache:
    cache = kvcache.CausalCache()
    cache.init(backend, dtype, 2, count + 1, count + 1)
    with backend.new_context() as ctx:
        host = np.random.default_rng(0).normal(size=(count, HEADS, DIM)).astype(np.float32)
        for seq in range(2):  # both touched: page faults are no part of a restore
            cache.start_forward(ctx, Batch(range(count), [seq] * count))
            for layer in range(LAYERS):
                cache.set_layer(layer)
                cache.put(ctx, ctx.from_numpy(host), ctx.from_numpy(host))
        ctx.compute()
    return cache


def from_host(backend: ml.Backend, dtype: ml.DType, count: int, rounds: int) -> Trial:
    """A sequence of ``count`` tokens from host memory, beside a copy of the same bytes."""
    cache = _filled(backend, dtype, count)
    page = serialize(backend, cache.snapshot(0))
    arrays = [array for name, array in page.arrays.items() if name != "positions"]
    copies = [np.ones_like(array) for array in arrays]

    def copy() -> None:
        for target, array in zip(copies, arrays, strict=True):
            np.copyto(target.view(np.uint8), array.view(np.uint8))

    def restore() -> None:
        if not restore_serialized(cache, 1, [page]):
            raise AssertionError("the page was not restored")

    def enter() -> None:
        with backend.new_context() as ctx:
            ctx.compute(*(ctx.from_numpy(array) for array in arrays))

    contenders = {
        "memcpy": Contender(copy),
        "restore": Contender(restore, lambda: cache.remove(1, 0)),
        "from_numpy": Contender(enter),
    }
    trial = interleave(contenders, rounds)
    cache.close()
    return trial


def from_disk(backend: ml.Backend, dtype: ml.DType, count: int, rounds: int, chunk: int) -> Trial:
    """The same from a FileStore, beside reading its files (which lie in the system's page cache)."""
    tokens = list(range(count + 1))
    with tempfile.TemporaryDirectory() as folder, FileStore(folder, durable=False) as store:
        cache = _filled(backend, dtype, count)
        cache.remove(0, 0)
        cache.remove(1, 0)
        prefix = PrefixCache(cache, tiers=(store,), identity={"model": "benchmark"}, block_size=chunk)
        host = np.random.default_rng(0).normal(size=(count, HEADS, DIM)).astype(np.float32)
        with prefix.begin(tokens) as session, backend.new_context() as ctx:
            cache.start_forward(ctx, Batch(range(count), [session.seq] * count))
            for layer in range(LAYERS):
                cache.set_layer(layer)
                cache.put(ctx, ctx.from_numpy(host), ctx.from_numpy(host))
            ctx.compute()
        prefix.flush()
        paths = sorted(Path(folder).rglob("*.entry"))
        buffers = [np.ones(path.stat().st_size, np.uint8) for path in paths]

        ctx = backend.new_context()
        theirs = [ctx.zeros((buffer.size,), ml.DType.U8) for buffer in buffers]

        def read_there() -> None:
            if isinstance(backend, ml.SupportsHostMemory):
                _read(paths, [backend.overwrite(ctx, tensor) for tensor in theirs])

        def restore() -> None:
            session = prefix.begin(tokens)
            if session.cached != count:
                raise AssertionError(f"{session.cached} of {count} tokens were restored")
            session.close(keep=False)

        contenders = {
            "read": Contender(lambda: _read(paths, buffers)),
            "restore": Contender(restore, prefix.clear),
            "read there": Contender(read_there),
            "read_bytes": Contender(lambda: [path.read_bytes() for path in paths]),
        }
        trial = interleave(contenders, rounds)
        prefix.close(flush=False)
        cache.close()
    return trial


def _read(paths: Sequence[Path], buffers: Sequence[np.ndarray | None]) -> None:
    for path, buffer in zip(paths, buffers, strict=True):
        with open(path, "rb", buffering=0) as file:
            view, done = memoryview(buffer), 0  # type: ignore[arg-type]
            while done < len(view):
                done += file.readinto(view[done:]) or 0


def finding(nodes: int, length: int, rounds: int) -> Trial:
    """``begin`` with a prompt of ``length`` tokens whose path has 1,000 of the radix tree's ``nodes``."""
    backend = ml.open_backend("numpy")
    cache = kvcache.CausalCache()
    cache.init(backend, ml.DType.F16, 2, length + 1, length)
    prefix = PrefixCache(cache)
    random = np.random.default_rng(0)
    prompt = random.integers(0, 32_000, length)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(length - 1), [0] * (length - 1)))
        cache.set_layer(0)
        cache.put(ctx, *[ctx.zeros((length - 1, 1, 1), ml.DType.F16)] * 2)
    tree, step, path = prefix.tree, (length - 1) // 1000, []
    node = tree.radix_tree.root
    for i in range(1000):
        end = length - 1 if i == 999 else (i + 1) * step
        node = tree.radix_tree.add(node, prompt[i * step : end])
        path.append(node)
        _hold(tree, node, cache.snapshot(0, i * step, end))
    empty = cache.snapshot(0, 0, 0)
    count = 1000
    while count < nodes:
        parent = path[int(random.integers(1000))]
        tokens = random.integers(40_000, 10_000_000, 8)
        if int(tokens[0]) not in parent.children:
            _hold(tree, tree.radix_tree.add(parent, tokens), empty)
            count += 1
    cache.remove(0, 0)
    listed = prompt.tolist()

    def begin(tokens: object) -> None:
        session = prefix.begin(tokens)  # type: ignore[arg-type]
        if session.cached != length - 1:
            raise AssertionError(f"{session.cached} tokens of {length} were found")

    def close() -> None:
        prefix.sessions[0].close(keep=False)

    return interleave(
        {
            "begin, an array": Contender(lambda: begin(prompt), finish=close),
            "begin, a list": Contender(lambda: begin(listed), finish=close),
        },
        rounds,
    )


@dataclass(slots=True)
class Returning:
    """A conversation of ``count`` tokens that comes back: seconds of the processor, without passes.

    ``kind``: of full attention alone, of a hybrid with recurrent states, or of one with sliding windows; the
    hybrids have a snapshot every 512 tokens. ``array``: it is given as an array, not a list. ``host``: all of
    it lies in host memory each time that it comes back.
    """

    kind: str
    array: bool
    host: bool
    count: int
    converted: list[float] = field(default_factory=list)
    """``np.asarray`` of the prompt: what to take it in costs at least."""
    news: list[float] = field(default_factory=list)
    """``close`` of the session that computed it, which puts what lies inside into the tree."""
    begins: list[float] = field(default_factory=list)
    """``begin`` with it and one more token, and ``close`` of that."""
    closes: list[float] = field(default_factory=list)

    def turns(self) -> Iterator[None]:
        """Each time it is computed, comes back, and is forgotten; what that took is noted."""
        with ml.open_backend("numpy") as backend:
            cache, attention = self._cache(backend)
            with PrefixCache(cache, tiers=[HostTier("4GiB")] if self.host else ()) as prefix:
                for turn in itertools.count():
                    tokens: Any = [*range(self.count), self.count + turn]
                    tokens = np.array(tokens) if self.array else tokens
                    self.converted.append(_timed(lambda: np.asarray(tokens, np.int64).max())[0])  # noqa: B023
                    self.news.append(self._turn(prefix, attention, tokens[: self.count], 0)[1])
                    if self.host:
                        prefix.evict()
                    took = self._turn(prefix, attention, tokens, self.count)
                    self.begins.append(took[0])
                    self.closes.append(took[1])
                    prefix.clear()
                    yield

    def _cache(self, backend: ml.Backend) -> tuple[Any, Any]:
        """The cache, and the one in it of full attention."""
        full = kvcache.CausalCache()
        cache: Any = full
        if self.kind == "states":
            cache = kvcache.RecurrentCache((8, 3), (2, 4, 4))
            full = cache.attention
        elif self.kind == "windows":
            cache = kvcache.WrapperCache(full, kvcache.SlidingWindowCache(1023))
        cache.init(backend, ml.DType.F16, 2, self.count + 200, 512)
        return cache, full

    def _turn(self, prefix: PrefixCache, attention: Any, tokens: Any, known: int) -> tuple[float, float]:
        began, session = _timed(lambda: prefix.begin(tokens))
        if session.cached != min(known, len(tokens) - 1):
            raise AssertionError(f"{session.cached} of {known} tokens were found")
        for part in session.chunks(512):
            self._pass(prefix.cache, attention, session.seq, len(part))
        return began, _timed(session.close)[0]

    def _pass(self, cache: Any, attention: Any, seq: int, new: int) -> None:
        at = cache.offset(seq)
        with cache.backend.new_context() as ctx:
            cache.start_forward(ctx, Batch(range(at, at + new), [seq] * new))
            for kind, part in enumerate(getattr(cache, "caches", (attention,))):
                if isinstance(part, kvcache.CausalCache):
                    if part is not cache:
                        cache.set_layer_type(kind)
                    part.set_layer(0)
                    part.put(ctx, *[ctx.zeros((new, 1, 8), ml.DType.F16)] * 2)
            if self.kind == "states":
                cache.set_conv_state(ctx, 1, cache.conv_state(ctx, 1))
                cache.set_recurrent_state(ctx, 1, cache.recurrent_state(ctx, 1))


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    found = call()
    return time.thread_time() - start, found


def _show_returning(counts: Sequence[int], rounds: int) -> None:
    """In turn: a processor has faster and slower minutes. Of each the median, and times full attention's."""
    print("\n## a conversation that comes back: ms of the processor (and times full attention's)\n")
    rows = []
    for count, host, array in itertools.product(counts, (False, True), (False, True)):
        place = "host memory" if host else "the cache"
        given = f"{count:,}, {'an array' if array else 'a list'}, from {place}"
        kinds = [Returning(kind, array, host, count) for kind in ("full", "states", "windows")]
        turns = [kind.turns() for kind in kinds]
        for _ in range(rounds):
            for turn in turns:
                next(turn)
        for turn in turns:
            turn.close()
        full = kinds[0]
        for kind in kinds:
            shown = [f"{statistics.median(kind.converted) * 1e3:.2f}"]
            for name in ("news", "begins", "closes"):
                one, base = (statistics.median(getattr(of, name)) for of in (kind, full))
                shown.append(f"{one * 1e3:.2f}" if kind is full else f"{one * 1e3:.2f} ({one / base:.1f})")
            rows.append((f"{given}: {kind.kind}", *shown))
    show(("", "np.asarray", "close, new", "begin", "close"), rows)


def _hold(tree, node, snapshot) -> None:
    node.data = TreeEntry(node.begin, snapshot=snapshot)
    tree.device.add(node, snapshot.nbytes)


# The command.


def _show(title: str, trials: dict[str, Trial], floor: str) -> None:
    rows = []
    for what, trial in trials.items():
        one, other = trial.sample(floor), trial.sample("restore")
        times = f"{one.median / 1e3:,.1f}", milliseconds(other, 1), f"{other.ratio:.2f}"
        rows.append((what, *times, _alone(trial), str(trial.dropped)))
    print(f"## {title}\n")
    show(("what", "floor, ms", "restore, ms", "ratio", "alone, x floor", "rounds dropped"), rows)
    print()


def _alone(trial: Trial) -> str:
    """What it takes to hand the arrays to the framework; to read into its own memory, into fresh memory."""
    names = [name for name in ("from_numpy", "read there", "read_bytes") if name in trial.times]
    return ", ".join(f"{name} {trial.sample(name).ratio:.2f}" for name in names)


def _show_talk(found: Talk, args: argparse.Namespace) -> None:
    rows = [
        ("tokens of all prompts", f"{found.prompts:,}"),
        ("tokens evaluated", f"{found.evaluated:,}"),
        ("ideal: those that no earlier conversation had", f"{found.ideal:,}"),
        ("evaluated / ideal", f"{found.evaluated / found.ideal:.3f}"),
        (
            "time of the processor to the first token, from nothing / with the cache",
            f"{statistics.median(found.gains):.1f}",
        ),
        ("host tier: peak MiB of a budget of", f"{found.host_peak / MIB:.1f} of {args.budget}"),
        ("growth of the process's peak memory, MiB", f"{found.growth / MIB:.0f}"),
    ]
    told = (
        f"{args.conversations} conversations of {args.turns} turns, a system prompt of {args.system} tokens"
    )
    print(f"## {told} ({args.backend})\n")
    show(("", ""), rows)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["talk", "host", "disk", "begin", "returning"])
    parser.add_argument("--backend", default="numpy", help="of the conversations (numpy)")
    parser.add_argument("--restores", nargs="+", default=["numpy", "torch", "mlx"])
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system", type=int, default=2000)
    parser.add_argument("--budget", type=int, default=256, help="of the host tier, in MiB (256)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--returning", type=int, nargs="+", default=[32_768, 131_072], help="tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--readers", type=int, default=arriving.READERS, help="pages read at a time")
    args = parser.parse_args()
    arriving.READERS = args.readers
    print(f"{machine()}; NumPy {np.__version__}\n")
    if "talk" in args.parts:
        with tempfile.TemporaryDirectory() as folder, ml.open_backend(args.backend) as backend:
            sizes = args.conversations, args.turns, args.system, args.budget * MIB
            _show_talk(talk(backend, random_model(Path(folder), SMALL, 0.05), *sizes), args)
    for part, floor, title in (("host", "memcpy", "host memory"), ("disk", "read", "disk")):
        trials = {}
        for name in args.restores if part in args.parts else ():
            with ml.open_backend(name) as backend:
                for dtype in (ml.DType.F32, ml.DType.F16):
                    if part == "host":
                        trial = from_host(backend, dtype, args.tokens, args.rounds)
                    else:
                        trial = from_disk(backend, dtype, args.tokens, args.rounds, args.chunk)
                    trials[f"{name} {dtype.name}"] = trial
        if trials:
            told = f"{args.tokens:,} tokens from {title}, {LAYERS} layers of {HEADS} x {DIM}"
            _show(told, trials, floor)
    if "begin" in args.parts:
        print("## begin, a prompt of 100,000 tokens, 100,000 nodes\n")
        found = finding(100_000, 100_000, args.rounds).samples()
        show(("", "ms"), ((name, milliseconds(sample, 1)) for name, sample in found.items()))
    if "returning" in args.parts:
        _show_returning(args.returning, args.rounds)


if __name__ == "__main__":
    main()
