"""The suite for a cache that is not ours: a right one passes, a wrong one fails by the area, ours pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from benchmarks.pages import DOCS, filled, load
from benchmarks.peers_caches import (
    CACHES,
    CHUNK,
    PAGE,
    RECORD,
    WINDOW,
    Ours,
    tables,
)
from kvcache.testing import AREAS, CacheDriver, DrivenTests, Span, attended, check, keys_and_values


class Lists(CacheDriver):
    """A right one, of lists of tokens."""

    def __init__(self, span: Span, sequences: int) -> None:
        super().__init__(span, sequences)
        self.rows: list[list[int]] = [[] for _ in range(sequences)]

    def feed(self, tokens: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        seen: list[list[list[int]]] = [[] for _ in tokens]
        for row, answers, new in zip(self.rows, seen, tokens, strict=True):
            for token in new:
                row.append(token)
                answers.append(row[self.span.of(len(row) - 1)])
        return seen

    def crop(self, count: int) -> None:
        self.rows = [row[:-count] for row in self.rows]

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [list(self.rows[row]) for row in rows]

    def join(self, other: Lists) -> None:
        self.rows += other.rows

    def copy(self) -> Lists:
        return copy.deepcopy(self)

    save = copy


@pytest.mark.parametrize("span", [Span(), WINDOW, CHUNK], ids=str)
def test_a_right_cache_passes_everything(span: Span) -> None:
    assert {(one.area, one.result) for one in check(Lists, span)} == {(area, "passes") for area in AREAS}


class WithoutWindow(Lists):
    def feed(self, tokens: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        self.span = Span()
        return super().feed(tokens)


class CropsTooFew(Lists):
    def crop(self, count: int) -> None:
        super().crop(max(1, count - 1))


class ForgetsWhoRepeats(Lists):
    def select(self, rows: Sequence[int]) -> None:
        super().select(sorted(rows))


class SharesItsCopies(Lists):
    def copy(self) -> Lists:
        return copy.copy(self)


class SavesTooEarly(Lists):
    def save(self) -> Lists:
        loaded = self.copy()
        loaded.rows = [row[:-1] for row in loaded.rows]
        return loaded


class JoinsInFront(Lists):
    def join(self, other: Lists) -> None:
        self.rows = other.rows + self.rows


class ChangesBeforeItRefuses(Lists):
    def crop(self, count: int) -> None:
        super().crop(count)
        raise ValueError("too late")


class ShowsPadding(Lists):
    """Takes its rows off keys and a mask, which hides no padding."""

    def feed(self, tokens: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        super().feed(tokens)
        return attended(*keys_and_values(self.rows), None, tokens)


@pytest.mark.parametrize(
    ("driver", "areas"),
    [
        (WithoutWindow, {*AREAS}),
        (CropsTooFew, {"crop", "draft"}),
        (ForgetsWhoRepeats, {"select"}),
        (SharesItsCopies, {"copy"}),
        (SavesTooEarly, {"save"}),
        (JoinsInFront, {"join"}),
        (ChangesBeforeItRefuses, {"crop", "draft"}),
    ],
)
def test_a_mistake_fails_in_its_area(driver: type[CacheDriver], areas: set[str]) -> None:
    assert {one.area for one in check(driver, WINDOW) if one.result == "fails"} == areas


def test_a_failure_is_as_short_as_it_can_be() -> None:
    (crop,) = (one for one in check(CropsTooFew, Span()) if one.area == "crop")
    assert crop.why == "feed 1..3; crop 2; feed 4: token 4 attends to [1, 2, 4], not to [1, 4]"
    (padding,) = (one for one in check(ShowsPadding, Span()) if one.area == "padding")
    assert padding.why.endswith("attends to [0, 1], not to [1]")


def test_what_a_driver_lacks_it_has_to_declare() -> None:
    class Bare(CacheDriver):
        absent = frozenset({"select", "join", "copy"})

        def __init__(self, span: Span, sequences: int) -> None:
            super().__init__(span, sequences)
            self.lists = Lists(span, sequences)

        def feed(self, tokens: Sequence[Sequence[int]]) -> list[list[list[int]]]:
            return self.lists.feed(tokens)

    results = {one.area: one.result for one in check(Bare, Span(), 2)}
    assert [area for area, result in results.items() if result == "fails"] == ["crop", "draft", "save"]
    assert [area for area, result in results.items() if result == "absent"] == ["select", "join", "copy"]


class TestOurs(DrivenTests):
    driver = Ours


class TestOurWindow(DrivenTests):
    driver, span = Ours, WINDOW


class TestOurChunks(DrivenTests):
    driver, span = Ours, CHUNK


def test_each_failure_of_the_page_is_still_there_in_a_few_lines() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from benchmarks.peers_reports import REPORTS

    shown = [report() for report in REPORTS]
    assert [(seen, expected) for seen, expected in shown if seen == expected] == []
    outcomes = load(DOCS / RECORD)["caches"].values()
    assert sum(result == "fails" for areas in outcomes for result, _ in areas.values()) == len(shown)


def test_the_page_shows_its_record() -> None:
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    record = load(DOCS / RECORD)
    assert {*record["caches"]} == {*CACHES}
    assert filled(page, tables(record)) == page
