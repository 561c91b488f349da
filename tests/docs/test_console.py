"""Guides with console blocks: their ``kvcache`` commands, in one folder, print what the page shows.

The tutorial's other commands are typed too. Its Python is run by test_docs_code.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..rigs.console_blocks import Shell, commands

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("page", "least"), [("conversations.md", 2), ("tutorial.md", 6)])
def test_the_commands_of_a_guide_print_what_it_shows(page: str, least: int, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    shell = Shell(home, folder)
    every = commands((DOCS / page).read_text(encoding="utf-8"))
    found = [command for command in every if page == "tutorial.md" or "kvcache" in command.text]
    assert len(found) >= least
    for command in found:
        shell.type(command)
        assert shell.code == 0, command
    assert page != "tutorial.md" or "<svg" in (folder / "cache.html").read_text(encoding="utf-8")
