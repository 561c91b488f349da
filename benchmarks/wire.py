"""What a connection between two namespaces carries: a plain TCP socket, bytes sent and thrown away.

python -m benchmarks.wire receive ADDRESS PORT      python -m benchmarks.wire send ADDRESS PORT BYTES
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from benchmarks.hosts.network import Network

PORT = 7000
SECONDS = 0.5
"""How long a limited link is kept busy."""
MOST = 1 << 30


def link_speed(network: Network, bits: float | None) -> float:
    """Bits per second from the first end to the second, as the receiver counts them."""
    first, second = network.ends
    size = MOST if bits is None else min(MOST, int(bits / 8 * SECONDS))
    line = [sys.executable, "-m", "benchmarks.wire"]
    where = [second.address, str(PORT)]
    options = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(second.command(*line, "receive", *where), **options) as receiver:  # type: ignore[call-overload]
        try:
            receiver.stdout.readline()
            subprocess.run(first.command(*line, "send", *where, str(size)), check=True, timeout=60)
            return float(receiver.stdout.readline())
        finally:
            receiver.kill()


def receive(address: str, port: int) -> None:
    """Print "ready", take one connection, print the bits per second from its first bytes to its last."""
    buffer = bytearray(1 << 20)
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        peer, _ = server.accept()
        with peer:
            peer.recv_into(buffer)
            total, began = 0, time.perf_counter()
            while count := peer.recv_into(buffer):
                total += count
            print(8 * total / (time.perf_counter() - began), flush=True)


def send(address: str, port: int, size: int) -> None:
    block = bytes(1 << 20)
    with socket.create_connection((address, port)) as peer:
        for start in range(0, size, len(block)):
            peer.sendall(block[: size - start])


if __name__ == "__main__":
    receive(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "receive" else send(
        sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    )
