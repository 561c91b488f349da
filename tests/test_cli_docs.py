"""The page about the command line: each of its commands is run, and prints what the page shows.

In the page, "..." stands for whatever comes there. JSON is compared by its keys and kinds of values.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvcache.cli

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "command-line.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)


class Command(NamedTuple):
    """A line of a block, with those that go on from it, and what it prints."""

    line: str
    expected: str


def commands(block: str) -> list[Command]:
    found: list[list[str]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append([line[2:], ""])
        elif line.startswith("> ") and not found[-1][1]:
            found[-1][0] += f"\n{line[2:]}"
        else:
            found[-1][1] += f"{line}\n"
    return [Command(line, expected) for line, expected in found]


def sections() -> dict[str, list[Command]]:
    """The commands of each section, in order: one may use what those before it in the page wrote."""
    text = PAGE.read_text(encoding="utf-8")
    titles = [(match.start(), match.group(1)) for match in SECTION.finditer(text)]
    found: dict[str, list[Command]] = {title: [] for _, title in titles}
    for match in BLOCK.finditer(text):
        title = [title for start, title in titles if start < match.start()][-1]
        found[title] += commands(match.group(1))
    return {title: lines for title, lines in found.items() if lines}


def alike(one: Any, other: Any) -> bool:
    """The same keys and kinds of values; lists by their first elements, and an empty one is like any."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return not one or not other or alike(one[0], other[0])
    return kind(one) == kind(other)


def kind(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def matches(expected: str, printed: str) -> bool:
    pattern = r"[\s\S]*?".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed) is not None


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``kvcache`` is this checkout's, and home is an empty folder."""
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    pytest.importorskip("xxhash")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    home = tmp_path_factory.mktemp("home")
    (home / "kvcache").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvcache "$@"\n')
    (home / "kvcache").chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if key not in ("ML_BACKEND", "FORCE_COLOR")}
    return {
        **inherited,
        "HOME": str(home),
        "PATH": f"{home}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.mark.parametrize("title", sections())
def test_the_commands_of_a_section_print_what_it_shows(
    title: str, shell: dict[str, str], folder: Path
) -> None:
    if title == "inspect":
        prepare(shell, folder)
    code = 0
    for line, expected in sections()[title]:
        done = subprocess.run(
            ["bash", "--norc", "-c", f"(exit {code}); {line}\n"],
            capture_output=True,
            encoding="utf-8",
            cwd=folder,
            env=shell,
            check=False,
            timeout=120,
        )
        code, printed = done.returncode, done.stdout + done.stderr
        if "--json" in line:
            assert done.stderr == "", line
            assert alike(json.loads(done.stdout), json.loads(expected)), f"{line}\n{done.stdout}"
        else:
            assert matches(expected, printed), f"{line}\n{printed}"


def prepare(shell: dict[str, str], folder: Path) -> None:
    """What an earlier section of the page wrote, where that has not run here."""
    for line, _ in [*sections()["save and load"], *sections()["chat"]]:
        made = {"noah.kv": "--out noah.kv", "kept": "--store kept"}
        if any(option in line and not (folder / name).exists() for name, option in made.items()):
            subprocess.run(["bash", "-c", line], cwd=folder, env=shell, check=True, capture_output=True)


def test_every_command_has_a_section_with_a_run_of_it() -> None:
    typer = pytest.importorskip("typer")
    text = PAGE.read_text(encoding="utf-8")
    run = "\n".join(line for lines in sections().values() for line, _ in lines)
    for name in typer.main.get_command(kvcache.cli.app).commands:
        assert f"`{name}" in text.split("## generate")[0] or f"`{name}`" in text
        assert f"kvcache {name}" in run


def test_a_page_that_shows_something_else_would_be_noticed() -> None:
    assert matches("a ... b\n", "a 1 2 b\n")
    assert not matches("a ... b\n", "a 1 2 c\n")
    assert not matches("a\n", "a\nb\n")
    assert alike({"a": [1.5, 2], "b": []}, {"a": [7], "b": ["x"]})
    assert not alike({"a": 1, "b": None}, {"a": 1})
    assert not alike({"a": [True]}, {"a": [1]})
    assert commands("$ a << 'E'\n> b\n> E\nc\n$ d\n") == [
        Command("a << 'E'\nb\nE", "c\n"), Command("d", "")
    ]  # fmt: skip
