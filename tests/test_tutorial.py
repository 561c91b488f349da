"""docs/tutorial.md: its commands, one after another in one folder, print what it shows.

Its Python is run by test_docs_code.py.
"""

from __future__ import annotations

from pathlib import Path

from .console_blocks import Shell, commands

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"


def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    shell = Shell(home, folder)
    found = commands(PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 6
    for command in found:
        shell.type(command)
        assert shell.code == 0, command
    assert "<svg" in (folder / "cache.html").read_text(encoding="utf-8")
