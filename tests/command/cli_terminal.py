"""``kvcache`` on a pseudo-terminal that is its controlling one, so that keys such as Ctrl-C reach it."""

from __future__ import annotations

import contextlib
import io
import os
import select
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from .cli_held import KVCACHE

ROOT = Path(__file__).resolve().parents[2]
CTRL_C = "\x03"
CTRL_D = "\x04"
SILENCE_S = 30


class Terminal(io.StringIO):
    """One that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def drawn(arguments: Sequence[object], stdout: Path | None = None, **env: str) -> tuple[int, str]:
    """As ``drive``, in this process and with nothing typed; ``stdout``: a file in place of the terminal."""
    import pty

    from typer.main import get_command

    from kvcache_engine.command.main import app

    leader, follower = pty.openpty()
    settings = {"TERM": "xterm", "COLUMNS": "70", **env}
    with (
        ThreadPoolExecutor(1) as reader,
        open(follower, "w") as terminal,
        contextlib.nullcontext(terminal) if stdout is None else stdout.open("w") as out,
        mock.patch.multiple(sys, stdout=out, stderr=terminal),
        mock.patch.dict(os.environ, settings),
    ):
        sent = reader.submit(_typed, leader, [])
        with pytest.raises(SystemExit) as ended:
            get_command(app).main(list(map(str, arguments)), prog_name="kvcache")
        terminal.close()
        text = sent.result()
    os.close(leader)
    return int(ended.value.code or 0), text


def drive(
    arguments: Sequence[object],
    keys: Sequence[tuple[str, str]] = (),
    env: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code, and all that the terminal was sent.

    ``keys``: pairs in order, what is typed once the text before it has been shown.
    """
    import fcntl
    import pty
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    environment = {**os.environ, "TERM": "xterm", **(env or {})}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [*KVCACHE, *map(str, arguments)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    try:
        shown = _typed(leader, list(keys))
        return process.wait(SILENCE_S), shown
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def _typed(leader: int, keys: list[tuple[str, str]]) -> str:
    # What was shown, up to where it was waited for, and how much of it there was at the last key.
    shown, seen, typed = b"", 0, 0
    last, silent = "", 0
    while silent < SILENCE_S:
        if not select.select([leader], [], [], 1)[0]:
            silent += 1
            if last == CTRL_C and len(shown) == typed:
                # input() with readline misses a signal that comes just before it waits for a key
                os.write(leader, last.encode())
            continue
        silent = 0
        try:
            piece = os.read(leader, 65536)
        except OSError:  # how Linux reports the end
            break
        if not piece:
            break
        shown += piece
        while keys and (at := shown.find(keys[0][0].encode(), seen)) >= 0:
            seen = at + len(keys[0][0].encode())
            last, typed = keys.pop(0)[1], len(shown)
            os.write(leader, last.encode())
    assert not keys, f"{keys[0][0]!r} was not shown in {shown.decode()!r}"
    return shown.decode()
