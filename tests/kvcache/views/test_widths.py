"""Drawings in narrow and wide terminals: headings are whole, and words give way before figures do."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcache
import ml
from kvcache.stores import open_store
from kvcache.views import PrefixPicture, look_at_store, render
from kvcache.views.blocks import tabled
from kvcache.views.text import cells_wide, plain

from .views_rig import bound, talk

WIDTHS = [60, 80, 120]
SAID = "And it came to pass in those days, that the waters prevailed upon the earth. 水は"


@pytest.fixture(scope="module")
def picture() -> PrefixPicture:
    """A conversation that others part from, and one that is open."""
    cache = kvcache.CausalCache()
    with ml.open_backend("numpy") as backend, kvcache.PrefixCache(bound(cache, backend, 2, 64, 64)) as prefix:
        for last in (1, 2):
            talk(prefix, backend, [*range(30), last, last]).close()
        talk(prefix, backend, [*range(30), 3, 3])
        return render(prefix, lambda tokens: SAID, 10)


@pytest.mark.parametrize("width", WIDTHS)
def test_headings_are_whole_and_no_line_is_wider_than_the_terminal(
    picture: PrefixPicture, width: int
) -> None:
    lines = picture.text(width).splitlines()
    assert max(map(cells_wide, lines)) <= width
    (heading,) = [line for line in lines if "in the cache" in line]
    assert heading.split("  ")[-1] == "begins"
    assert all(line == line.rstrip() for line in lines)
    row = lines[lines.index(heading) + 1]
    assert row.split()[:4] == ["0", "32", "32", "30"]
    assert row.endswith("…")


@pytest.mark.parametrize("width", [80, 120])
def test_what_a_node_says_is_cut_before_what_is_known_of_it(picture: PrefixPicture, width: int) -> None:
    nodes = [line for line in picture.text(width).splitlines() if "─ " in line]
    assert len(nodes) >= 2
    for line in nodes:
        assert "s old" in line
        assert not line.endswith("…")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_a_store_has_all_its_columns(width: int, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    with open_store((tmp_path / "kept").as_uri()) as store:
        for i in range(3):
            store.put(f"{i:064x}", [memoryview(b"x" * 100)])
    lines = look_at_store(tmp_path / "kept").text(width).splitlines()
    heading = next(line for line in lines if line.lstrip().startswith("key"))
    assert heading.endswith("last used")
    assert max(map(cells_wide, lines)) <= width


def test_words_give_way_and_figures_do_not() -> None:
    from kvcache.views.text import _table

    table = tabled("", ("tokens", "text", "bytes"), [("1,234", SAID, "5,678"), ("9", "x", "1")], ["", ""])
    narrow = plain(_table(table, 30)).splitlines()
    assert narrow[0].split() == ["tokens", "text", "bytes"]
    assert narrow[1].split()[0] == "1,234"
    assert narrow[1].split()[-1] == "5,678"
    assert "…" in narrow[1]
    assert {cells_wide(line) for line in narrow} == {30}
    wide = plain(_table(table, 200)).splitlines()
    assert SAID in wide[1]
    ends = {cells_wide(line) for line in wide}
    assert len(ends) == 1, "East Asian letters take two columns, and what follows stays in its column"


def test_a_title_has_its_sentence_beside_it_where_there_is_room(picture: PrefixPicture) -> None:
    assert picture.text(120).startswith("prefix tree  ")
    first, second, *_ = picture.lines(30)
    assert [text for text, _ in first] == ["prefix tree"]
    assert second[0][0].startswith("  ")
