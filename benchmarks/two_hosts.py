"""Time to the first token on a second host: restored over the network, or computed anew.

    python -m benchmarks.two_hosts [--quick] [--decisions] [--model NAME ...] [--docs docs]

Two network namespaces on one machine, the server of the store on the first. Needs root, iproute2 and
redis-server or valkey-server. Writes the figures to docs/two-hosts/; the site makes the tables and plots of
docs/remote-stores.md from them. Of a model that is not measured, the former figures stay. With --decisions
only what a host does is measured that asks the store where fetching beats computing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import front
from benchmarks import two_hosts_report as report
from benchmarks.hosts.network import Network, unavailable
from benchmarks.hosts.processes import Process, end_in_order, store_server
from benchmarks.models import RANDOM, random_model
from benchmarks.timing import Foreign, machine
from benchmarks.two_hosts_report import Decided, Point
from benchmarks.wire import link_speed
from kvcache_engine import bundled_model
from kvcache_engine.loading import load_config

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
    slow_and_fast: Sequence[float]
    """The links on which a host decides for itself."""
    decided: Sequence[int]
    """Stored lengths there."""
    config: dict[str, Any] | None = None


PLANS = {
    "tiny": Plan(
        "the bundled model, 4 layers of 192",
        (8, 16, 32, 64, 128, 256, 480),
        (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, None),
        9,
        (0.01, 1.0),
        (128, 480),
    ),
    "llama": Plan(
        "random Llama, 24 layers of 1,024",
        (16, 64, 256, 1024),
        (0.05, 0.1, 0.3, 1.0, 10.0, None),
        3,
        (0.02, 1.0),
        (256, 512),
        RANDOM,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_hosts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lengths and rounds; a glance, no result")
    parser.add_argument("--decisions", action="store_true", help="only what a host decides for itself")
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
            plan = replace(plan, lengths=plan.lengths[1:4], gigabits=QUICK, rounds=1)
        with Machines(plan, options.backend) as machines:
            if not options.decisions:
                results["models"][name] = measure(plan, machines) | {"quick": options.quick}
            results["models"][name]["decisions"] = decisions(plan, machines)
        report.write(options.docs, results)
        front.write(options.docs)
    print(f"wrote {options.docs / 'two-hosts' / 'figures.json'}")


class Machines(contextlib.ExitStack):
    """Two namespaces, the store's server on the first, and a model for the hosts in them."""

    def __init__(self, plan: Plan, backend: str) -> None:
        super().__init__()
        foreign = Foreign()
        time.sleep(1)
        self.busy = foreign.cores()
        self.backend = backend
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.network = self.enter_context(Network())
        self.model = bundled_model() if plan.config is None else random_model(folder / "model", plan.config)
        self.url = self.enter_context(store_server(folder, inside=self.network.ends[0]))
        most = max(*plan.lengths, *plan.decided)
        self._options = ("--backend", backend, "--model", str(self.model), "--capacity", str(most + 32))

    def host(self, end: int, fetch: str = "always") -> Process:
        """A host in one of the namespaces."""
        options = (*self._options, "--store", self.url, "--fetch", fetch)
        return Process(*options, inside=self.network.ends[end])


def measure(plan: Plan, machines: Machines) -> dict[str, Any]:
    """The record of a model: the machine, the links as a plain socket finds them, and points."""
    network = machines.network
    links = [{"gigabits": limit, "measured": bits / GIGABIT} for limit, bits in speeds(plan, network)]
    network.limit(None)
    with machines.host(0) as first, machines.host(1) as second:
        first.ready()
        second.ready()
        vocabulary = load_config(machines.model).vocab_size
        points = [report.row_of(point) for point in run(plan, network, first, second, vocabulary)]
    return {
        "title": plan.title,
        "backend": machines.backend,
        "machine": machine(),
        "foreign_cores": machines.busy,
        "rounds": plan.rounds,
        "new_tokens": NEW + 1,
        "links": links,
        "points": points,
    }


def decisions(plan: Plan, machines: Machines) -> dict[str, Any]:
    """What a host does that has measured both ways, on a slow link and on a fast one."""
    network, rows = machines.network, []
    vocabulary = load_config(machines.model).vocab_size
    network.limit(None)
    with machines.host(0) as first, machines.host(1) as always:
        first.ready()
        always.ready()
        asked = questions(plan.decided, first, vocabulary)
        computed = {
            length: middle(first.ask(tokens=question, max_tokens=1, keep=False, alone=True)
                           for _ in range(plan.rounds))
            for length, question in asked.items()
        }  # fmt: skip
        for limit in plan.slow_and_fast:
            network.limit(limit * GIGABIT)
            with machines.host(1, "measured") as host:
                host.ready()
                fresh = np.random.default_rng(1).integers(3, vocabulary, max(plan.decided) // 2).tolist()
                for tokens in (fresh, asked[max(asked)]):  # how fast it computes, and how fast the link is
                    host.ask(tokens=tokens, max_tokens=1, keep=False, forget=True)
                for length, question in asked.items():
                    answers = [again(one, question) for one in (host, always) for _ in range(plan.rounds)]
                    if len({tuple(answer["tokens"]) for answer in answers}) != 1:
                        raise SystemExit(f"fetched and computed disagree: {answers}")
                    own, others = answers[: plan.rounds], answers[plan.rounds :]
                    restored = {answer["restored"] for answer in own}
                    if len(restored) != 1:
                        raise SystemExit(
                            f"over {limit} Gb/s {length} tokens were fetched now and then: {own}"
                        )
                    row = Decided(
                        limit, length, restored.pop(), middle(own), middle(others), computed[length]
                    )
                    rows.append(asdict(row))
                    print(row, flush=True)
    network.limit(None)
    return {"machine": machine(), "foreign_cores": machines.busy, "rounds": plan.rounds, "rows": rows}


def again(host: Process, question: list[int]) -> dict[str, Any]:
    """A question to a host that has nothing of it itself."""
    return host.ask(tokens=question, max_tokens=1, keep=False, forget=True)


def middle(answers: Iterable[dict[str, Any]]) -> float:
    return statistics.median(answer["seconds_to_first"] for answer in answers)


def speeds(plan: Plan, network: Network) -> Iterator[tuple[float | None, float]]:
    for limit in plan.gigabits:
        bits = None if limit is None else limit * GIGABIT
        network.limit(bits)
        yield limit, link_speed(network, bits)


def run(plan: Plan, network: Network, first: Process, second: Process, vocabulary: int) -> Iterator[Point]:
    """Each conversation is begun on the first host; the second one goes on with it in turns, both ways."""
    asked = questions(plan.lengths, first, vocabulary)
    warm = asked[min(asked)]
    for options in ({"alone": True}, {"forget": True}):
        second.ask(tokens=warm, max_tokens=1, keep=False, **options)
    for length, question in asked.items():
        yield point(plan, network, second, length, question)


def questions(lengths: Sequence[int], first: Process, vocabulary: int) -> dict[int, list[int]]:
    """Conversations of so many tokens that the first host has begun, each with the next turn."""
    random, found = np.random.default_rng(0), {}
    for i, length in enumerate(lengths):
        prompt = [3 + i, *random.integers(3, vocabulary, length - 1).tolist()]
        begun = first.ask(tokens=prompt, max_tokens=1, forget=True)
        found[length] = [*begun["tokens"], *random.integers(3, vocabulary, NEW).tolist()]
    return found


def point(plan: Plan, network: Network, host: Process, length: int, question: list[int]) -> Point:
    computed: list[float] = []
    restored: dict[float | None, list[float]] = {limit: [] for limit in plan.gigabits}
    sizes = []
    for _ in range(plan.rounds):
        alone = host.ask(tokens=question, max_tokens=1, keep=False, alone=True)
        computed.append(alone["seconds_to_first"])
        for limit, seconds in restored.items():
            network.limit(None if limit is None else limit * GIGABIT)
            answer = again(host, question)
            if (answer["restored"], answer["computed"]) != (length, NEW + 1):
                raise SystemExit(f"of {length} tokens {answer['restored']} were restored: {answer}")
            if answer["tokens"] != alone["tokens"]:
                raise SystemExit(f"restored and computed disagree: {answer['tokens']}, {alone['tokens']}")
            seconds.append(answer["seconds_to_first"])
            sizes.append(answer["bytes_received"])
        network.limit(None)
    medians = {limit: statistics.median(seconds) for limit, seconds in restored.items()}
    found = Point(length, int(statistics.median(sizes)), statistics.median(computed), medians)
    print(f"{length} tokens: computed {found.computed:.4f} s; restored", end=" ")
    print(", ".join(f"{limit or 'unlimited'}: {s:.4f}" for limit, s in medians.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
