"""The page about pictures: its code runs, and the drawings beside it are those of the caches they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.pictures import PICTURES, draw

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "seeing.md"


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


def test_the_drawings_are_up_to_date(tmp_path: Path) -> None:
    """Else: python -m examples.pictures docs/pictures"""
    drawn = list(draw(tmp_path, plots=False))
    assert [path.stem for path in drawn] == list(PICTURES)
    for path in drawn:
        committed = DOCS / "pictures" / path.name
        assert path.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8"), path.name


def test_every_drawing_is_shown_and_every_one_shown_is_there() -> None:
    shown = {
        name
        for page in DOCS.glob("*.md")
        for name in re.findall(r"\]\(pictures/([\w.-]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}


def test_the_plot_is_drawn_anew(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, plot = draw(tmp_path)
    assert plot.name == "occupancy.svg"
    assert plot.stat().st_size > 10_000
