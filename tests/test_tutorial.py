"""docs/tutorial.md: its commands, one after another in one folder, print what it shows.

Its Python is run by test_docs_code.py.
"""

from __future__ import annotations

from pathlib import Path

from . import console_blocks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"


def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    found = list(console_blocks.commands(PAGE))
    assert len(found) >= 6
    for command in found:
        console_blocks.run(command, tmp_path)
    assert "<svg" in (tmp_path / "cache.html").read_text(encoding="utf-8")
