"""A conversation that begins on one host and continues on the other: ``python -m examples.two_hosts``.

The hosts are network namespaces where this machine makes them, else two processes on loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.two_hosts.network import Namespace, Network, unavailable
from examples.two_hosts.processes import Process, end_in_order, store_server

TURNS = ("And it came to pass in those days, that God said unto Noah,", " And Noah said,", " And God said,")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.two_hosts", description=__doc__)
    parser.add_argument("--backend", nargs=2, default=["numpy", "numpy"], metavar=("FIRST", "SECOND"))
    parser.add_argument("--bandwidth", type=float, help="gigabits per second between the hosts")
    options = parser.parse_args()
    if options.bandwidth is not None and not 0 < options.bandwidth < math.inf:
        parser.error("--bandwidth must be a number above 0")
    end_in_order()
    try:
        run(options.backend, options.bandwidth)
    except RuntimeError as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("two_hosts: interrupted", file=sys.stderr)
        sys.exit(130)


def run(backends: Sequence[str], bandwidth: float | None) -> None:
    """Say each turn on the other host, and print what was computed and what was restored."""
    reason = unavailable()
    with contextlib.ExitStack() as stack:
        if reason:
            print(f"two processes on loopback ({reason})")
            ends: tuple[Namespace | None, ...] = (None, None)
        else:
            network = stack.enter_context(Network())
            network.limit(None if bandwidth is None else bandwidth * 1e9)
            ends = network.ends
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(store_server(folder, inside=ends[0]))
        hosts = [
            stack.enter_context(Process("--backend", name, "--store", url, inside=end))
            for name, end in zip(backends, ends, strict=True)
        ]
        for host in hosts:
            host.ready()
        tokens: list[int] = []
        for i, text in enumerate(TURNS):
            answer = hosts[i % 2].ask(tokens=tokens, text=text, max_tokens=16)
            tokens = answer["tokens"]
            print(
                f"host {i % 2 + 1}, {backends[i % 2]}: {answer['prompt_tokens']} tokens asked, "
                f"{answer['restored']} from the store, {answer['local']} it had, "
                f"{answer['computed']} computed; "
                f"{1000 * answer['seconds_to_first']:.1f} ms to the first token"
            )
        print(answer["text"])


if __name__ == "__main__":
    main()
