"""Two hosts on one Linux machine: network namespaces joined by a cable whose bandwidth can be limited.

A namespace has interfaces, addresses and ports of its own; a veth pair is the cable between two; tc's
token bucket (tbf) on either end says how many bits a second go in. Needs root, and iproute2.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

SUBNET = "10.213.77"
"""The first three numbers of the addresses; they mean nothing outside the two namespaces."""

QUEUE = 4 << 20
"""Bytes that may wait at the end of a limited cable."""


class Namespace:
    """One end: ``address`` is that of its interface; ``command`` starts a program inside."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.interface = f"{name}-v"

    def command(self, *line: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *line]


class Network:
    """Two namespaces that see one another and nothing else. A context manager."""

    def __init__(self) -> None:
        tag = f"kv{os.getpid():x}-{secrets.token_hex(1)}"
        self.ends = tuple(Namespace(f"{tag}{side}", f"{SUBNET}.{i + 1}") for i, side in enumerate("ab"))

    def __enter__(self) -> Self:
        first, second = self.ends
        try:
            for end in self.ends:
                _ip("netns", "add", end.name)
            far = ("peer", "name", second.interface, "netns", second.name)
            _ip("link", "add", first.interface, "netns", first.name, "type", "veth", *far)
            for end in self.ends:
                _ip("-n", end.name, "addr", "add", f"{end.address}/24", "dev", end.interface)
                for interface in ("lo", end.interface):
                    _ip("-n", end.name, "link", "set", interface, "up")
        except BaseException:
            self.close()
            raise
        return self

    def limit(self, bits: float | None) -> None:
        """Let ``bits`` a second through each way; None: as many as the machine moves."""
        for end in self.ends:
            there = ("dev", end.interface, "root")
            if bits is None:
                _run(end.command("tc", "qdisc", "del", *there), check=False)
                continue
            # What an idle link lets through at once: small, or short messages would not be limited.
            bucket = max(4 << 10, int(bits / 8 * 100e-6))
            sizes = ("rate", f"{int(bits)}bit", "burst", str(bucket), "limit", str(QUEUE))
            _run(end.command("tc", "qdisc", "replace", *there, "tbf", *sizes))

    def close(self) -> None:
        """Remove both namespaces, and with them cable and limits."""
        for end in self.ends:
            _run(["ip", "netns", "del", end.name], check=False)

    def __exit__(self, *raised: object) -> None:
        self.close()


def unavailable() -> str:
    """Why this machine makes no network namespaces; empty where it does."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program}; it comes with iproute2"
    try:
        with Network() as network:
            network.limit(1e9)
    except RuntimeError as error:
        return str(error)
    return ""


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(line: Sequence[str], check: bool = True) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {done.stderr.strip() or done.returncode}")
