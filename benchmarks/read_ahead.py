"""A request whose prefix is at the other end of a link, while another one is being answered.

    python -m benchmarks.read_ahead [--gigabits 0.03] [--tokens 400] [--rounds 15] [--model tiny]

Two network namespaces on one machine, the server of the store on the first. Needs root, iproute2 and
redis-server or valkey-server. Says how long the running answer pauses for the other request at most, and
how soon that one has its first token: with its pages read ahead, and by the request itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ml
from benchmarks.hosts.network import unavailable
from benchmarks.hosts.processes import end_in_order
from benchmarks.pages import show
from benchmarks.timing import machine
from benchmarks.two_hosts import GIGABIT, PLANS, Machines, questions
from kvcache_engine import GenerationOptions, Token, load_model
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.loading import load_config

OTHER = 64
"""Tokens of the prompt that is answered meanwhile."""
ROOMS = (0, 256 << 20)
"""Bytes that may be read ahead."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_ahead", description=__doc__)
    parser.add_argument("--gigabits", type=float, default=0.03)
    parser.add_argument("--tokens", type=int, default=400, help="stored tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--model", choices=list(PLANS), default="tiny")
    parser.add_argument("--asked", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.asked is not None:
        print(json.dumps(asked(json.loads(options.asked))))
        return
    end_in_order()
    if reason := unavailable():
        raise SystemExit(f"benchmarks.read_ahead: {reason}")
    print(f"{options.backend}, {machine()}; {options.tokens} tokens over {options.gigabits:g} Gb/s")
    rows = []
    for room, found in measure(options).items():
        medians = (1000 * statistics.median(times) for times in zip(*found, strict=True))
        rows.append(("read ahead" if room else "read by the request", *(f"{ms:.0f}" for ms in medians)))
    show(
        ("milliseconds", "longest pause of the running answer", "between two tokens before", "first token"),
        rows,
    )


def measure(options: argparse.Namespace) -> dict[int, list[list[float]]]:
    """By the bytes of ``read_ahead`` what ``asked`` says, in a process on the second host."""
    plan = replace(PLANS[options.model], lengths=(options.tokens,), decided=(options.tokens,))
    with Machines(plan, options.backend) as machines, machines.host(0) as first:
        first.ready()
        vocabulary = load_config(machines.model).vocab_size
        question = questions(plan.lengths, first, vocabulary)[options.tokens]
        machines.network.limit(options.gigabits * GIGABIT)
        told = {
            "question": question, "rounds": options.rounds, "backend": options.backend,
            "model": str(machines.model), "store": machines.url,
        }  # fmt: skip
        line = [sys.executable, "-m", "benchmarks.read_ahead", "--asked", json.dumps(told)]
        inside = machines.network.ends[1].command(*line)
        done = subprocess.run(inside, stdout=subprocess.PIPE, check=True, text=True)
    found: list[list[list[float]]] = json.loads(done.stdout)
    return dict(zip(ROOMS, found, strict=True))


def asked(told: dict[str, Any]) -> list[list[tuple[float, float, float]]]:
    """For each of ``ROOMS``, in turn, what ``round_of`` says of every round but the first, which warms up."""
    question = told["question"]
    size = len(question) + OTHER
    other = np.random.default_rng(2).integers(3, 1000, OTHER).tolist()
    found: list[list[tuple[float, float, float]]] = [[] for _ in ROOMS]
    with ml.open_backend(told["backend"]) as backend, contextlib.ExitStack() as stack:
        model = load_model(Path(told["model"]), backend)
        engines = []
        for room in ROOMS:
            options = EngineOptions(2, size, context=size, fetch="always", read_ahead=room)
            engines.append(stack.enter_context(Engine(model, None, options, [told["store"]])))
        for _ in range(told["rounds"] + 1):
            for engine, rounds in zip(engines, found, strict=True):
                engine.forget()
                rounds.append(round_of(engine, other, question))
        for engine in engines:
            engine.close(flush=False)
    return [rounds[1:] for rounds in found]


def round_of(engine: Engine, other: list[int], question: list[int]) -> tuple[float, float, float]:
    """Seconds: the longest pause of the answer for the question, the median before, to the first token."""
    running = engine.submit(other, GenerationOptions(OTHER, ignore_eos=True))
    times: list[float] = []
    while len(times) < 9:
        step(engine, running.id, times)
    before = statistics.median(np.diff(times).tolist())
    times, began = times[-1:], time.perf_counter()
    request = engine.submit(question, GenerationOptions(1, ignore_eos=True))
    firsts: list[float] = []
    while not firsts:
        firsts += step(engine, running.id, times, request.id)
    step(engine, running.id, times)
    engine.cancel(running)
    reused = request.run.reused
    if reused < len(question) - 16:
        raise SystemExit(f"of {len(question)} tokens {reused} were restored")
    return max(np.diff(times).tolist()), before, firsts[0] - began


def step(engine: Engine, running: int, times: list[float], request: int | None = None) -> list[float]:
    """One pass: notes when tokens of ``running`` came, and returns when those of ``request`` did."""
    events, now = engine.step(), time.perf_counter()
    tokens = [event.request for event in events if isinstance(event, Token)]
    times += [now] * (running in tokens)
    return [now] * (request in tokens)


if __name__ == "__main__":
    main()
