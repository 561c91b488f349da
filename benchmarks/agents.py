"""What an agent's requests find again: ``python -m benchmarks.agents [agents.jsonl.xz]``.

A trace is a file with a JSON object per line (.xz is read too), whose ``hash_ids`` name the prompt's blocks
of 64 tokens, such as those of github.com/callanjfox/kv-cache-tester. The requests run one after another
through the shipped PrefixCache over real caches, whose tensors are small. One token stands for a block;
windows, states, ``interval`` and ``block_size`` are scaled likewise. Beside them stand models: *blocks by
LRU*, which share whole blocks as vLLM's do, in all of the room and in what evenly spaced snapshots leave of
it; and *Belady*, which evicts what is used again last, and knows the future.

``--part reuse`` (the default) replays the trace with little room. Each result is written to ``--out`` as soon
as it is there, and a run that was interrupted goes on where it ended. ``--part time`` measures the processor
time of the host at full length, where a token is a token.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import lzma
import math
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvcache
import ml
from benchmarks.pages import DOCS, axes_of, legend, load, save, show, svg, table
from benchmarks.timing import machine
from kvcache import Batch, HostTier, PrefixCache, PrefixOptions, Session
from kvcache.stores import FileStore

RECORD, WHOLE = "agents.json", "agents-whole.json"
"""Of the first requests, and of the whole trace."""
BLOCK = 64
"""Tokens of a block of the trace."""
PASS = 8192
"""Tokens of a prompt in one pass."""
PERCENTS = 2, 5, 10, 30
"""Of the distinct tokens of the trace, how many have room on the device."""
HOST = 2
"""Host memory has so many times the room of the device."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The layers of a model, measured by what those of full attention keep of one token."""

    model: str
    window: int = 0
    """Tokens that the other layers see, if they are windows."""
    share: int = 0
    """How much they keep of a token."""
    state: int = 0
    """How much they keep of a sequence, if they have states."""

    @property
    def snapshot(self) -> int:
        """What has to be kept beside full attention to go on at a position."""
        return self.window * self.share + self.state


KINDS = {
    "full": Kind("any"),
    "window + full": Kind("gpt-oss-120b", window=128, share=1),
    "wide window + full": Kind("Gemma 3 27B", window=1024, share=5),
    "states + full": Kind("Qwen3-Next 80B", state=3072),
}
MODELS = {
    "belady": "Belady",
    "full": "blocks by LRU",
    "wide window + full": "likewise beside snapshots, wide window + full",
    "states + full": "likewise beside snapshots, states + full",
}
SETTINGS = {
    "device": "the device alone",
    "host": "and host memory",
    "folder": "and a folder",
    "restarts": "a folder, and a restart now and then",
    "cancelled": "the device alone; prompts are cancelled and repeated",
    "closed": "the device alone; sessions are closed",
    "expected": "likewise, and the next request is announced",
}


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    """Seconds."""
    blocks: np.ndarray
    session: str = ""


def read_trace(path: Path, count: int | None = None) -> list[Request]:
    """The requests of a trace in the order of their time; ``count``: the first ones only."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        rows = sorted(map(json.loads, lines), key=lambda row: row["timestamp"])
    rows = [row for row in rows if row["hash_ids"]][:count]
    return [
        Request(row["timestamp"] / 1e3, np.array(row["hash_ids"], np.int64), str(row.get("session", "")))
        for row in rows
    ]


# The shipped caches.


class Replay(contextlib.AbstractContextManager["Replay"]):
    """A PrefixCache of one kind of model, in which one token stands for ``scale`` tokens of the trace.

    ``room`` is how many tokens of full attention the device keeps beside the prompt that is computed, at the
    same bytes for every kind; ``longest`` is the length of the longest prompt. ``tiers``: "host", "folder".
    """

    def __init__(
        self,
        kind: Kind,
        room: int,
        longest: int,
        scale: int = BLOCK,
        tiers: Sequence[str] = (),
        width: int = 64,
    ) -> None:
        self.kind, self.scale, self.width = kind, scale, width
        self._room, self._longest, self._tiers = room, longest, tiers
        self._pass = PASS // scale
        self.token_bytes = 2 * width * 4
        self.seconds: dict[str, float] = {}
        """Of the processor, by what was done."""
        self._stack = contextlib.ExitStack()
        self._backend = self._stack.enter_context(ml.open_backend("numpy"))
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self.now = 0.0
        """The time in the trace, in seconds."""
        self.prefix = self._open()

    def _open(self) -> PrefixCache:
        kind, full = self.kind, kvcache.CausalCache()
        self._hybrid: kvcache.RecurrentCache | None = None
        self.cache: Any = full
        if kind.state:
            floats = kind.state // self.scale * self.token_bytes // 4
            declared = {"recurrent": kvcache.StateSpec((floats,), ml.DType.F32)}
            states = kvcache.StateCache({None: declared}, delivers=True)
            self.cache = self._hybrid = kvcache.RecurrentCache.of(states, full)
        elif kind.window:
            self.cache = kvcache.WrapperCache(kvcache.SlidingWindowCache(kind.window // self.scale), full)
        cells = self._room + 2 * self._longest
        self.cache.init(self._backend, ml.DType.F32, 1, cells, self._pass)
        tiers: list[Any] = []
        if "host" in self._tiers:
            tiers.append(HostTier(HOST * self._room * self.token_bytes))
        if "folder" in self._tiers:
            tiers.append(self._stack.enter_context(FileStore(self._folder, durable=False)))
        prefix = PrefixCache(
            self.cache,
            budget=self._room * self.token_bytes,
            tiers=tiers,
            identity={"model": kind.model},
            block_size=512 // self.scale,
            options=PrefixOptions(interval=512 // self.scale),
        )
        prefix.tree.now = lambda: self.now
        return prefix

    def restart(self) -> None:
        """End, as a server that is told to, and start anew."""
        self._end()
        self.prefix = self._open()

    def serve(self, prompt: np.ndarray, most: int | None = None, **agent: Any) -> tuple[int, int]:
        """Compute a prompt, or ``most`` tokens of it, after which it is cancelled: (found, computed).

        ``agent``: its session, as ``PrefixCache.begin`` takes it.
        """
        with self._timed("begin"):
            session = self.prefix.begin(prompt, **agent)
        stop = prompt.size if most is None else min(prompt.size, session.cached + most)
        for at in range(session.cached, stop, self._pass):
            with self._timed("passes"):
                self._evaluate(session, at, min(self._pass, stop - at))
            with self._timed("keep"):
                session.keep()
        with self._timed("close"):
            session.close()
        return session.cached, stop - session.cached

    def _evaluate(self, session: Session, at: int, count: int) -> None:
        with self._backend.new_context() as ctx:
            self.cache.start_forward(ctx, Batch(range(at, at + count), [session.seq] * count))
            if self.kind.window:
                self._put(ctx, 0, count, self.kind.share * self.width)
            self._put(ctx, 1, count, self.width)
            if self._hybrid is not None:
                state = self._hybrid.recurrent_state(ctx, 2)
                for seq, inside in self._hybrid.wanted_states().items():
                    given = state.repeat(ctx, 0, len(inside))
                    self._hybrid.deliver_states(ctx, "recurrent", given, [(seq, n) for n in inside], 2)
                self._hybrid.set_recurrent_state(ctx, 2, state)

    def _put(self, ctx: ml.Context, layer: int, count: int, width: int) -> None:
        if self.kind.window:
            self.cache.set_layer_type(layer)
        self.cache.set_layer(layer)
        key = ctx.zeros((count, 1, width), ml.DType.F32)
        self.cache.put(ctx, key, key)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - start

    def _end(self) -> None:
        self.prefix.close()
        self.cache.close()

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stack.close()


@dataclass(slots=True)
class Outcome:
    """What a replay came to, in tokens of the run."""

    found: int = 0
    """By requests that were sent for the first time."""
    again: int = 0
    """Computed by requests that were sent again, beyond what the first one lacked."""
    repeated: int = 0
    """Requests that were cancelled and sent again."""
    stuck: int = 0
    """Those of them that got no further than the one before."""
    seconds: float = 0.0


def replay(
    requests: Sequence[Request],
    kind: Kind,
    room: int,
    setting: str = "device",
    seed: int = 0,
    period: float = 3600.0,
) -> Outcome:
    """What requests find in a PrefixCache that keeps ``room`` blocks on the device.

    ``period``: seconds of the trace between restarts, where there are any.
    """
    outcome, random, start = Outcome(), np.random.default_rng(seed), time.process_time()
    longest = max(request.blocks.size for request in requests) + 1
    tiers = {"host": ("host",), "folder": ("host", "folder"), "restarts": ("host", "folder")}
    with Replay(kind, room, longest, tiers=tiers.get(setting, ())) as run:
        due, following = requests[0].at + period, _following(requests)
        for request, after in zip(requests, following, strict=True):
            run.now = request.at
            if setting == "restarts" and request.at >= due:
                run.restart()
                due = request.at + period
            # A client that waits for as long as so many tokens take: 8,000 to 64,000.
            patience = int(random.integers(8000, 64000)) // BLOCK if setting == "cancelled" else None
            agent: dict[str, Any] = {}
            if setting in ("closed", "expected"):
                agent = {"session_id": request.session}
            if setting == "expected":
                agent |= {"next_use": after}
            found, computed = run.serve(request.blocks, patience, **agent)
            if agent and after is None:
                run.prefix.agent_sessions.close(request.session)
            outcome.found += found
            reached, lacking = found + computed, request.blocks.size - found
            while reached < request.blocks.size:
                found, more = run.serve(request.blocks, patience)
                outcome.repeated += 1
                if found + more <= reached:  # less is kept than it needs: this client waits for the end
                    outcome.stuck += 1
                    patience = None
                computed += more
                reached = found + more
            outcome.again += computed - lacking
    outcome.seconds = time.process_time() - start
    return outcome


def _following(requests: Sequence[Request]) -> list[float | None]:
    """Seconds until the next request of the same session; None after its last one."""
    next_at: dict[str, float] = {}
    found: list[float | None] = []
    for request in reversed(requests):
        at = next_at.get(request.session)
        found.append(None if at is None else max(0.0, at - request.at))
        next_at[request.session] = request.at
    return found[::-1]


def host_times(requests: Sequence[Request], kind: Kind, percent: int) -> dict[str, float]:
    """Milliseconds of the processor per request at full length, and how many were begun at which length."""
    prompts = [_tokens(request) for request in requests]
    longest = max(prompt.size for prompt in prompts) + 1
    room = distinct_blocks(requests) * BLOCK * percent // 100
    each: dict[str, list[float]] = {}
    with Replay(kind, room, longest, scale=1, width=1) as run:
        for prompt in prompts:
            run.seconds.clear()
            run.serve(prompt)
            for what, seconds in run.seconds.items():
                each.setdefault(what, []).append(seconds * 1e3)
    count = len(prompts)
    means = {what: sum(values) / count for what, values in each.items()}
    medians = {f"{what}, median": statistics.median(values) for what, values in each.items()}
    return {**means, **medians, "tokens": sum(prompt.size for prompt in prompts) / count}


def _tokens(request: Request) -> np.ndarray:
    return (request.blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()


# Models of what could be found.


def found_by_blocks(requests: Sequence[Request], room: int) -> int:
    """Blocks found by one who keeps ``room`` of them: the least recently used goes, of one prompt the last.

    A block is known by all that leads up to it. A prompt's last block is always computed.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request in requests:
        keys = list(_prefixes(request.blocks))
        found += min(_leading(keys, kept), len(keys) - 1)
        for key in reversed(keys):
            kept.pop(key, None)
            kept[key] = None
        while len(kept) > room:
            kept.popitem(last=False)
    return found


def found_by_belady(requests: Sequence[Request], room: int) -> int:
    """The same by one who knows the future: an upper bound."""
    listed = [list(_prefixes(request.blocks)) for request in requests]
    uses: dict[int, list[int]] = {}
    for at, keys in reversed([*enumerate(listed)]):
        for key in keys:
            uses.setdefault(key, []).append(at)
    kept: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    found = 0
    for keys in listed:
        found += min(_leading(keys, kept), len(keys) - 1)
        for depth, key in enumerate(keys):
            uses[key].pop()
            kept[key] = uses[key][-1] if uses[key] else len(listed)
            heapq.heappush(order, (-kept[key], -depth, key))
        while len(kept) > room:
            when, _, key = heapq.heappop(order)
            if kept.get(key) == -when:
                del kept[key]
    return found


def room_beside(kind: Kind, room: int) -> int:
    """How many of ``room`` blocks the best even spacing of a kind's snapshots leaves. A gap of g blocks costs
    room / g snapshots, and g / 2 blocks that nobody can reach behind the snapshot where eviction stopped;
    the sum is least where both are equal (``Evictor._gap``).
    """
    return max(0, room - round(math.sqrt(2 * room * kind.snapshot / BLOCK)))


def distinct_blocks(requests: Sequence[Request]) -> int:
    return len({key for request in requests for key in _prefixes(request.blocks)})


def _leading(keys: Sequence[int], kept: Mapping[int, object]) -> int:
    return next((i for i, key in enumerate(keys) if key not in kept), len(keys))


def _prefixes(prompt: np.ndarray) -> Iterator[int]:
    before = 0
    for block in prompt.tolist():
        before = hash((before, block))
        yield before


# The command.


def _key(setting: str, kind: str, percent: int) -> str:
    return f"{setting}, {kind}, {percent}%"


def measure_reuse(
    record: dict[str, Any],
    requests: Sequence[Request],
    combinations: Iterable[tuple[str, str, int]],
    seed: int = 0,
    period: float = 3600.0,
) -> Iterator[str]:
    """Add to a record what is not there yet; after each result, its name."""
    blocks, distinct = sum(request.blocks.size for request in requests), distinct_blocks(requests)
    trace: dict[str, float] = {"requests": len(requests), "blocks": blocks, "distinct": distinct}
    trace |= {"seed": seed, "period": period}
    if record.get("trace", trace) != trace:
        raise SystemExit(f"--out has results of another trace, {record['trace']}; this one is {trace}")
    if "trace" not in record:
        record |= {"trace": trace, "machine": machine(), "models": {}, "replays": {}}
        record["ceiling"] = found_by_blocks(requests, distinct)
    for setting, kind, percent in combinations:
        room = distinct * percent // 100
        if str(percent) not in record["models"]:
            record["models"][str(percent)] = {
                "belady": found_by_belady(requests, room),
                **{
                    name: found_by_blocks(requests, room_beside(each, room))
                    for name, each in KINDS.items()
                    if name in MODELS
                },
            }
        key = _key(setting, kind, percent)
        if key not in record["replays"]:
            record["replays"][key] = asdict(replay(requests, KINDS[kind], room, setting, seed, period))
            yield key


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    whole = load(DOCS / "benchmarks" / WHOLE)
    return {
        "reuse": table(*_reuse(record)),
        "whole": table(*_reuse(whole)),
        "kinds": table(*_kinds()),
        "time": table(*_times(record)),
    }


def _reuse(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    blocks, percents = record["trace"]["blocks"], [*record["models"]]
    rows = [
        [label, *(f"{record['models'][percent][name] / blocks:.1%}" for percent in percents)]
        for name, label in MODELS.items()
    ]
    for setting, label in SETTINGS.items():
        for kind in KINDS:
            each = [record["replays"].get(_key(setting, kind, int(percent))) for percent in percents]
            if any(each):
                cells = [f"{found['found'] / blocks:.1%}" if found else "" for found in each]
                rows.append([f"{kind}: {label}", *cells])
    return ["room on the device", *(f"{percent}%" for percent in percents)], rows


def _kinds() -> tuple[list[str], list[list[str]]]:
    head = ["layers", "like those of", "a snapshot is as large as full attention's part of"]
    return head, [[name, kind.model, f"{kind.snapshot:,} tokens"] for name, kind in KINDS.items()]


def _times(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    times, parts = record.get("times", {}), ("begin", "keep", "close")
    rows = []
    for kind, each in times.items():
        total = sum(each[part] for part in parts)
        least = sum(times["full"][part] for part in parts) if "full" in times else total
        rows.append([kind, *(f"{each[part]:.1f}" for part in parts), f"{total:.1f}", f"{total / least:.1f}"])
    return ["layers", *parts, "together", "x full"], rows


def plot(record: Mapping[str, Any]) -> bytes:
    """What is found with how much room, as SVG."""
    blocks, percents = record["trace"]["blocks"], [int(percent) for percent in record["models"]]
    axes = axes_of((6, 3.6))
    for kind in KINDS:
        each = [(percent, record["replays"].get(_key("device", kind, percent))) for percent in percents]
        points = [(percent, 100 * found["found"] / blocks) for percent, found in each if found]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=kind)
    for name, style in (("full", ":"), ("belady", "--")):
        values = [100 * record["models"][str(percent)][name] / blocks for percent in percents]
        axes.plot(percents, values, style, color="gray", label=MODELS[name])
    axes.axhline(100 * record["ceiling"] / blocks, color="lightgray", label="room for everything")
    axes.set(xscale="log", xlabel="room on the device, % of the distinct tokens", ylabel="found, %")
    axes.set_xticks(percents, [str(percent) for percent in percents])
    legend(axes)
    return svg(axes.figure)


def main() -> None:
    traces = Path(__file__).resolve().parents[2] / "shared" / "traces" / "agents.jsonl.xz"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=traces, help="default: %(default)s")
    parser.add_argument("--part", choices=("reuse", "time"), default="reuse")
    parser.add_argument("--requests", type=int, help="the first ones only")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS], metavar="SETTING")
    parser.add_argument("--percents", type=int, nargs="+", default=PERCENTS)
    parser.add_argument("--seed", type=int, default=0, help="of when clients give up")
    parser.add_argument("--period", type=float, default=3600.0, help="seconds between restarts")
    parser.add_argument("--out", type=Path, help="the record (default: the page's)")
    options = parser.parse_args()
    if options.out is None:
        options.out = DOCS / "benchmarks" / (WHOLE if options.requests is None else RECORD)
    if not options.trace.is_file():
        parser.error(f"{options.trace} is not there; name a trace")
    requests = read_trace(options.trace, options.requests)
    record = load(options.out)
    if options.part == "time":
        for kind in options.kinds:
            record.setdefault("times", {})[kind] = host_times(requests, KINDS[kind], options.percents[-1])
            record["times of"] = {"requests": len(requests), "machine": machine()}
            save(options.out, record)
        show(*_times(record))
        return
    combinations = [
        (setting, kind, percent)
        for setting in options.settings
        for percent in options.percents
        for kind in options.kinds
    ]
    for key in measure_reuse(record, requests, combinations, options.seed, options.period):
        found = record["replays"][key]
        print(f"{key}: {found['found'] / record['trace']['blocks']:.1%}  {found}", flush=True)
        save(options.out, record)
    print()
    show(*_reuse(record))


if __name__ == "__main__":
    main()
