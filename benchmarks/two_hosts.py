"""Time to the first token on a second host: restored over the network, or computed anew.

    python -m benchmarks.two_hosts [--quick] [--model NAME ...] [--docs docs]

Two network namespaces on one machine, the server of the store on the first. Needs root, iproute2 and
redis-server or valkey-server. Writes figures and plots to docs/two-hosts/ and the tables into
docs/two-hosts.md; of a model that is not measured, the former figures stay.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import front
from benchmarks import two_hosts_report as report
from benchmarks.models import RANDOM, random_model
from benchmarks.two_hosts_report import Point
from benchmarks.wire import link_speed
from examples.two_hosts.network import Network, unavailable
from examples.two_hosts.processes import Process, end_in_order, store_server
from kvcache.runner import bundled_model
from kvcache.runner.loading import load_config
from kvcache.testing.bench.timing import Foreign, machine

__all__ = ["main"]

GIGABIT = 1e9
NEW = 8
"""Tokens of the next turn, which either way are computed."""
QUICK = (0.1, 1.0, None)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a model: stored lengths, gigabits per second (None: no limit), rounds."""

    title: str
    lengths: Sequence[int]
    gigabits: Sequence[float | None]
    rounds: int
    config: dict[str, Any] | None = None


PLANS = {
    "tiny": Plan(
        "the bundled model, 4 layers of 192",
        (8, 16, 32, 64, 128, 256, 480),
        (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, None),
        9,
    ),
    "llama": Plan(
        "random Llama, 24 layers of 1,024",
        (16, 64, 256, 1024),
        (0.05, 0.1, 0.3, 1.0, 10.0, None),
        3,
        RANDOM,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_hosts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lengths and rounds; a glance, no result")
    parser.add_argument("--model", action="append", choices=list(PLANS), help="only this one; repeatable")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    options = parser.parse_args()
    end_in_order()
    reason = unavailable()
    if reason:
        raise SystemExit(f"benchmarks.two_hosts: {reason}")
    results = report.load(options.docs)
    for name in options.model or PLANS:
        plan = PLANS[name]
        if options.quick:
            plan = Plan(plan.title, plan.lengths[1:4], QUICK, 1, plan.config)
        results["models"][name] = measure(plan, options.backend) | {"quick": options.quick}
        report.write(options.docs, results)
        front.write(options.docs)
    print(f"wrote {options.docs / 'two-hosts.md'}")


def measure(plan: Plan, backend: str) -> dict[str, Any]:
    """The record of a model: the machine, the links as a plain socket finds them, and points."""
    foreign = Foreign()
    time.sleep(1)
    busy = foreign.cores()
    with tempfile.TemporaryDirectory() as temporary, Network() as network:
        folder = Path(temporary)
        path = bundled_model() if plan.config is None else random_model(folder / "model", plan.config)
        links = [
            {"gigabits": limit, "measured": measured / GIGABIT} for limit, measured in speeds(plan, network)
        ]
        network.limit(None)
        line = ["--backend", backend, "--model", str(path), "--capacity", str(max(plan.lengths) + 32)]
        with (
            store_server(folder, inside=network.ends[0]) as url,
            Process(*line, "--store", url, inside=network.ends[0]) as first,
            Process(*line, "--store", url, inside=network.ends[1]) as second,
        ):
            first.ready()
            second.ready()
            vocabulary = load_config(path).vocab_size
            points = [report.row_of(point) for point in run(plan, network, first, second, vocabulary)]
    return {
        "title": plan.title,
        "backend": backend,
        "machine": machine(),
        "foreign_cores": busy,
        "rounds": plan.rounds,
        "new_tokens": NEW + 1,
        "links": links,
        "points": points,
    }


def speeds(plan: Plan, network: Network) -> Iterator[tuple[float | None, float]]:
    for limit in plan.gigabits:
        bits = None if limit is None else limit * GIGABIT
        network.limit(bits)
        yield limit, link_speed(network, bits)


def run(plan: Plan, network: Network, first: Process, second: Process, vocabulary: int) -> Iterator[Point]:
    """Each conversation is begun on the first host; the second one goes on with it in turns, both ways."""
    random = np.random.default_rng(0)
    questions = {}
    for i, length in enumerate(plan.lengths):
        prompt = [3 + i, *random.integers(3, vocabulary, length - 1).tolist()]
        begun = first.ask(tokens=prompt, max_tokens=1, forget=True)
        questions[length] = [*begun["tokens"], *random.integers(3, vocabulary, NEW).tolist()]
    warm = questions[min(questions)]
    for options in ({"alone": True}, {"forget": True}):
        second.ask(tokens=warm, max_tokens=1, keep=False, **options)
    for length, question in questions.items():
        yield point(plan, network, second, length, question)


def point(plan: Plan, network: Network, host: Process, length: int, question: list[int]) -> Point:
    computed: list[float] = []
    restored: dict[float | None, list[float]] = {limit: [] for limit in plan.gigabits}
    sizes = []
    for _ in range(plan.rounds):
        alone = host.ask(tokens=question, max_tokens=1, keep=False, alone=True)
        computed.append(alone["seconds_to_first"])
        for limit, seconds in restored.items():
            network.limit(None if limit is None else limit * GIGABIT)
            answer = host.ask(tokens=question, max_tokens=1, keep=False, forget=True)
            if (answer["restored"], answer["computed"]) != (length, NEW + 1):
                raise SystemExit(f"of {length} tokens {answer['restored']} were restored: {answer}")
            if answer["tokens"] != alone["tokens"]:
                raise SystemExit(f"restored and computed disagree: {answer['tokens']}, {alone['tokens']}")
            seconds.append(answer["seconds_to_first"])
            sizes.append(answer["bytes_received"])
        network.limit(None)
    middle = {limit: statistics.median(seconds) for limit, seconds in restored.items()}
    found = Point(length, int(statistics.median(sizes)), statistics.median(computed), middle)
    print(f"{length} tokens: computed {found.computed:.4f} s; restored", end=" ")
    print(", ".join(f"{limit or 'unlimited'}: {s:.4f}" for limit, s in middle.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
