"""What torchrun, mlx.launch and ours do when one of two ranks is killed, is stopped, or loses its starter.

python -m benchmarks.launchers

The rank that is left ends after 3 seconds without the other, as a group with that timeout would let it.
Printed are the seconds from then (killed, starter killed: from the signal) to the end of the command, its
exit code, the lines it wrote to standard error, and the ranks that are left 2 seconds later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml

WAITS = 3.0
LIMIT = 90.0
RANK = """
import os, pathlib, signal, sys, time
how, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if "KVCACHE_RANKS" in os.environ:
    from kvcache_engine.rank import job_of_rank, leave
    job_of_rank()
else:
    leave = sys.exit
rank = os.environ.get("RANK") or os.environ["MLX_RANK"]
(folder / rank).write_text(str(os.getpid()))
while len(list(folder.iterdir())) < 2:
    time.sleep(0.01)
if rank == "1" and how in ("killed", "stopped"):
    (folder / "hit").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
if how == "stopped":
    time.sleep(3)
    print("kvcache: waited for another", file=sys.stderr)
    leave(76)
time.sleep(600)
"""
OURS = """
import sys
from kvcache_engine.ranks import RanksError, run_ranks
try:
    run_ranks(eval(sys.argv[1]), eval(sys.argv[2]), 2, b"", 5.0)
except RanksError as error:
    sys.exit(f"kvcache: {error}")
"""


def main() -> None:
    specs = ml.backend_specs()
    print("| | seconds | exit code, lines, ranks left |\n|---|---|---|")
    for name in ("torch", "mlx"):
        launcher = specs[name].launcher
        if launcher is None:
            continue
        for how in ("killed", "stopped", "starter killed"):
            for ours in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, "-P", "-c", RANK, how, folder]
                    whole = [*launcher(2), *command]
                    if ours:
                        whole = [sys.executable, "-c", OURS, repr(launcher(2)), repr(command)]
                    who = "ours" if ours else "theirs"
                    print(f"| {name}, {how}, {who} | {once(whole, how, Path(folder))} |", flush=True)


def once(command: list[str], how: str, folder: Path) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environ, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe
    ) as process:
        until = time.monotonic() + 60
        while time.monotonic() < until and sum(path.stat().st_size > 0 for path in folder.iterdir()) < 2:
            time.sleep(0.01)
        pids = [int((folder / rank).read_text(encoding="ascii")) for rank in "01"]
        began = time.time()
        if how == "starter killed":
            process.kill()
        try:
            _, told = process.communicate(timeout=LIMIT)
            seconds = time.time() - began
        except subprocess.TimeoutExpired:
            process.kill()
            return _left(pids, f"more than {LIMIT:g} |")
    since = seconds - WAITS if how == "stopped" else seconds
    lines = len(told.splitlines())
    time.sleep(2)
    return _left(pids, f"{since:.2f} | exit code {process.returncode}, {lines} lines,")


def _left(pids: list[int], told: str) -> str:
    left = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            left += status != "Z"
            os.kill(pid, signal.SIGKILL)
    return f"{told} {left} ranks left"


if __name__ == "__main__":
    main()
