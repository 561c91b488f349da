"""Guides with console blocks: their ``kvcache`` commands, in one folder, print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from .console_blocks import Shell, commands

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("page", ["seeing.md", "conversations.md"])
def test_the_commands_of_a_guide_print_what_it_shows(page: str, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    shell = Shell(home, folder)
    found = [
        command
        for command in commands((DOCS / page).read_text(encoding="utf-8"))
        if "kvcache" in command.text
    ]
    assert len(found) >= 3
    for command in found:
        shell.type(command)
        assert shell.code == 0, command
