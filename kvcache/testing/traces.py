"""Random traces: sequences of calls on a cache, each checked against the model.

From the shell, many of them::

    python -m kvcache.testing.traces --backend numpy --traces 100000 --seed 0
    python -m kvcache.testing.traces --cache recurrent

A trace depends only on its seed. A failure is shrunk to a minimal list of calls, and printed with the seed;
``--replay SEED`` runs it again. Every kind of cache is driven by the same few lines, beside its projection of
one model: a dictionary (sequence, position) -> token.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

import kvcache
import ml
from kvcache.testing.models.attention import Model, Setup
from kvcache.testing.models.values import BLOCKS
from kvcache.testing.rigs.machine import Machine, Op, Trace
from kvcache.testing.rigs.snapshots import CopyRig
from ml import DType, Layout

Ints = tuple[int, ...]
FLOATS = (DType.F32, DType.F16, DType.BF16)
FORMATS = tuple(BLOCKS)
KINDS = {
    "attention": (0, 1, 2, 3), "causal": (0,), "sliding": (1, 2), "chunked": (3,), "quantized": (0, 1, 2, 3),
}  # fmt: skip
"""The names for ``--cache``: no window, a window, a window with memory, a chunk."""
LENGTH = 14
"""The most calls of one trace; a few more with snapshots."""


@dataclass(frozen=True)
class Failure:
    """A failed trace, shrunk: ``ops`` are the remaining calls, as arguments of ``Machine.apply``."""

    seed: int
    setup: object
    ops: tuple[Op, ...]
    error: str

    def __str__(self) -> str:
        calls = "\n".join(f"  {op[0]}{op[1:]}" for op in self.ops)
        return f"seed {self.seed}: {self.setup}\n{calls}\n{self.error}"


FAMILY = {
    "recurrent": ("kvcache.testing.rigs.states", "state_trace"),
    "encoder": ("kvcache.testing.rigs.encoder", "encoder_trace"),
    "wrapper": ("kvcache.testing.rigs.wrapper", "wrapper_trace"),
}
"""By name of a cache, the module and the function that makes its trace, imported on use."""


def trace_of(cache: str, rnd: random.Random, floats: Sequence[DType], computes: bool) -> Trace:
    """A trace of ``cache``, a name of KINDS or FAMILY."""
    if cache in FAMILY:
        module, function = FAMILY[cache]
        trace: Trace = getattr(importlib.import_module(module), function)(rnd, floats, computes)
        return trace
    setup = random_setup(rnd, floats, computes, cache)
    snapshots = rnd.choice((0.0, 0.2, 0.4))
    calls = rnd.randrange(4, LENGTH + 1 + int(20 * snapshots))
    return Trace(setup, calls, partial(AttentionMachine, setup, snapshots, computes))


def random_setup(
    rnd: random.Random, floats: Sequence[DType] = FLOATS, computes: bool = True, cache: str = "attention"
) -> Setup:
    """A cache of any kind and layout; sometimes a wide one, whose cells are far apart."""
    wide = rnd.random() < 0.15
    quantized = computes and rnd.random() < (1 if cache == "quantized" else 0.12)
    config = ml.CacheConfig(
        cache_padding=rnd.choice((1, 1, 1, 4, 5)),
        mask_batch_padding=rnd.choice((1, 1, 3)),
        mask_dtype=rnd.choice(floats),
        permuted_v=rnd.random() < 0.3,
        layout=rnd.choice(list(Layout)),
        elide_mask=rnd.random() < 0.5,
        fixed_context=3 if rnd.random() < 0.1 else 0,
        call_bytes=rnd.choice((1, 200, 1 << 19)),
    )
    setup = Setup(
        max_sequences=rnd.choice((3, 4)) if wide else rnd.choice((1, 2, 2, 3)),
        capacity=90 if wide else rnd.choice((3, 5, 8, 12)),
        max_batch=rnd.choice((2, 4, 6)),
        dtype=random_format(rnd, floats) if quantized else rnd.choice((DType.F32, rnd.choice(floats))),
        activations=rnd.choice((DType.F32, rnd.choice(floats))),
        config=config,
        layers=rnd.choice((1, 1, 2)),
        can_shift=rnd.random() < 0.85,
        latent=rnd.random() < 0.2,
        extra=rnd.random() < 0.2,
    )
    kind = rnd.choice(KINDS[cache])
    if kind in (1, 2):
        setup = replace(setup, keep=rnd.choice((0, 0, 1, 2, 4)))
    if kind == 1:
        return replace(setup, window=rnd.randrange(6))
    if kind == 2:
        window = rnd.randrange(5)
        return replace(setup, window=window, memory=window + rnd.randrange(6))
    return replace(setup, chunk=rnd.randrange(1, 6)) if kind == 3 else setup


def random_format(rnd: random.Random, floats: Sequence[DType]) -> kvcache.CacheDType:
    """One format for K and V, or a pair, one of which may be plain."""
    if rnd.random() < 0.5:
        return rnd.choice(FORMATS)
    return rnd.choice(((rnd.choice(FORMATS), rnd.choice(FORMATS)), (rnd.choice(floats), rnd.choice(FORMATS)),
                       (rnd.choice(FORMATS), rnd.choice(floats)), (floats[0], floats[-1])))  # fmt: skip


# Choosing the next call from the model's content.


def next_op(rnd: random.Random, model: Model, snapshots: float) -> Op:
    """The next call; ``snapshots`` is the share of calls that concern snapshots."""
    if rnd.random() < snapshots:
        return _with_snapshots(rnd, model)
    roll = rnd.random()
    if roll < 0.58:
        return _forward(rnd, model)
    if roll < 0.70:
        return "copy_prefix", *_two(rnd, model), rnd.randrange(8)
    if roll < 0.90:
        return _removal(rnd, model)
    if roll < 0.92:
        return _defrag(rnd, model)
    if roll < 0.94:
        return _eviction(rnd, model)
    if roll < 0.955:
        return "reserve", rnd.randrange(1, 4)
    if roll < 0.97:
        return "spoil", rnd.randrange(model.setup.max_sequences)
    return _reading(rnd, model)


def _forward(rnd: random.Random, model: Model) -> Op:
    last = [model.last(seq) for seq in range(model.setup.max_sequences)]
    some = rnd.sample(range(len(last)), rnd.choice((1, 1, min(2, len(last)), len(last))))
    gaps = rnd.random() < 0.15
    pairs = []
    for _ in range(rnd.choice((1, 1, 2, 3, 4, 5))):
        seq = rnd.choice(some)
        last[seq] += rnd.randrange(1, 4) if gaps else 1
        pairs.append((last[seq], seq))
    if rnd.random() < 0.08:
        # At any position: before the first, in a gap, or over stored ones.
        pairs[-1] = rnd.randrange(-1 if rnd.random() < 0.2 else 0, 12), pairs[-1][1]
    if rnd.random() < 0.3:
        rnd.shuffle(pairs)
    lifted: list[int] = []
    if rnd.random() < 0.15:
        lifted = rnd.sample(range(len(pairs)), rnd.randrange(1, len(pairs) + 1))
    look = "undo" if rnd.random() < 0.06 else rnd.choice(("get", "get", "attend", "both"))
    return "forward", tuple(p for p, _ in pairs), tuple(s for _, s in pairs), tuple(lifted), look


def _reading(rnd: random.Random, model: Model) -> Op:
    """Queries at any positions up to slightly beyond the end."""
    seqs = rnd.choices(range(model.setup.max_sequences), k=rnd.randrange(1, 5))
    pairs = list({(rnd.randrange(model.last(seq) + 3), seq) for seq in seqs})
    lifted = rnd.sample(range(len(pairs)), rnd.choice((0, 0, 1)))
    look = rnd.choice(("get", "attend", "both"))
    return "read", tuple(p for p, _ in pairs), tuple(s for _, s in pairs), tuple(lifted), look


def _two(rnd: random.Random, model: Model) -> tuple[int, int]:
    count = model.setup.max_sequences
    if count == 1:
        return 0, 0
    src, dst = rnd.sample(range(count), 2)
    return src, dst


def _removal(rnd: random.Random, model: Model) -> Op:
    seq = rnd.randrange(model.setup.max_sequences)
    last = model.last(seq)
    begin = rnd.randrange(last + 2) if rnd.random() < 0.9 else rnd.randrange(12)
    roll = rnd.random()
    if roll < 0.2 and last > 0:
        return "remove", seq, rnd.randrange(last), last  # the last token moves
    if roll < 0.5:
        return "remove", seq, 0 if rnd.random() < 0.2 else begin, None
    return "remove", seq, begin, begin + rnd.randrange(5)


def _defrag(rnd: random.Random, model: Model) -> Op:
    """Of all sequences, or of some with room for more tokens."""
    if rnd.random() < 0.4:
        return "defrag", None, 0
    count = model.setup.max_sequences
    chosen = rnd.sample(range(count), rnd.choice((1, 1, rnd.randrange(1, count + 1))))
    return "defrag", tuple(chosen), rnd.randrange(4)


def _eviction(rnd: random.Random, model: Model) -> Op:
    """Mostly positions before the last token; sometimes beyond, which is refused."""
    seq = rnd.randrange(model.setup.max_sequences)
    before = max(0, model.last(seq)) + (rnd.random() < 0.1)
    return "evict", seq, tuple(rnd.sample(range(before), rnd.randrange(before + 1)))


def _with_snapshots(rnd: random.Random, model: Model) -> Op:
    """Take a snapshot, or use an existing one, named by its index."""
    roll, seq, which = rnd.random(), rnd.randrange(model.setup.max_sequences), rnd.randrange(12)
    offset = model.last(seq) + 1
    begin, end = rnd.choice((0, 0, rnd.randrange(offset + 2))), rnd.choice((None, rnd.randrange(offset + 2)))
    if roll < 0.12:
        return "scheduled", seq, tuple(rnd.sample(range(1, 7), rnd.randrange(1, 4))), rnd.randrange(1, 5)
    if roll < 0.5:
        return "snapshot", seq, begin, end
    if roll < 0.75:
        return "restore", which, seq, rnd.choice((None, None, rnd.randrange(10)))
    if roll < 0.83:
        return "split", which, rnd.randrange(8)
    if roll < 0.9:
        return "merge", which, rnd.randrange(12)
    return rnd.choice(("detach", "drop")), which


# Running.


class AttentionMachine:
    """Random calls on an attention cache; ``snapshots`` is the share of those that concern snapshots."""

    def __init__(
        self, setup: Setup, snapshots: float, computes: bool, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        self.rig, self.snapshots, self.computes = CopyRig(setup, backend, ctx), snapshots, computes

    def choose(self, rnd: random.Random) -> Op:
        return next_op(rnd, self.rig.model, self.snapshots)

    def apply(self, op: Op) -> None:
        _apply(self.rig, op, self.computes)

    def finish(self) -> None:
        self.rig.check_copies()
        self.rig.cache.close()


def _apply(rig: CopyRig, op: Op, computes: bool) -> None:
    """Run one call, checked."""
    name, *args = op
    if name in ("restore", "split", "merge", "detach", "drop"):
        if rig.copies:
            getattr(rig, str(name))(*args)
    elif name in ("snapshot", "scheduled"):
        getattr(rig, str(name))(*args)
    elif name in ("forward", "read"):
        _apply_pass(rig, computes, str(name), *args)  # type: ignore[arg-type]
    elif name == "copy_prefix":
        src, dst, length = args
        if src != dst:
            rig.copy_prefix(src, dst, length)  # type: ignore[arg-type]
    elif name == "remove":
        rig.remove(*args)  # type: ignore[arg-type]
    elif name == "evict":
        rig.evict(*args)  # type: ignore[arg-type]
    elif name == "defrag":
        rig.defrag(*args)  # type: ignore[arg-type]
    elif name == "spoil":
        config = rig.setup.config
        if config.cache_padding > 1 and not config.fixed_context:  # padding must not matter
            rig.spoil(*args)  # type: ignore[arg-type]
    else:
        rig.reserve(*args)  # type: ignore[arg-type]


def _apply_pass(
    rig: CopyRig, computes: bool, name: str, positions: Ints, sequences: Ints, lifted: Ints, look: str
) -> None:
    if look == "undo":
        rig.start_and_undo(positions, sequences)
        return
    if name == "read":
        if not rig.read(positions, sequences):
            return
    elif rig.start(positions, sequences):
        rig.put()
    else:
        return
    if lifted:
        rig.cache.set_causal(rig.ctx, except_=lifted)
    if look != "attend" or not computes:
        rig.check_seen(lifted)
    if look != "get" and computes:
        rig.check_attend(sum(positions), lifted, sinks=len(positions) % 2 == 0)
        if rig.setup.extra:
            rig.check_selected(sum(positions), sinks=len(positions) % 2 == 0)


def run_trace(
    backend: ml.Backend,
    seed: int,
    floats: Sequence[DType] = FLOATS,
    computes: bool = True,
    cache: str = "attention",
) -> Failure | None:
    """Run the trace of ``seed``; returns the failure, shrunk, or None."""
    rnd, ops = random.Random(seed), list[Op]()
    trace = trace_of(cache, rnd, floats, computes)

    def choose(machine: Machine) -> Iterator[Op]:
        for _ in range(trace.calls):
            ops.append(machine.choose(rnd))
            yield ops[-1]

    error = _run(backend, trace, choose)
    if error is None:
        return None
    fewest, error = _shrink(backend, trace, ops, error)
    return Failure(seed, trace.setup, tuple(fewest), error)


def _run(backend: ml.Backend, trace: Trace, choose: Callable[[Machine], Iterable[Op]]) -> str | None:
    """The error, or None."""
    try:
        with backend.new_context() as ctx:
            machine = trace.machine(backend, ctx)
            for op in choose(machine):
                machine.apply(op)
            machine.finish()
    except pytest.skip.Exception:  # stored in a dtype that the backend declares absent
        return None
    except Exception:
        return traceback.format_exc(limit=-4)
    return None


def _shrink(backend: ml.Backend, trace: Trace, ops: list[Op], error: str) -> tuple[list[Op], str]:
    """Remove calls, many at a time and then one by one, while the rest still fails."""
    size = max(1, len(ops) // 2)
    while True:
        at = 0
        while at < len(ops):
            fewer = ops[:at] + ops[at + size :]
            failure = _run(backend, trace, lambda _, kept=fewer: kept)  # type: ignore[misc]
            if failure is None:
                at += size
            else:
                ops, error = fewer, failure
        if size == 1:
            return ops, error
        size //= 2


def run_traces(
    backend: ml.Backend,
    seeds: range,
    floats: Sequence[DType] = FLOATS,
    computes: bool = True,
    cache: str = "attention",
    most: int | None = None,
) -> list[Failure]:
    """The failures among the traces of ``seeds``; stops after ``most`` failures."""
    failures = (run_trace(backend, seed, floats, computes, cache) for seed in seeds)
    return list(itertools.islice((failure for failure in failures if failure is not None), most))


# The command.


def _chunk(cache: str, name: str, start: int, stop: int) -> list[str]:
    features = ml.backend_specs()[name].features
    floats = [dtype for dtype in FLOATS if dtype in features.dtypes]
    with ml.open_backend(name) as backend:
        failures = run_traces(backend, range(start, stop), floats, features.has("matmul"), cache)
        return [str(failure) for failure in failures]


def _chunks(args: argparse.Namespace) -> Iterator[tuple[int, list[str]]]:
    """(number of traces run, failures) of each chunk, as it finishes."""
    end = args.seed + args.traces
    for start in range(args.seed, end, 100):
        stop = min(start + 100, end)
        yield stop - start, _chunk(args.cache, args.backend, start, stop)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.testing.traces", description="Random traces of caches against their model."
    )
    parser.add_argument(
        "--cache",
        default="attention",
        choices=[*KINDS, *FAMILY],
        help="cache to trace (all attention caches)",
    )
    parser.add_argument("--backend", default="numpy", help="name of an installed backend (numpy)")
    parser.add_argument("--traces", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (0)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run the trace of one seed again")
    args = parser.parse_args(argv)
    if args.replay is not None:
        args.seed, args.traces = args.replay, 1
    if args.traces < 1:
        parser.error("--traces must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    began, done, failures = time.monotonic(), 0, 0
    for count, failed in _chunks(args):
        done += count
        failures += len(failed)
        for failure in failed[: max(0, 3 - failures + len(failed))]:
            sys.stdout.write(f"\n{failure}\n")
        spent = time.monotonic() - began
        sys.stderr.write(
            f"\r{args.cache} on {args.backend}: {done} of {args.traces} traces, {failures} mismatches, "
            f"{spent:.0f} s, {done / spent:.0f} a second "
        )
        sys.stderr.flush()
    sys.stderr.write("\n")
    sys.stdout.write(f"{done} traces on {args.backend}, {failures} mismatches\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
