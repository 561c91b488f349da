"""The pages of docs are few and short enough to be read: the generated reference does not count."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOST_PAGES, MOST_WORDS, LONGEST = 28, 45_000, 3_000


def test_docs_stay_small_enough_to_be_read() -> None:
    """As ``make words`` counts them: whatever stands between blanks, code and tables included."""
    words = {str(page.relative_to(DOCS)): len(page.read_text("utf-8").split()) for page in DOCS.rglob("*.md")}
    assert len(words) <= MOST_PAGES
    assert sum(words.values()) <= MOST_WORDS
    assert {page: count for page, count in words.items() if count > LONGEST} == {}
