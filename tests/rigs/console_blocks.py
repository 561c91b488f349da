"""The console blocks of a page: commands behind ``$``, typed one after another, print what the page shows.

Lines behind ``>`` go on with the command above them. ``...`` stands for whatever comes there. What a command
with ``--json`` prints is compared by its keys and kinds of values. A plain ``kvcache`` command runs in this
process, and bash runs whatever else there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..needs import need_program

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_UNSET = ("ML_BACKEND", "FORCE_COLOR")
_PLAIN = re.compile(
    r"(?:(?P<source>(?:echo|printf) [^|]*) \| )?kvcache (?P<words>[^|;&<>$\n]*?)"
    r"(?: << 'END'\n(?P<text>.*)\nEND)?",
    re.DOTALL,
)


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
        need_program("bash")
        (home / "kvcache").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvcache_engine "$@"\n'
        )
        (home / "kvcache").chmod(0o755)
        self.folder = folder
        self.code = 0
        """Of the last command."""
        self._settings = {
            "HOME": str(home),
            "PATH": f"{home}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": "utf-8",
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
        }

    def _bash(self, text: str) -> tuple[int, str, str]:
        # Of a last command bash makes itself that, and then no shell is found to complete for.
        ended = subprocess.run(
            ["bash", "--norc", "-c", f"(exit {self.code}); {text}\nexit $?\n"],
            cwd=self.folder,
            env={key: value for key, value in os.environ.items() if key not in _UNSET} | self._settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        return ended.returncode, ended.stdout, ended.stderr

    def _run(self, text: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        plain = _PLAIN.fullmatch(text)
        if plain is None or "completion" in text:
            return self._bash(text)
        from typer.testing import CliRunner

        from kvcache_engine.command.main import app

        given = self._bash(plain["source"])[1] if plain["source"] else f"{plain['text'] or ''}\n"
        with contextlib.chdir(self.folder):
            result = CliRunner().invoke(
                app,
                shlex.split(plain["words"], comments=True),
                input=given if plain["source"] or plain["text"] else "",
                env=self._settings | dict.fromkeys(_UNSET),
                prog_name="kvcache",
            )
        return result.exit_code, result.stdout, result.stderr

    def type(self, command: Command) -> None:
        """Run it; asserts that it prints what the page shows, and fails only where that is an error."""
        self.code, out, errors = self._run(command.text)
        where = f"line {command.line}: {command.text}\nexit code {self.code}, printed:\n"
        printed = out + errors
        assert self.code == 0 or command.printed.startswith("kvcache"), where + printed
        if "--json" in command.text:
            assert errors == "", where + printed
            assert alike(json.loads(out), json.loads(command.printed)), where + printed
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
