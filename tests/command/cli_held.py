"""``kvcache`` as a process that is held at a moment of its work, until something has been done to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["KVCACHE", "held", "piped"]

ROOT = Path(__file__).resolve().parents[2]
KVCACHE = (
    sys.executable,
    "-c",
    "import sys; sys.modules['numba'] = None; from kvcache_engine.command.main import main; main()",
)
"""The command as where numba is not installed, the import of which is half of what a start takes."""

HELD = """
import importlib, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
sys.modules["numba"] = None  # as where it is not installed: half of what a start takes
marker, module, path, call, *arguments = sys.argv[1:]
owner = importlib.import_module(module)
*parents, name = path.split(".")
for parent in parents:
    owner = getattr(owner, parent)
real, calls = getattr(owner, name), 0

def held(*args, **options):
    global calls
    calls += 1
    if calls == int(call):
        Path(marker).write_text(str(getattr(args[0], "pid", "here")) if args else "here")
        time.sleep(60)
    return real(*args, **options)

setattr(owner, name, held)
sys.argv = ["kvcache", *arguments]
from kvcache_engine.command.main import main
main()
"""
"""Runs the command, and waits where a function is called for the nth time."""


def piped(*words: object, **options: Any) -> subprocess.Popen[str]:
    """A process whose streams are pipes of text."""
    line, pipe = [str(word) for word in words], subprocess.PIPE
    return subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", cwd=ROOT, **options
    )


@contextmanager
def held(moment: str, tmp_path: Path, *arguments: object, text: str = "") -> Iterator[subprocess.Popen[str]]:
    """The command, when it has come to ``moment``: module, function, and which call of it.

    ``text`` is what it reads, so far. The marker then holds the id of the process that the function is
    called with, if it is.
    """
    marker = tmp_path / "marker"
    process = piped(sys.executable, "-c", HELD, marker, *moment.split(":"), *arguments)
    try:
        if text:
            process.stdin.write(text)
            process.stdin.flush()
        for _ in range(600):
            if (marker.exists() and marker.read_text()) or process.poll() is not None:
                break
            time.sleep(0.1)
        assert marker.exists(), process.communicate(timeout=10)
        yield process
    finally:
        process.kill()
        process.communicate()
