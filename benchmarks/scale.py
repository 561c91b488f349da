"""docs/scaling.md from one command: ``python -m benchmarks.scale``.

Measures what each step costs on this machine, runs synthetic traffic through the real PrefixCache and its
stores, computes what a fleet would ask of each resource, and writes docs/benchmarks/scale.json and the
tables of docs/scaling.md. ``--write`` writes the tables from what was recorded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import scale_report
from benchmarks.pages import DOCS, fill, load, save
from benchmarks.scale_simulation import POLICIES, Fleet, by_budget, serve
from benchmarks.scale_traffic import Traffic
from kvcache.testing.bench.timing import machine

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
_STAYS = 0.9


def simulate(traffic: Traffic, seeds: int, shares: Sequence[float]) -> dict[str, Any]:
    """Every policy within every share, from several seeds; then hosts, with and without a shared store."""
    policies = {
        policy: [by_budget(replace(traffic, seed=seed), policy, shares) for seed in range(seeds)]
        for policy in POLICIES
    }
    return {
        "traffic": asdict(traffic),
        "seeds": seeds,
        "shares": list(shares),
        "policies": policies,
        "fleet": _fleets(traffic),
    }


def _fleets(traffic: Traffic) -> list[dict[str, Any]]:
    rows = []
    for stays, routing in ((0.0, "to any host"), (_STAYS, f"{_STAYS:.0%} to the same host")):
        unlimited = serve(traffic, Fleet(stays=stays))
        stores = (("none", 0), ("30% of all", int(0.3 * unlimited.nbytes)))
        found = [(name, serve(traffic, Fleet(stays=stays, store=budget))) for name, budget in stores]
        rows += [
            outcome.as_dict() | {"routing": routing, "store": name}
            for name, outcome in (*found, ("no limit", unlimited))
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="little traffic, few rounds; a glance, no result"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--measure", action="store_true", help="keep the simulation, measure the rest anew")
    one.add_argument("--simulate", action="store_true", help="keep what was measured, simulate anew")
    one.add_argument("--write", action="store_true", help="only write the tables")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder with scaling.md")
    options = parser.parse_args(arguments)
    record = options.docs / "benchmarks" / "scale.json"
    if not options.write:
        former = load(record) if options.measure or options.simulate else {}
        found = {} if options.simulate else _measured(options.quick)
        if not options.measure:
            found |= {"simulation": _simulated(options.quick)}
        save(record, former | found)
    fill(options.docs / "scaling.md", scale_report.tables(load(record)))
    print(f"wrote {options.docs / 'scaling.md'}")


def _measured(quick: bool) -> dict[str, Any]:
    from benchmarks import scale_constants

    began = time.perf_counter()
    constants = scale_constants.measure(quick)
    print(f"constants: {time.perf_counter() - began:.0f} s")
    return {"machine": machine(), "quick": quick, "constants": constants}


def _simulated(quick: bool) -> dict[str, Any]:
    """It comes from its seeds alone."""
    began = time.perf_counter()
    traffic = Traffic(count=60, open=12) if quick else Traffic(count=1000)
    found = simulate(traffic, 1 if quick else 3, SHARES[::3] if quick else SHARES)
    print(f"simulation: {time.perf_counter() - began:.0f} s")
    return found


if __name__ == "__main__":
    main()
