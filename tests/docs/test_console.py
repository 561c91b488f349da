"""The tutorial's commands, typed in one folder, print what the page shows; test_code.py runs its Python."""

from __future__ import annotations

from pathlib import Path

from ..rigs.console_blocks import Shell, commands

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    shell = Shell(home, folder)
    found = commands((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert len(found) >= 6
    for command in found:
        shell.type(command)
        assert shell.code == 0, command
    assert "<svg" in (folder / "cache.html").read_text(encoding="utf-8")
