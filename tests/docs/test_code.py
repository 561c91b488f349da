"""The Python in the pages runs: every block of a page in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "writing-a-backend.md",
    "writing-a-store.md",
    "remote-stores.md",
    "embedding-transformers.md",
    "embedding-mlx-lm.md",
    "server.md",
}
"""Pages with a test of their own."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name not in ELSEWHERE and BLOCK.search(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_code_of_a_page_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        source = "\n" * line + block.group(1)  # so that a trace names the page's lines
        exec(compile(source, str(path), "exec"), namespace)
    if path.name == "README.md":
        printed = capsys.readouterr().out
        assert printed
        assert f"\n```\n{printed}```\n" in text
    if path.name == "command-line.md":
        assert {file.name for file in tmp_path.iterdir()} >= {"cells.html", "occupancy.svg"}
        assert " 0  ++00" in capsys.readouterr().out
