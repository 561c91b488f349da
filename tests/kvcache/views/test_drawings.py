"""Drawings: text, colours, SVG and HTML say what the picture says, and what others wrote stays text."""

from __future__ import annotations

import html.parser
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache import CausalCache, EncoderCache, HostTier, InvalidRangeError, WrapperCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.storage.sizes import bytes_text
from kvcache.views import look_at_mask, render
from kvcache.views.blocks import CellMap, CellRun, NodeView, SequenceView
from kvcache.views.colors import DARK, EMPTY, PAPER, sequence_color
from kvcache.views.pictures import CachePicture, MaskPicture, Picture, PrefixPicture
from kvcache.views.svg import fitted
from kvcache.views.text import cells_wide
from kvcache.views.words import age_text, counted, preview, printable

from .views_rig import bound, store, talk

HOSTILE = "</title><script>alert(1)</script>\x1b[31m\n\u202eevil\"'&"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def prefix_picture(numpy_backend: ml.Backend) -> PrefixPicture:
    """Three nodes and two sessions, whose text is hostile."""
    with PrefixCache(bound(CausalCache(), numpy_backend), budget=4096, tiers=[HostTier(8192)]) as prefix:
        talk(prefix, numpy_backend, [1, 2, 3, 4, 5, 6]).close()
        talk(prefix, numpy_backend, [1, 2, 3, 7, 8]).close()
        talk(prefix, numpy_backend, [1, 2, 9, 10])
        return render(prefix, decode=lambda ids: f"{HOSTILE}{ids[0]}")


def drawn(numpy_backend: ml.Backend) -> CachePicture:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=8, stored={0: 4})
    cache.copy_prefix(0, 1, 2)
    store(cache, numpy_backend, 1, [2])
    picture: CachePicture = render(cache)
    return picture


def elements(document: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(document).iter())


def tips(document: str) -> list[str]:
    return [element.text or "" for element in elements(document) if element.tag == f"{SVG}title"]


# Text.


def test_a_map_of_cells_as_text(numpy_backend: ml.Backend) -> None:
    assert drawn(numpy_backend).text(64) == (
        "CausalCache\n"
        "  5 of 16 cells used, 2 shared, 1 hole (the largest 4 cells),\n"
        "  512 B\n"
        " 0  ++00····1·······\n"
        "    0-9a-zA-Z the sequence that holds it, + shared, · free, a\n"
        "    mark is 1 cell\n"
        "  sequence  tokens  positions  shared  next token sees  runs\n"
        "         0       4  0 to 3          2                4     1\n"
        "         1       3  0 to 2          2                3     2\n"
        "  a step reads  7 cells a layer in 1 call, and 1 of padding\n"
        "  gathered  8 cells"
    )


def test_a_trie_as_text(numpy_backend: ml.Backend) -> None:
    with PrefixCache(bound(CausalCache(), numpy_backend)) as prefix:
        for tokens in ([1, 2, 3, 4], [1, 2, 5], [9]):
            talk(prefix, numpy_backend, tokens).close()
        lines = ESCAPES.sub("", render(prefix).text()).splitlines()
    assert lines[2:6] == [
        "├─ 1 2  cache  2 tokens, 64 B, 0 s old, 1 used since",
        "│  ├─ 3 4  cache  2 tokens, 64 B, 0 s old, 2 used since, leaves first",
        "│  └─ 5  cache  1 token, 32 B, 0 s old, 1 used since",
        "└─ 9  cache  1 token, 32 B, 0 s old",
    ]


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_no_line_is_wider_than_asked(prefix_picture: PrefixPicture, width: int) -> None:
    lines = prefix_picture.text(width).splitlines()
    assert max(map(cells_wide, lines)) <= width


def test_wide_characters_take_two_columns() -> None:
    assert [cells_wide(text) for text in ("abc", "日本", "e\u0301")] == [3, 4, 1]
    node = NodeView(None, 0, 0, 9, "日本語" * 20, ("cache",), 1)
    picture = PrefixPicture((node,), 1, 0, (), (), 0, 0, 0, CachePicture("c", 0, ()))
    assert max(map(cells_wide, picture.text(40).splitlines())) <= 40


def test_a_deep_trie_is_drawn_without_recursion() -> None:
    nodes = tuple(NodeView(i - 1 if i else None, i, i, i + 1, f"n{i}", ("cache",), 32) for i in range(3000))
    picture = PrefixPicture(nodes, 3000, 0, (), (), 0, 0, 0, CachePicture("c", 0, ()))
    lines = picture.text(60).splitlines()
    assert "n2999  cache" in lines[3000]
    assert "⋯" in lines[3000]
    assert tips(picture.svg())[-1].startswith("n2999")


def test_many_sequences_and_cells_are_condensed() -> None:
    runs = tuple(CellRun(i * 10, i * 10 + 10, (i,), 0, 0) for i in range(1000))
    views = tuple(SequenceView(i, 10, 0, 9, 0, 10, 1) for i in range(1000))
    picture = CachePicture("c", 0, (CellMap("c", "", 10_000, 0, views, runs),))
    lines = picture.text(100).splitlines()
    assert len(lines) < 100
    assert "a mark is 10 cells" in picture.text(100)
    assert "... 936 more" in lines[-1]
    assert lines[2].split()[1] == "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ##"
    assert "a mark is 5 cells" in picture.svg()
    assert "and 992 more" in picture.svg()


# Colours and rich.


def test_rich_draws_the_same_and_interprets_nothing(prefix_picture: PrefixPicture) -> None:
    rich = pytest.importorskip("rich.console")
    node = NodeView(None, 0, 0, 4, "[bold red]markup[/] :smile:", ("cache",), 64)
    picture = PrefixPicture((node,), 1, 0, (), (), 0, 0, 0, prefix_picture.cache)
    for shown in (picture, prefix_picture):
        stream = io.StringIO()
        rich.Console(file=stream, width=100, force_terminal=True, color_system="truecolor").print(shown)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
        assert [line.rstrip() for line in printed.splitlines()] == shown.text(100).splitlines()
    assert "[bold red]markup[/] :s" in picture.text(100)


def test_a_watched_cache_is_drawn_as_it_is_now(numpy_backend: ml.Backend) -> None:
    rich = pytest.importorskip("rich.console")
    from kvcache.views import Watched

    cache = bound(CausalCache(), numpy_backend)
    watched = Watched(lambda: render(cache))

    def shown() -> str:
        stream = io.StringIO()
        rich.Console(file=stream, width=80).print(watched)
        return stream.getvalue()

    assert "0 of 48 cells used" in shown()
    store(cache, numpy_backend, 0, range(5))
    assert "5 of 48 cells used" in shown()
    cache.close()
    assert "5 of 48 cells used" in shown(), "the last one stays"


# SVG.


def test_every_run_of_cells_is_a_box_that_says_whose_it_is(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=64, stored={0: 4})
    cache.copy_prefix(0, 1, 2)
    store(cache, numpy_backend, 1, [2])
    kept = cache.snapshot(0, 0, 4)
    cache.remove(0, 1)
    assert kept.in_cache
    found = dict.fromkeys(tips(render(cache).svg()))
    assert list(found) == [
        "cell 0: sequences 0, 1, positions 0 to 0, in 1 snapshot",
        "cell 1: sequence 1, positions 1 to 1, in 1 snapshot",
        "cells 2 to 3: kept, in 1 snapshot",
        "cells 4 to 63: free",
        "cell 64: sequence 1, positions 2 to 2",
        "cells 65 to 127: free",
    ]


def test_a_shared_cell_has_the_colours_of_all_that_hold_it(numpy_backend: ml.Backend) -> None:
    boxes = [e for e in elements(drawn(numpy_backend).svg()) if e.tag == f"{SVG}rect" and len(e)]
    first = [e for e in boxes if (e[0].text or "").startswith("cells 0 to 1")]
    assert {e.get("fill") for e in first} == {sequence_color(0), sequence_color(1)}
    numbers = [e.text for e in elements(drawn(numpy_backend).svg()) if e.get("class") == "in small"]
    assert numbers == ["0", "1", "2", "3", "2"], "positions, in cells that are wide enough"


def test_boxes_lie_within_the_drawing_and_cover_every_cell() -> None:
    runs = (CellRun(0, 100, (0,), 0, 0), CellRun(100, 200, (), 0, None))
    picture = CachePicture("c", 0, (CellMap("c", "", 200, 0, (), runs),))
    root = ElementTree.fromstring(picture.svg())
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = [e for e in root.iter(f"{SVG}rect") if len(e)]
    areas = [(float(e.get("x", 0)), float(e.get("y", 0)), float(e.get("width", 0))) for e in boxes]
    assert all(0 <= x <= x + w <= width + 0.01 and 0 <= y < height for x, y, w in areas)
    step = 896 / 64
    assert sum(w for _, _, w in areas) == pytest.approx(200 * step)


def test_a_trie_lies_along_its_positions(prefix_picture: PrefixPicture) -> None:
    named = [e for e in elements(prefix_picture.svg()) if e.tag == f"{SVG}rect" and len(e)]
    bars = [e for e in named if " / " in (e[0].text or "")]
    spans = [(float(e.get("x", 0)), float(e.get("width", 0))) for e in bars]
    assert spans == [pytest.approx(span) for span in ((430, 261), (691, 261), (691, 174))]


# HTML.


class Page(html.parser.HTMLParser):
    """What a browser would make of a page: its tags, attributes and text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_is_whole_and_loads_nothing(prefix_picture: PrefixPicture) -> None:
    document = prefix_picture.html("A & B <title>")
    page = Page(document)
    loading = {"script", "link", "img", "iframe", "object", "embed", "use", "image", "foreignobject"}
    assert not page.tags & loading
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "xlink:href", "srcset", "action", "onload", "onclick", "data"}
    assert not [v for _, v in page.attributes if "url(" in v and not v.startswith("url(#")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "@import" not in document
    assert re.findall(r"https?://[^\"]*", document) == ["http://www.w3.org/2000/svg"], "a name, not a link"
    assert "A & B <title>" in page.words


def test_hostile_text_stays_text(prefix_picture: PrefixPicture) -> None:
    document = prefix_picture.html()
    assert "script" not in Page(document).tags
    assert "&lt;script&gt;alert(1)" in document
    for text in (document, prefix_picture.svg(), prefix_picture.text(), prefix_picture.json()):
        assert "\x1b[31m" not in text
        assert "\u202e" not in text
    shown = [node.text for node in prefix_picture.nodes]
    assert all(text.startswith("</title><script>alert(1)</script>\\x1b[31m\\n") for text in shown)
    assert any(shown[0] in tip for tip in tips(prefix_picture.svg())), "the same text, after unescaping"


def test_tables_say_everything_that_is_known_of_a_node(prefix_picture: PrefixPicture) -> None:
    words = " ".join(Page(prefix_picture.html()).words)
    for said in ("Open sessions", "Nodes", "leaves first", "[3, 6)", "1 used since", "3 snapshots"):
        assert said in words


# All forms.


def every_picture(numpy_backend: ml.Backend) -> list[Picture]:
    wrapper = bound(WrapperCache(CausalCache(), EncoderCache()), numpy_backend)
    cache = bound(CausalCache(), numpy_backend, stored={0: 3})
    return [render(wrapper), render(cache), look_at_mask(cache)]


def test_every_picture_has_every_form(numpy_backend: ml.Backend, tmp_path: Path) -> None:
    for picture in every_picture(numpy_backend):
        assert str(picture) == picture.text()
        assert json.loads(picture.json()) == picture.record()
        assert picture.record()["picture"] == type(picture).__name__
        ElementTree.fromstring(picture.svg())
        assert picture._repr_html_() in picture.html()
        for ending in (".html", ".svg", ".json", ".txt"):
            path = picture.save(tmp_path / f"picture{ending}")
            assert path.read_text(encoding="utf-8").strip()
        with pytest.raises(InvalidRangeError, match=r"ends in \.html, \.svg, \.json, \.txt"):
            picture.save(tmp_path / "picture.png")
        assert not (tmp_path / "picture.png").exists()


def test_a_mask_is_its_rows_as_text_boxes_and_json(numpy_backend: ml.Backend) -> None:
    picture = look_at_mask(bound(CausalCache(), numpy_backend, stored={1: 3}))
    assert isinstance(picture, MaskPicture)
    assert picture.text().splitlines()[1:4] == ["1:0 █··", "1:1 ██·", "1:2 ███"]
    seen = [[True, False, False], [True, True, False], [True, True, True]]
    boxes = [e for e in elements(picture.svg()) if e.tag == f"{SVG}rect" and len(e)]
    assert [e.get("fill") == sequence_color(1) for e in boxes] == [one for row in seen for one in row]
    record: dict[str, Any] = json.loads(picture.json())
    assert record["seen"] == seen
    assert record["queries"] == [[1, 0], [1, 1], [1, 2]]
    assert record["cells"] == [16, 17, 18]


# Words.


def test_words() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB",
    ]  # fmt: skip
    assert [age_text(s) for s in (-1, 59.9, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    assert [counted(n, w) for n, w in ((1, "token"), (2, "entry"), (1000, "cell"))] == [
        "1 token", "2 entries", "1,000 cells",
    ]  # fmt: skip
    assert printable("a\tb\x7f\x9b\u200b\ud800é日") == "a\\tb\\x7f\\x9b\\u200b\\ud800é日"
    assert preview([1] * 30, None) == "1 " * 23 + "1…"
    assert preview([1] * 24, None) == "1 " * 23 + "1"
    assert preview([1] * 50, lambda ids: f"{len(ids)} tokens") == "48 tokens…"
    assert fitted("abcdef", 20) == "a…"


def test_lines_of_free_cells_are_drawn_once(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=512, stored={0: 3, 1: 2})
    lines = render(cache).text().splitlines()[2:8]
    free = "·" * 64
    assert lines == [
        "   0  000" + free[3:],
        "  64  " + free,
        "   ⋮  6 more lines of free cells",
        " 512  11" + free[2:],
        " 576  " + free,
        "   ⋮  6 more lines of free cells",
    ]


def on_screen(output: str) -> list[str]:
    """What a terminal shows after this output: of its codes, those that rich uses to draw over lines."""
    lines, row = [""], 0
    for part in re.split(r"(\r|\n|\x1b\[\??[0-9;]*[A-Za-z])", output):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part and part[0] not in "\r\x1b":
            lines[row] += part
    while lines and not lines[-1]:
        lines.pop()
    return [line.rstrip() for line in lines]


def test_a_picture_beneath_text_stays_below_all_of_it(numpy_backend: ml.Backend) -> None:
    console = pytest.importorskip("rich.console").Console
    from kvcache.views.terminal import Beneath

    cache = bound(CausalCache(), numpy_backend)
    stream = io.StringIO()
    with Beneath(lambda: render(cache), console(file=stream, force_terminal=True, width=80)) as below:
        below.write("In the [bold]begin")
        store(cache, numpy_backend, 0, range(5))
        below.write("ning\nGod")
        shown = stream.getvalue()
    assert "0 of 48 cells used" in shown
    lines = on_screen(shown)
    assert lines[:2] == ["In the [bold]beginning", "God"]
    assert "  5 of 48 cells used, 1.5 KiB" in lines
    assert on_screen(stream.getvalue())[:2] == ["In the [bold]beginning", "God"]
    assert on_screen(stream.getvalue()).count("  5 of 48 cells used, 1.5 KiB") == 1
    silent = io.StringIO()
    with Beneath(lambda: render(cache), console(file=silent, force_terminal=False, width=80)) as below:
        below.write("a\nb")
    assert silent.getvalue() == "a\nb"


def test_a_page_tells_what_the_words_on_it_mean(
    numpy_backend: ml.Backend, prefix_picture: PrefixPicture
) -> None:
    page = prefix_picture.html()
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert {"cell", "snapshot", "prefix tree", "tier", "node", "leaves first"} <= set(told)
    assert "checkpoint" not in told
    assert "leaves first" not in re.findall(r"<dt>(.*?)</dt>", drawn(numpy_backend).html())


def test_every_colour_of_ours_has_one_for_the_dark(numpy_backend: ml.Backend) -> None:
    document = drawn(numpy_backend).svg()
    rules = document.split("@media(prefers-color-scheme:dark)")[1].split("</style>")[0]
    grounds = {element.get("fill") for element in elements(document) if element.tag == f"{SVG}rect"} & set(
        DARK
    )
    assert {PAPER, EMPTY} <= grounds
    assert all(f'[fill="{color}"]{{fill:{DARK[color]}}}' in rules for color in grounds)


def test_a_notebook_shows_caches_as_pictures(
    numpy_backend: ml.Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = interactive.InteractiveShell()
    shell.history_manager.end_session()
    cache = bound(CausalCache(), numpy_backend, stored={0: 4})
    assert "text/html" not in shell.display_formatter.format(cache)[0]
    shell.run_line_magic("load_ext", "kvcache.views")
    shown, _ = shell.display_formatter.format(cache)
    assert shown["text/html"].startswith("<svg")
    assert shown["text/plain"] == repr(cache)
    with PrefixCache(bound(CausalCache(), numpy_backend)) as prefix:
        assert "<svg" in shell.display_formatter.format(prefix)[0]["text/html"]
    assert "text/html" not in shell.display_formatter.format(CausalCache())[0]
    shell.run_line_magic("unload_ext", "kvcache.views")
    assert "text/html" not in shell.display_formatter.format(cache)[0]
