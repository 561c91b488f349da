"""How long it takes until all ranks and their starter are gone after one rank is stopped, hangs or is killed.

python -m benchmarks.rank_failures [--backend torch] [--how stop] [--timeout 3] [--times 30] [--window 6]

Each time ``kvcache generate --tensor-parallel`` starts anew; a rank drawn by chance is hit at a moment drawn
from the window, counted from when the ranks were started: while they load modules, join, load the model or
write. A rank that hangs does so in its main thread, as Python gets there: the time counts from that.
Printed is the whole distribution, and how many were over the limit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["main"]

HANG = """
import signal, time
def _hang(*_):
    with open({path!r}, "w") as file:
        file.write(repr(time.monotonic()))
    while True:
        time.sleep(1)
signal.signal(signal.SIGUSR1, _hang)
"""
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "hang": signal.SIGUSR1}
PROMPTS = 2000


def main() -> None:
    options = _options()
    draw = random.Random(options.seed)
    found: list[tuple[float, float, str]] = []
    for _ in range(options.times):
        moment, rank = draw.uniform(*options.window), draw.randrange(options.ranks)
        with tempfile.TemporaryDirectory() as folder:
            seconds, told = once(Path(folder), options, moment, rank)
        found.append((seconds, moment, told))
        print(f"hit rank {rank} after {moment:.2f} s: over after {seconds:.3f} s: {told}", flush=True)
    times = sorted(seconds for seconds, _, _ in found)
    over = sum(seconds > options.timeout for seconds in times)
    print(
        f"{options.backend}, {options.how}, {options.ranks} ranks, timeout {options.timeout:g} s, "
        f"n={len(times)}: min {times[0]:.3f}, median {statistics.median(times):.3f}, "
        f"p90 {times[int(0.9 * (len(times) - 1))]:.3f}, max {times[-1]:.3f}; over the limit: {over}"
    )


def once(folder: Path, options: argparse.Namespace, moment: float, rank: int) -> tuple[float, str]:
    """(seconds from the hit to the starter's end, its last line)."""
    hung = folder / "hung"
    (folder / "sitecustomize.py").write_text(HANG.format(path=str(hung)), encoding="utf-8")
    (folder / "prompts").write_text("And God said\n" * PROMPTS, encoding="utf-8")
    command = [sys.executable, "-m", "kvcache", "generate", "--prompt-lines", str(folder / "prompts")]
    command += ["--max-tokens", "400", "--backend", options.backend, "--quiet"]
    command += ["--tensor-parallel", str(options.ranks), "--timeout", str(options.timeout)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            pids = _ranks(process.pid, options.ranks)
            time.sleep(moment)
            began = time.monotonic()
            if process.poll() is not None:
                told = process.communicate()[1].decode()
                raise RuntimeError(f"the command ended before a rank was hit: {told}")
            os.kill(pids[rank], SIGNALS[options.how])
            _, told = process.communicate(timeout=options.timeout * 4 + 30)
            ended = time.monotonic()
        finally:
            process.kill()
    left = [pid for pid in pids if _alive(pid)]
    if hung.exists():
        began = float(hung.read_text(encoding="utf-8"))
    last = (told.decode().strip().splitlines() or ["no word"])[-1]
    return ended - began, last + (f" LEFT BEHIND: {left}" if left else "")


def _ranks(starter: int, count: int) -> list[int]:
    """Their process ids in order, as soon as all are there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        path = Path(f"/proc/{starter}/task/{starter}/children")
        children = path.read_text(encoding="ascii").split() if path.exists() else []
        if len(children) == count:
            return [int(child) for child in children]
        time.sleep(0.01)
    raise RuntimeError(f"{len(children)} of {count} ranks were started within 60 s")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--backend", default="torch", choices=("torch", "mlx"))
    parser.add_argument("--how", default="stop", choices=tuple(SIGNALS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--window", type=float, nargs=2, default=(0.0, 6.0))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
