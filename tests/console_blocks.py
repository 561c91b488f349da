"""The console blocks of a page: commands behind ``$``, and what each prints; ``...`` stands for anything."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Command", "commands", "run"]

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CHECKER = doctest.OutputChecker()
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Command:
    """One command and what the page says that it prints; None where the page shows nothing."""

    line: int
    text: str
    printed: str | None


def commands(page: Path) -> Iterator[Command]:
    """Of all console blocks, in order."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1)) + 1
        lines = block.group(1).splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            printed = "\n".join(lines[begin + 1 : end])
            yield Command(first + begin, lines[begin][2:], f"{printed}\n" if printed.strip() else None)


def run(command: Command, folder: Path) -> str:
    """What the command printed, in a terminal's width of 120 and without colours.

    Asserts that it ended well, and that it printed what the page shows.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = os.environ | {"PATH": path, "NO_COLOR": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-c", f"set -o pipefail\n{command.text}"]
    ended = subprocess.run(
        shell, cwd=folder, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    where = f"line {command.line}: {command.text}\n"
    assert ended.returncode == 0, f"{where}exit status {ended.returncode}\n{ended.stdout}{ended.stderr}"
    if command.printed is not None:
        shown = ended.stdout + ended.stderr
        assert _CHECKER.check_output(command.printed, shown, _LOOSE), f"{where}printed:\n{shown}"
    return ended.stdout
