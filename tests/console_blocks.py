"""The console blocks of a page: commands behind ``$``, typed one after another, print what the page shows.

Lines behind ``>`` go on with the command above them. ``...`` stands for whatever comes there. What a command
with ``--json`` prints is compared by its keys and kinds of values.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Command", "Shell", "alike", "commands", "matches"]

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_UNSET = ("ML_BACKEND", "FORCE_COLOR")


@dataclass(frozen=True)
class Command:
    """A command, what it prints (nothing: ""), and where it stands."""

    text: str
    printed: str
    line: int
    section: str


def commands(page: str) -> list[Command]:
    """Of all console blocks of a page's text, in order."""
    titles = [(match.start(), match.group(1)) for match in _SECTION.finditer(page)]
    found = []
    for block in _BLOCK.finditer(page):
        first = page.count("\n", 0, block.start(1)) + 1
        section = next((title for at, title in reversed(titles) if at < block.start()), "")
        for text, printed, line in _split(block.group(1).splitlines()):
            found.append(Command(text, printed, first + line, section))
    return found


def _split(lines: Sequence[str]) -> list[tuple[str, str, int]]:
    """Command, what it prints, and in which line of the block it begins."""
    found: list[tuple[list[str], list[str], int]] = []
    for at, line in enumerate(lines):
        if line.startswith("$ "):
            found.append(([line[2:]], [], at))
        elif line.startswith("> ") and not found[-1][1]:
            found[-1][0].append(line[2:])
        else:
            found[-1][1].append(f"{line}\n")
    return [("\n".join(text), "".join(printed), at) for text, printed, at in found]


class Shell:
    """A folder to type commands in, where ``kvcache`` is this checkout's and home is an empty folder.

    Output is 120 columns wide and without colours. Skips where the command line or bash is missing.
    """

    def __init__(self, home: Path, folder: Path) -> None:
        for package in ("typer", "rich", "xxhash"):
            pytest.importorskip(package)
        if shutil.which("bash") is None:
            pytest.skip("there is no bash")
        (home / "kvcache").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvcache "$@"\n')
        (home / "kvcache").chmod(0o755)
        self.folder = folder
        self.code = 0
        """Of the last command."""
        self._settings = {key: value for key, value in os.environ.items() if key not in _UNSET} | {
            "HOME": str(home),
            "PATH": f"{home}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": "utf-8",
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
        }

    def type(self, command: Command) -> None:
        """Run it; asserts that it prints what the page shows, and fails only where that is an error."""
        ended = subprocess.run(
            ["bash", "--norc", "-c", f"(exit {self.code}); {command.text}\n"],
            cwd=self.folder,
            env=self._settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        self.code = ended.returncode
        where = f"line {command.line}: {command.text}\nexit code {ended.returncode}, printed:\n"
        printed = ended.stdout + ended.stderr
        assert ended.returncode == 0 or command.printed.startswith("kvcache"), where + printed
        if "--json" in command.text:
            assert ended.stderr == "", where + printed
            assert alike(json.loads(ended.stdout), json.loads(command.printed)), where + printed
        else:
            assert matches(command.printed, printed), where + printed


def matches(expected: str, printed: str) -> bool:
    pattern = r"[\s\S]*?".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed) is not None


def alike(one: Any, other: Any) -> bool:
    """The same keys and kinds of values; lists by their first elements, and an empty one is like any."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return not one or not other or alike(one[0], other[0])
    return _kind(one) == _kind(other)


def _kind(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if number else type(value).__name__
