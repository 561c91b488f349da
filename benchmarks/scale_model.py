"""A fleet's demands from measured constants: what each resource has to do, and how far beyond it that is.

Only arithmetic: K and V per token from a model's shape, requests from conversations, and the cost of each
step from :mod:`benchmarks.scale_constants`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GB = 1e9
Constants = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's K and V. ``bits`` per number: 16 for BF16, 8.5 for Q8_0 (32 numbers and one F16 scale)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    bits: float = 16.0

    @property
    def token(self) -> int:
        """Bytes of one token."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.bits / 8)

    def quantized(self) -> Shape:
        return Shape(f"{self.name}, Q8_0", self.layers, self.kv_heads, self.head_dim, 8.5)


SHAPES = (
    Shape("Llama-3-8B", 32, 8, 128),
    Shape("Llama-3-70B", 80, 8, 128),
    Shape("Llama-3.1-405B", 126, 8, 128),
)
"""From their config.json: num_hidden_layers, num_key_value_heads, head_dim."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the fleet. All of these are assumptions."""

    hosts: int = 1000
    conversations: int = 10_000_000
    interval: float = 600.0
    """Seconds from one turn of a conversation to the next."""
    context: int = 2048
    """Tokens of a prompt that were there before, on average."""
    new: int = 384
    """Tokens that a turn adds: question and answer."""
    length: int = 4096
    """Tokens of a conversation that is kept."""
    turns: int = 8
    chunk: int = 512
    """Tokens of a page in a store: the default of PrefixCache."""
    fabric: float = 100 * GB
    """Bytes per second between all hosts together and the shared tier."""
    memory: float = 1024 * GB
    """Bytes for K and V in each host."""

    @property
    def rate(self) -> float:
        """Requests per second of the fleet."""
        return self.conversations / self.interval


@dataclass(frozen=True, slots=True)
class Design:
    """How the fleet uses what it has."""

    name: str
    stays: float
    """The share of turns that are served where the last one was."""
    written: float | None
    """The share of new tokens that goes to the shared tier; None: only what another host then reads."""
    quantized: bool = False
    disk: float = 0.0
    """Bytes of each host's disks that hold K and V besides its memory."""


DESIGNS = (
    Design("A: any host, all is written", 0.001, 1.0),
    Design("B: 99% of turns stay, all is written", 0.99, 1.0),
    Design("C: 99% stay, only what moves is written", 0.99, None),
    Design("D: as C, in Q8_0", 0.99, None, quantized=True),
    Design("E: as D, 8 TB of disk in each host", 0.99, None, quantized=True, disk=8000 * GB),
)


@dataclass(frozen=True, slots=True)
class Demand:
    """``needed`` of ``had``, in ``unit``."""

    resource: str
    needed: float
    had: float
    unit: str

    @property
    def share(self) -> float:
        return self.needed / self.had


def demands(load: Load, shape: Shape, design: Design, constants: Constants, store: str) -> list[Demand]:
    """What each resource has to do; ``store`` names the one whose measured speed counts.

    A host gives one core to each of its steps; the shared tier has one server process per host, and its
    directory is asked over a hundred connections, each for one answer at a time.
    """
    token = (shape.quantized() if design.quantized else shape).token
    each = load.rate / load.hosts
    read = (1 - design.stays) * load.context
    written = read if design.written is None else design.written * load.new
    reads, writes = load.rate * read * token, load.rate * written * token
    speed = constants["stores"][store]
    servers = reads / speed["get"] + writes / speed["put"]
    kept, room = load.conversations * load.length * token, load.hosts * (load.memory + design.disk)
    walk = load.turns * constants["match"]["node"] + load.context * constants["match"]["token"]
    begin, key = constants["begin"]["found"], (load.context + load.new) * constants["key"]["token"]
    radix_tree = load.turns * constants["memory"]["node"] + load.length * constants["memory"]["token"]
    return [
        Demand("the fabric", (reads + writes) / GB, load.fabric / GB, "GB/s"),
        Demand("servers of the shared tier", servers, load.hosts, "processes"),
        Demand("their directory", load.rate * speed["prefix"], 100, "connections"),
        Demand("room for K and V", kept / 1e12, room / 1e12, "TB"),
        Demand(
            "a host: its radix tree",
            load.conversations / load.hosts * radix_tree / GB,
            load.memory / GB,
            "GB",
        ),
        Demand("a host: walks through it", each * walk, 1, "cores"),
        Demand("a host: begin and close", each * begin, 1, "cores"),
        Demand("a host: keys", each * key, 1, "cores"),
        Demand("one radix tree for all hosts", load.conversations * radix_tree / GB, load.memory / GB, "GB"),
        Demand("walks through that", load.rate * walk, 1, "cores"),
    ]
