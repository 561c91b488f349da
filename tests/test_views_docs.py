"""The page about pictures: its code runs, and its pictures are those of the caches they name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from examples import pictures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "seeing.md"


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert {path.name for path in tmp_path.iterdir()} >= {"cells.html", "occupancy.svg"}
    assert " 0  ++00" in capsys.readouterr().out


def test_pictures_are_drawn_into_a_folder_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["pictures", str(tmp_path / "new")])
    pictures.main()
    drawn = {path.stem: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert drawn == pictures.drawings()
    assert set(drawn) == {*pictures.PICTURES, "occupancy"}
