"""``kvcache`` on terminals: bars on stderr, narrow and dumb ones, NO_COLOR, and Ctrl-C from the keyboard."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from kvcache_engine.command.progress import Bars, draws
from kvcache_engine.command.screen import LiveScreen, PlainScreen, Totals
from kvcache_engine.requests import Event, Finished, Prefilled, Started, Statistics, Token

from .cli_terminal import CTRL_C, CTRL_D, Terminal, drawn, drive

terminal = pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals on Windows")

PROMPT = "And God said unto Noah,"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*[349]\d[;m]")


def console(width: int = 70) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)


def sent(to: Console) -> str:
    return to.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def finished(request: int = 0, text: str = " x") -> Finished:
    return Finished(request, "length", text, (5,), 4, 1)


# Bars.


def test_a_bar_counts_and_goes_when_its_work_is_done() -> None:
    to = console()
    bars = Bars(to)
    for done in range(1, 4):
        bars.loading(done, 3)
    assert "loading" in sent(to)
    assert "2/3 tensors" in sent(to)
    assert sent(to).count(HIDDEN) == sent(to).count(SHOWN)
    before = sent(to)
    bars.stop()
    assert sent(to) == before


def test_the_bar_of_a_prompt_ends_with_the_first_token() -> None:
    to = console()
    bars = Bars(to)
    events: list[Event] = [Started(0, 10, 4), Prefilled(0, 7, 10)]
    for event in events:
        bars.event(event)
    bars.stop()
    assert "7/10 tokens" in sent(to)
    before = sent(to)
    for event in (Token(0, 3, "x"), finished()):
        bars.event(event)
    assert sent(to) == before


def test_the_bar_of_several_prompts_goes_on_to_their_answers() -> None:
    to = console()
    bars = Bars(to, requests=2)
    for event in (Started(0, 2, 0), Started(1, 2, 0), Prefilled(0, 2, 2), Prefilled(1, 2, 2), finished()):
        bars.event(event)
    bars.stop()
    assert "1/2" in sent(to).split("answers")[-1]


def test_a_file_is_counted_in_bytes_and_then_checked() -> None:
    to = console()
    bars = Bars(to)
    bars.reading(1 << 20, 4 << 20)
    bars.reading(4 << 20, 4 << 20)
    bars.stop()
    assert "1.0 MiB of 4.0 MiB" in sent(to)
    assert "checking" in sent(to)


def test_without_a_terminal_there_are_no_bars(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Bars(None)
    bars.loading(1, 3)
    bars.wait("checking")
    bars.event(Started(0, 10, 4))
    bars.stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "drawn"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_lines_are_drawn_on_terminals_that_can(
    name: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", name)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert draws(Terminal()) is drawn
    assert not draws(io.StringIO())


# Screens.


def test_quiet_shows_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveScreen(["In the"], to := console(), quiet=True)
    plain = PlainScreen(["In the"], quiet=True)
    for screen in (live, plain):
        for event in (Started(0, 4, 1), Prefilled(0, 4, 4), Token(0, 7, " end"), finished()):
            screen.event(event)
        screen.stop()
        screen.finish(Statistics(4, 1, 3, 9, 8, 0.5, 0.5), 4096)
    assert capsys.readouterr().out == "In the end\n"
    assert "In the end\n" in sent(to)
    for word in ("tokens", "tok/s", "cache"):
        assert word not in sent(to)


@pytest.mark.parametrize("width", [12, 24, 39, 40, 80])
def test_the_summary_is_whole_at_any_width(width: int) -> None:
    screen = LiveScreen(["In the"], to := console(width))
    screen.finish(Statistics(4, 1, 3, 9, 8, 0.5, 0.5), 4096)
    assert "…" not in sent(to)
    words = re.sub(r"\x1b\[[\d;]*m|[│┌┐└┘─┬┴]", " ", sent(to)).split()
    assert words[:3] == ["tokens", "reused", "1"]
    assert words[-3:] == ["cache", "4.0", "KiB"]
    assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= width for line in sent(to).splitlines())


def test_the_live_screen_streams_whole_lines_and_ends_clean() -> None:
    to = console(40)
    screen = LiveScreen(["In the"], to, Bars(to))
    for done in range(1, 4):
        screen.loading(done, 3)
    screen.event(Started(0, 4, 1))
    screen.event(Prefilled(0, 4, 4))
    words = " beginning God created the heaven and the earth.\nAnd"
    for word in words.split(" ")[1:]:
        screen.event(Token(0, 7, f" {word}"))
    screen.event(finished(0, words))
    screen.stop()
    screen.finish(Statistics(4, 1, 3, 9, 8, 0.5, 0.5), 4096)
    text = sent(to)
    assert "2/3 tensors" in text
    assert "tok/s" in text
    assert "In the beginning God created the heaven\n" in text
    assert "and the earth.\n" in text
    assert "And\n" in text
    assert "4.0 KiB" in text
    assert text.count(HIDDEN) == text.count(SHOWN)  # the cursor is shown again


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_live_screen_shows_all_of_a_text_at_any_width(width: int) -> None:
    screen = LiveScreen(["In the"], to := console(width), quiet=True)
    for event in (Started(0, 4, 1), Prefilled(0, 4, 4), Token(0, 7, " end\n")):
        screen.event(event)
    screen.stop()
    assert "".join(re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", sent(to)).split()) == "Intheend"


def test_the_live_screen_frames_several_answers() -> None:
    screen = LiveScreen(["one", "two"], to := console(60))
    for i in range(2):
        screen.event(Started(i, 2, 0))
        screen.event(finished(i, f" answer {i}"))
    screen.stop()
    screen.finish(Statistics(), 0)
    assert " answer 1" in sent(to)
    assert "2 · reused 1 · computed 3" in sent(to)


def test_the_progress_line_counts() -> None:
    totals = Totals()
    for event in (
        Started(0, 10, 4),
        Prefilled(0, 7, 10),
        Started(1, 2, 0),
        Prefilled(0, 10, 10),
        Token(0, 3, "x"),
    ):
        totals.take(event)
    time.sleep(0.01)
    totals.take(Token(0, None, "rest"))
    totals.take(finished(0, "xrest"))
    line = totals.line(2)
    assert line.startswith("1/2 done · 1 token · ")
    assert line.endswith("tok/s · prompt 10/12 · reused 4 · computed 6")


# Real terminals.


@terminal
def test_bars_and_text_on_a_terminal() -> None:
    code, shown = drive(["generate", "--prompt", PROMPT, "--max-tokens", 12])
    assert code == 0
    for word in ("loading", "tensors", "prompt", "tok/s", "tokens generated"):
        assert word in shown
    assert f"{PROMPT} " in shown
    assert shown.count(HIDDEN) == shown.count(SHOWN)
    assert COLOUR.search(shown)


FEW = ["generate", "--prompt", PROMPT, "--max-tokens", 4]


@terminal
def test_bars_go_to_stderr_where_stdout_is_a_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, shown = drawn(FEW, out)
    assert code == 0
    assert "loading" in shown
    text = out.read_text(encoding="utf-8")
    assert text.startswith(PROMPT)
    assert "\x1b" not in text
    assert "tokens generated  4" in text


@terminal
@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_no_bars_with(option: str, tmp_path: Path) -> None:
    assert drawn([*FEW, option], tmp_path / "out") == (0, "")


@terminal
@pytest.mark.parametrize("line", [FEW, ["--help"]], ids=["generate", "help"])
def test_no_color_is_honoured(line: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for settings, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        code, shown = drawn(line, **settings)
        assert code == 0
        assert ("loading" in shown) is (line is FEW)
        assert bool(COLOUR.search(shown)) is coloured


@terminal
def test_a_dumb_terminal_is_sent_text_alone() -> None:
    code, shown = drawn(FEW, TERM="dumb")
    assert code == 0
    assert "\x1b" not in shown
    assert shown.startswith(PROMPT)
    assert "tokens generated  4\r\n" in shown


@terminal
def test_ctrl_c_from_the_keyboard_leaves_the_terminal_as_it_was() -> None:
    line = ["generate", "--prompt", PROMPT, "--max-tokens", 480]
    for _ in range(5):  # on a busy machine it may be done before the key comes
        code, shown = drive(line, keys=[("tok/s", CTRL_C)])
        if code:
            break
    assert code == 130
    assert re.search(r"kvcache: interrupted after \d+ tokens?; the cache is released\r\n$", shown)
    assert shown.count(HIDDEN) == shown.count(SHOWN)
    assert "Traceback" not in shown


# A chat at the keyboard.


@terminal
def test_a_chat_at_the_keyboard() -> None:
    """Ctrl-C at the prompt leaves nothing, tab completes commands and names, Ctrl-D ends it.

    Ctrl-C stops an answer, and the chat goes on.
    """
    pytest.importorskip("readline")
    for _ in range(5):  # on a busy machine the answer may be whole before the key comes
        code, shown = drive(
            ["chat", "--max-tokens", "400"],
            keys=[
                ("main> ", CTRL_C),
                ("leaves\r\nmain> ", "/fo\ttwo\n"),
                ("tokens shared\r\ntwo> ", "/swi\tma\t\n"),
                ("main: 0 tokens\r\nmain> ", f"{PROMPT}\n"),
                (f"{PROMPT}\r\n", ""),
                (" the ", CTRL_C),
                ("\r\nmain> ", "/undo\n"),
                ("tokens removed\r\nmain> ", "/lisst\n"),
                ("did you mean /list?", ""),
                ("main> ", CTRL_D),
            ],
            env={"INPUTRC": "/dev/null"},
        )
        if "[stopped after " in shown:
            break
    assert code == 0
    assert "[stopped after " in shown
    assert "Traceback" not in shown
    assert "/fork two" in shown
    assert "/switch main" in shown
