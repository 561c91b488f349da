"""``kvcache chat`` draws what it keeps: /inspect, /inspect FILE and /live."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer")

import ml
from kvcache_engine.command.chat import Chat
from kvcache_engine.conversations import Conversations
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.errors import RunnerError
from kvcache_engine.loading import load_model
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.tokenizer import Tokenizer

from ...command.cli_terminal import Terminal


@pytest.fixture
def chat(make_model: Callable[..., Path], numpy_backend: ml.Backend) -> Iterator[Chat]:
    folder = make_model()
    tokenizer = Tokenizer.load(folder)
    options = EngineOptions(max_sequences=2, capacity=64)
    with Engine(load_model(folder, numpy_backend), tokenizer, options) as engine:
        yield Chat(Conversations(engine, tokenizer), GenerationOptions(4, ignore_eos=True))


def test_inspect_draws_what_was_said(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("hello")
    chat.take("/inspect")
    shown = capsys.readouterr().out
    assert "prefix tree  1 node" in shown
    assert "└─ hello" in shown
    assert "CausalCache" in shown
    assert "\x1b" not in shown


def test_inspect_writes_a_page(chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("hello <b>")
    chat.take(f"/inspect {tmp_path / 'cache.html'}")
    page = (tmp_path / "cache.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "hello &lt;b&gt;" in page
    assert "wrote " in capsys.readouterr().out
    with pytest.raises(RunnerError, match="cannot be written"):
        chat.take(f"/inspect {tmp_path / 'nowhere' / 'cache.html'}")


def test_live_draws_the_cache_below_the_answer(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take("plain")
    plain = capsys.readouterr().out
    chat.take("/undo")
    chat.take("/live")
    chat.take("plain")
    assert plain in capsys.readouterr().out, "in a pipe, the answer alone"
    chat.take("/undo")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    chat.take("plain")
    drawn = terminal.getvalue()
    shown = drawn.rpartition("\x1b[2K")[2]
    assert "prefix tree" in shown, "what is drawn last stays"
    assert "open sessions" in drawn
    assert "CausalCache" in drawn
    chat.take("/live")
    assert drawn != terminal.getvalue()
    before = len(terminal.getvalue())
    chat.take("/undo")
    chat.take("plain")
    assert "CausalCache" not in terminal.getvalue()[before:]
