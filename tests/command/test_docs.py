"""The page about the command line: each of its commands is run, and prints what the page shows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import kvcache_engine.command.main
from kvcache_engine.command import conformance

from ..rigs.console_blocks import Command, Shell, alike, commands, matches

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
COMMANDS = commands(PAGE)
SECTIONS = list(dict.fromkeys(command.section for command in COMMANDS))


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("section", SECTIONS)
def test_the_commands_of_a_section_print_what_it_shows(
    section: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "EVERY_S", math.inf)  # no lines on how far it is, however long it takes
    if section == "inspect":
        prepare(shell)
    shell.code = 0
    for command in COMMANDS:
        if command.section == section:
            shell.type(command)


def prepare(shell: Shell) -> None:
    """What an earlier section of the page wrote, where that has not run here."""
    made = {"noah.kv": "--out noah.kv", "kept": "--store kept"}
    missing = [option for name, option in made.items() if not (shell.folder / name).exists()]
    for command in COMMANDS:
        if command.section in ("save and load", "chat") and any(option in command.text for option in missing):
            shell.type(command)


def test_every_command_has_a_section_with_a_run_of_it() -> None:
    typer = pytest.importorskip("typer")
    run = "\n".join(command.text for command in COMMANDS)
    for name in typer.main.get_command(kvcache_engine.command.main.app).commands:
        assert f"`{name}" in PAGE.split("## generate")[0] or f"`{name}`" in PAGE
        assert f"kvcache {name}" in run


def test_a_page_that_shows_something_else_would_be_noticed(tmp_path: Path) -> None:
    assert matches("a ... b\n", "a 1 2 b\n")
    assert not matches("a ... b\n", "a 1 2 c\n")
    assert not matches("a\n", "a\nb\n")
    assert alike({"a": [1.5, 2], "b": []}, {"a": [7], "b": ["x"]})
    assert not alike({"a": 1, "b": None}, {"a": 1})
    assert not alike({"a": [True]}, {"a": [1]})
    shell = Shell(tmp_path, tmp_path)
    for wrong in (
        Command("echo a", "b\n", 1, ""),
        Command("echo a", "", 1, ""),
        Command("echo a; exit 3", "a\n", 1, ""),
        Command("echo '{}' # --json", '{"a": 1}\n', 1, ""),
    ):
        with pytest.raises(AssertionError, match="line 1: echo"):
            shell.type(wrong)
    shell.type(Command("echo kvcache: no; false", "kvcache: no\n", 1, ""))
    shell.type(Command("echo $?", "1\n", 1, ""))


def test_commands_are_read_with_their_lines_sections_and_output() -> None:
    page = "## one\n```console\n$ a << 'E'\n> b\n> E\nc\n> d\n```\n## two\n```console\n$ e\n```\n"
    assert commands(page) == [
        Command("a << 'E'\nb\nE", "c\n> d\n", 3, "one"),
        Command("e", "", 11, "two"),
    ]
