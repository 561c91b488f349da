"""docs/scaling.md: its tables are written from recorded figures, and its plots drawn from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages import axes_of, legend, svg, table
from benchmarks.scale_model import DESIGNS, GB, SHAPES, Demand, Load, demands

Results = Mapping[str, Any]
STORE = "Mooncake", "Valkey", "file"
"""Whose speed the fleet's tables count with: the first that was measured."""
_SHARED = -2
"""The last two demands are of something that the fleet need not have: one radix tree for all hosts."""


def tables(results: Results) -> dict[str, str]:
    return {name: make(results) for name, make in TABLES.items()}


def _number(value: float) -> str:
    """Three digits, and no more decimals than they need."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _constants(results: Results) -> str:
    found = results["constants"]
    rows = [
        [
            "a node of the radix tree: its edge, snapshot, places in the ledger",
            f"{found['memory']['node']:,.0f} bytes",
        ],
        ["each token of its edge", f"{found['memory']['token']:.1f} bytes"],
        ["a walk: each node on the way", f"{found['match']['node'] * 1e6:.2f} us"],
        ["a walk: each token", f"{found['match']['token'] * 1e9:.2f} ns"],
        [
            "`begin` and `close`, 2,048 tokens in 8 turns, on the device",
            f"{found['begin']['found'] * 1e6:,.0f} us",
        ],
        ["keys (sha256): each token", f"{found['key']['token'] * 1e9:.2f} ns"],
    ]
    return table(["", "measured"], rows)


def _stores(results: Results) -> str:
    rows = []
    for name, figures in results["constants"]["stores"].items():
        asked = f"{figures['prefix'] * 1e6:,.0f} us" if "prefix" in figures else ""
        rows.append([name, f"{figures['put'] / GB:.2f}", f"{figures['get'] / GB:.2f}", asked])
    return table(["64 MiB, one call at a time", "put, GB/s", "get, GB/s", "`prefix` of 16 keys"], rows)


def _shapes(_: Results) -> str:
    load = Load()
    rows = [
        [
            shape.name,
            f"{shape.layers} x {shape.kv_heads} x {shape.head_dim}",
            f"{shape.token / 1024:.0f} KiB",
            f"{shape.token * load.chunk / (1 << 20):.0f} MiB",
            f"{shape.token * load.length / GB:.2f} GB",
        ]
        for shape in (*SHAPES, *(shape.quantized() for shape in SHAPES))
    ]
    head = [
        "",
        "layers x KV heads x head_dim",
        "a token",
        f"a page of {load.chunk}",
        f"{load.length:,} tokens",
    ]
    return table(head, rows)


def _load(_: Results) -> str:
    load = Load()
    rows = [
        ["hosts", f"{load.hosts:,}"],
        ["conversations", f"{load.conversations:,}, a turn each every {load.interval:.0f} s"],
        ["requests", f"{load.rate:,.0f} per second, {load.rate / load.hosts:.1f} on each host"],
        ["a prompt", f"{load.context:,} tokens that were there before"],
        ["a turn", f"{load.new} new tokens, question and answer"],
        ["kept of each", f"{load.length:,} tokens in {load.turns} turns"],
        ["fabric", f"{load.fabric / GB:.0f} GB/s in all, between the hosts and the shared tier"],
        ["memory", f"{load.memory / GB:,.0f} GB for K and V in each host"],
    ]
    return table(["", "assumed"], rows)


def _store(results: Results) -> str:
    return next(name for name in STORE if name in results["constants"]["stores"])


def _fleet(results: Results, shape: int) -> str:
    load, store = Load(), _store(results)
    columns = [demands(load, SHAPES[shape], design, results["constants"], store) for design in DESIGNS]
    rows = [[_resource(of), *map(_cell, of)] for of in zip(*columns, strict=True)]
    most = [max(column[:_SHARED], key=lambda demand: demand.share) for column in columns]
    rows.append(["**saturates first**", *(f"{worst.resource}, at {_percent(worst)}" for worst in most)])
    return table([SHAPES[shape].name, *(design.name for design in DESIGNS)], rows)


def _resource(of: Sequence[Demand]) -> str:
    """What there is of it, where that is the same in all designs."""
    if len({demand.had for demand in of}) > 1:
        return f"{of[0].resource} ({of[0].unit})"
    return f"{of[0].resource} ({of[0].had:,g} {of[0].unit})"


def _cell(demand: Demand) -> str:
    text = f"{_number(demand.needed)} ({_percent(demand)})"
    return f"**{text}**" if demand.share > 1 else text


def _percent(demand: Demand) -> str:
    share = 100 * demand.share
    return f"{share:,.0f}%" if share >= 10 else f"{share:.2g}%"


def _even(_: Results) -> str:
    speeds = (1_000, 5_000, 20_000, 100_000)
    rows = [
        [shape.name, *(f"{_number(shape.token * speed / GB)} GB/s" for speed in speeds)]
        for shape in (*SHAPES, *(shape.quantized() for shape in SHAPES))
    ]
    return table(["a host that prefills", *(f"{speed:,} tokens/s" for speed in speeds)], rows)


def _policies(results: Results) -> str:
    found = results["simulation"]["policies"]
    rows = [[policy, *map(_spread, zip(*seeds, strict=True))] for policy, seeds in found.items()]
    heads = [*(f"{share:.0%}" for share in results["simulation"]["shares"]), "no limit"]
    return table(["room for this share of all that is new", *heads], rows)


def _spread(rates: Sequence[float]) -> str:
    middle = f"{100 * statistics.mean(rates):.1f}%"
    return middle if len(rates) == 1 else f"{middle} ±{100 * (max(rates) - min(rates)) / 2:.1f}"


def _traffic(results: Results) -> str:
    found, seeds = results["simulation"]["traffic"], results["simulation"]["seeds"]
    rows = [
        ["requests", f"{found['count']:,}, {seeds} seeds; {found['open']} conversations at a time"],
        [
            "applications",
            f"{found['applications']}, Zipf {found['exponent']:g}; system prompts of {found['system']}",
        ],
        ["documents of each", f"{found['documents']}, Zipf {found['exponent']:g}, of {found['document']}"],
        ["a turn", f"questions of {found['question']}, answers of {found['answer']}, log-normal"],
        [
            "a conversation",
            f"{found['turns']:g} turns, geometric; {found['branching']:.0%} asked again from an earlier one",
        ],
    ]
    return table(["", "tokens on average"], rows)


def _hosts(results: Results) -> str:
    rows = []
    for row in results["simulation"]["fleet"]:
        tokens = row["tokens"]
        rows.append(
            [
                row["routing"],
                row["store"],
                f"{row['hits'] / tokens:.1%}",
                f"{(row['hits'] - row['remote']) / tokens:.1%}",
                f"{row['remote'] / tokens:.1%}",
            ]
        )
    return table(["a conversation's next turn", "shared store", "found", "on the host", "in the store"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "constants": _constants,
    "stores": _stores,
    "shapes": _shapes,
    "load": _load,
    "fleet-small": lambda results: _fleet(results, 0),
    "fleet-large": lambda results: _fleet(results, 1),
    "break-even": _even,
    "traffic": _traffic,
    "policies": _policies,
    "hosts": _hosts,
}


# Plots.


def _plot_policies(results: Results) -> Any:
    axes, simulation = axes_of((7.5, 4.2)), results["simulation"]
    shares = [100 * share for share in simulation["shares"]]
    bounds = []
    for policy, seeds in simulation["policies"].items():
        *rates, bound = [[100 * rate for rate in of] for of in zip(*seeds, strict=True)]
        bounds += bound
        style = "--" if "shallowest" in policy else "-"
        (line,) = axes.plot(shares, [statistics.mean(of) for of in rates], style, marker="o", label=policy)
        spread = [min(of) for of in rates], [max(of) for of in rates]
        axes.fill_between(shares, *spread, alpha=0.15, color=line.get_color())
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.set_xticks([], minor=True)
    axes.axhline(statistics.mean(bounds), linestyle="--", color="gray", label="no limit")
    axes.set(xlabel="room, % of all that is ever new", ylabel="tokens of prompts found, %", ylim=(0, 100))
    axes.set_title("What is found again, by policy and budget")
    legend(axes)
    return axes.figure


def _plot_hosts(results: Results) -> Any:
    axes, rows = axes_of((7.5, 3.6)), results["simulation"]["fleet"]
    names = [f"{row['routing']}\nstore: {row['store']}" for row in rows]
    local = [100 * (row["hits"] - row["remote"]) / row["tokens"] for row in rows]
    remote = [100 * row["remote"] / row["tokens"] for row in rows]
    axes.barh(names, local, label="on the host")
    axes.barh(names, remote, left=local, label="in the shared store")
    axes.invert_yaxis()
    axes.set(xlabel="tokens of prompts found, %", xlim=(0, 100), title="Four hosts and a shared store")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)
    return axes.figure


def _plot_demands(results: Results) -> Any:
    axes, store = axes_of((7.5, 4.2)), _store(results)
    width = 0.8 / len(DESIGNS)
    for i, design in enumerate(DESIGNS):
        found = demands(Load(), SHAPES[0], design, results["constants"], store)
        places = [at + (i - (len(DESIGNS) - 1) / 2) * width for at in range(len(found))]
        axes.barh(places, [100 * demand.share for demand in found], width, label=design.name)
    axes.set_yticks(range(len(found)), [demand.resource for demand in found], fontsize=7)
    axes.axvline(100, linestyle="--", color="gray")
    axes.invert_yaxis()
    axes.set(xlabel="% of what is there", xscale="log")
    axes.set_title(f"{SHAPES[0].name}: what is asked of each resource")
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.15))
    return axes.figure


PLOTS: dict[str, Callable[[Results], bytes]] = {
    "scale-policies.svg": lambda results: svg(_plot_policies(results)),
    "scale-hosts.svg": lambda results: svg(_plot_hosts(results)),
    "scale-demands.svg": lambda results: svg(_plot_demands(results)),
}
