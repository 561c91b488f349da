"""``kvcache chat``: named conversations that share what they begin with, from lines of text."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import kvcache_engine.saved
import ml
from kvcache_engine.command.chat import Chat
from kvcache_engine.conversations import ConversationFullError, Conversations
from kvcache_engine.engine import Engine, EngineOptions, Failed
from kvcache_engine.errors import RequestError, TextTooLongError
from kvcache_engine.loading import load_model
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.sampling import Chosen
from kvcache_engine.saved import ConversationError
from kvcache_engine.tokenizer import Tokenizer

from ..rigs.small_models import KINDS
from .cli_held import KVCACHE, piped
from .cli_rig import run
from .cli_terminal import Terminal

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
FEW = GenerationOptions(6, ignore_eos=True)


@pytest.fixture(params=KINDS)
def talk(
    request: pytest.FixtureRequest, make_model: Make, numpy_backend: ml.Backend
) -> Iterator[Conversations]:
    """Conversations with a random model of each kind of cache; no sequence may be held at the end."""
    folder = make_model(**KINDS[request.param])
    tokenizer = Tokenizer.load(folder)
    with Engine(load_model(folder, numpy_backend), tokenizer, EngineOptions(max_sequences=2)) as engine:
        yield Conversations(engine, tokenizer)
        assert not engine.busy
        assert len(engine.prefix.sessions) == 0


def say(talk: Conversations, text: str, settings: GenerationOptions = FEW) -> Finished:
    *_, last = talk.say(text, settings)
    assert isinstance(last, Finished)
    return last


# Conversations.


def test_a_turn_follows_on_all_that_was_said(talk: Conversations) -> None:
    first = say(talk, "abc")
    assert talk.current.tokens == [*talk.tokenizer.encode("abc"), *first.tokens]
    second = say(talk, "def")
    turn = [*talk.tokenizer.encode("abc"), *first.tokens, *talk.tokenizer.encode(" def", bos=False)]
    assert talk.current.tokens == [*turn, *second.tokens]
    assert second.computed == len(" def") + 1  # and the last token of the answer
    before = list(talk.current.tokens)
    say(talk, ", de")
    assert talk.current.tokens[len(before) :][:4] == talk.tokenizer.encode(", de", bos=False), "no blank"
    assert talk.text() == talk.tokenizer.decode(talk.current.tokens)
    assert talk.text().startswith("abc")


BLANKS: dict[str, Any] = {
    "metaspace": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    "none": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
}


@pytest.mark.parametrize("kind", ["stories", *BLANKS])
def test_a_text_that_goes_on_gets_no_blank_of_the_tokenizer(kind: str, stories: Path) -> None:
    tokenizer = Tokenizer.load(stories)
    if kind in BLANKS:
        letters = [*pre_tokenizers.ByteLevel.alphabet(), "▁", "\n"]
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        backend.pre_tokenizer, backend.decoder = BLANKS[kind]
        tokenizer = Tokenizer(backend)
    before = tokenizer.encode("Once")
    for text in (" a time", "and so", ".", ".\n", "\nx", "", "  é"):
        found = tokenizer.decode([*before, *tokenizer.encode_more(text)])
        assert found == tokenizer.decode(before) + text
    with pytest.raises(TextTooLongError):
        tokenizer.encode_more("and so " * 9000, 100)


def test_a_fork_goes_its_own_way_and_computes_only_that(talk: Conversations) -> None:
    say(talk, "In the beginning")
    say(talk, "was")
    original = list(talk.current.tokens)
    talk.fork("other")
    answer = say(talk, "and")
    assert answer.computed == len(" and") + 1
    talk.undo()
    assert talk.current.tokens == original
    again = say(talk, "not")
    assert again.computed <= len(" not") + 1
    assert not talk.switch("main")
    assert talk.current.tokens == original
    assert [each.name for each in talk] == ["main", "other"]


def test_undo_takes_back_turn_by_turn(talk: Conversations) -> None:
    lengths = []
    for text in ("one", "two", "three"):
        lengths.append(len(talk.current.tokens))
        last = say(talk, text)
    talk.undo()
    assert say(talk, "three").tokens == last.tokens
    for length in reversed(lengths):
        talk.undo()
        assert len(talk.current.tokens) == length
    with pytest.raises(RequestError, match="main has no turn"):
        talk.undo()


def test_a_stopped_answer_is_kept_as_far_as_it_came(talk: Conversations) -> None:
    whole = say(talk, "abc", GenerationOptions(20, ignore_eos=True)).tokens
    talk.switch("second")
    events = talk.say("abc", GenerationOptions(20, ignore_eos=True))
    while len(talk.engine.running) == 0 or talk.engine.running[0].run.generated < 4:
        next(events)
    events.close()
    assert talk.current.tokens == [*talk.tokenizer.encode("abc"), *whole[:4]]
    assert len(talk.engine.prefix.sessions) == 0
    say(talk, "d")
    talk.undo()
    talk.undo()
    assert talk.current.tokens == []


def test_a_turn_that_is_closed_before_its_first_event_was_none(talk: Conversations) -> None:
    talk.say("abc", FEW).close()
    talk.say("abc", FEW)
    assert not talk.engine.busy
    assert talk.current.tokens == []
    answer = say(talk, "abc")
    assert talk.engine.statistics.generated_tokens == len(answer.tokens)


def test_a_turn_that_was_asked_for_before_another_one_was_said_is_refused(talk: Conversations) -> None:
    first, second = talk.say("abc", FEW), talk.say("d", FEW)
    list(first)
    text = talk.text()
    with pytest.raises(RequestError, match=r"had 0 tokens when this turn began"):
        next(second)
    assert talk.text() == text
    assert not talk.engine.busy


def test_a_turn_that_is_refused_or_fails_was_none(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(talk, "abc")
    before = list(talk.current.tokens)
    with pytest.raises(TextTooLongError, match="301 tokens or more, and the maximum is 256; shorten it"):
        talk.say("x" * 300)
    full = "main has 10 tokens and the text 251; together they may have 256"
    with pytest.raises(ConversationFullError, match=full):
        talk.say("x" * 250)

    def broken(*_: object) -> Any:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(talk.engine.model, "forward", broken)
        with pytest.raises(RuntimeError, match="the device failed"):
            say(talk, "def")
    assert talk.current.tokens == before
    assert len(talk.current.turns) == 1
    say(talk, "def")


def test_a_turn_that_the_engine_gives_up_was_none(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(talk, "abc")
    before = list(talk.current.tokens), list(talk.current.turns)

    def broken(*_: object) -> int:
        raise RuntimeError("no token can be drawn")

    events = talk.say("def", FEW)
    with monkeypatch.context() as patch:
        patch.setattr(Chosen, "token", broken)
        while not isinstance(next(events), Failed):
            pass
        events.close()
    assert (talk.current.tokens, talk.current.turns) == before


def test_save_and_load_give_another_conversation(talk: Conversations, tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match="save: main is empty, so there is nothing to save"):
        talk.save(tmp_path / "c.kv")
    say(talk, "In the beginning")
    counted = replace(talk.engine.prefix.stats)
    talk.save(tmp_path / "c.kv")
    assert talk.engine.prefix.stats == counted
    talk.load(tmp_path / "c.kv", "copy")
    assert talk.current.name == "copy"
    answer = say(talk, "was")
    assert answer.computed == len(" was") + 1
    with pytest.raises(RequestError, match="there is a conversation copy already"):
        talk.load(tmp_path / "c.kv", "copy")
    with pytest.raises(ConversationError, match="cannot be read"):
        talk.load(tmp_path / "none.kv", "third")
    assert talk.current.name == "copy"


@pytest.mark.parametrize("name", ["", "two words", " x"])
def test_names_are_one_word(talk: Conversations, name: str) -> None:
    with pytest.raises(RequestError, match="one word"):
        talk.switch(name)
    with pytest.raises(RequestError, match="one word"):
        talk.fork(name)


# The command, with the bundled model.


def chat(*lines: str, arguments: tuple[object, ...] = ()) -> Any:
    result = run("chat", "--max-tokens", 8, *arguments, text="".join(f"{text}\n" for text in lines))
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_conversations_share_and_stats_tell_it() -> None:
    shown = chat(
        "And God said unto Noah,", "/fork two", "and he went", "/switch main", "/stats", "/quit", "never said"
    )
    lines = shown.splitlines()
    assert lines[1].startswith("two: continues from main, ")
    rows = {line[2:].rsplit("  ", 1)[0].strip(): line for line in lines}
    assert rows["main"].startswith("* main ")
    assert rows["two"].startswith("  two ")
    shared = int(lines[1].split(", ")[1].split()[0])
    assert f"{shared - 1} (device {shared - 1})" in rows["tokens reused"]
    assert "never said" not in shown


NOAH = "And God said unto Noah,"
FULL = "main is full; /undo removes its last turn, /switch NAME starts another"
NO_ROOM = "main has 25 tokens and the text 3; together they may have 24"
TRANSCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "undo, show, save and load": (
        [NOAH, "/save {}/c.kv", "/undo", "/undo", "/load {}/c.kv", "/show", "/load {}/c.kv"],
        [".+", "saved 17 tokens to .+", "main: 17 tokens removed", "undo: main has no turn to remove",
         "c: 17 tokens", f"{NOAH}.+", "there is a conversation c already; /switch c goes to it"],
    ),
    "what is wrong is one line and the chat goes on": (
        ["/nonsense", "/fork", "/fork a b", "/save /no/such/folder/x", "word " * 600, "", "And God"],
        ["there is no /nonsense; /help lists the commands", *["usage: /fork NAME"] * 2,
         ".*nothing to save.*", ".*and the maximum is 512; shorten it", ".+"],
    ),
    "a conversation that is full says how there is room again": (
        [NOAH, "and he", "and he went", "/switch two", "And"],
        [".+", ".*", rf"\[{FULL}\]", f"{NO_ROOM}; {FULL[14:]}, and kvcache chat --capacity gives more room",
         "two: a new conversation", ".+"],
    ),
    "the current conversation is marked": (
        [NOAH, "/fork two", "/switch three", "/list"],
        [".+", ".+", ".+", "  main   17 tokens", "  two    17 tokens", r"\* three  0 tokens"],
    ),
    "a misspelt command is answered with the one that is meant": (
        ["/swich two", "/"],
        [r"there is no /swich; did you mean /switch\? /help lists the commands",
         "there is no /; /help lists the commands"],
    ),
    "quotes keep the blanks in a file's name": (
        ["And God said", '/save "{}/in the beginning.kv"', "/load '{}/in the beginning.kv' two", '/load "'],
        [".+", "saved 12 .+beginning.kv .+", "two: 12 tokens", '/load ": the quotation mark is not closed'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSCRIPTS)
def test_what_lines_are_answered_with(case: str, tmp_path: Path) -> None:
    lines, expected = TRANSCRIPTS[case]
    options = ("--capacity", 24) if "full" in case else ()
    shown = chat(*(line.replace("{}", str(tmp_path)) for line in lines), arguments=options).splitlines()
    assert len(shown) == len(expected)
    for line, pattern in zip(shown, expected, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_line_that_is_no_text_is_refused_and_the_chat_goes_on(encoding: str) -> None:
    lines = b"And God \xff\n/switch \xff\n/fork two\nAnd God said\n"
    words = ["chat", "--max-tokens", "2"]
    if encoding == "ascii":  # as Python opens its streams
        env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        options: Any = {"input": lines, "capture_output": True, "cwd": ROOT, "env": env, "timeout": 60}
        ended = subprocess.run([*KVCACHE, *words], check=False, **options)
        found = ended.returncode, ended.stderr, ended.stdout
    else:
        result = run(*words, text=lines)
        found = result.exit_code, result.stderr_bytes, result.stdout_bytes
    assert found[:2] == (0, b"")
    shown = found[2].decode().splitlines()
    said = "the text is not valid Unicode: after 'And God ' it has the byte 0xFF, which is not UTF-8"
    assert shown[0] == said
    assert shown[1].startswith("the name ")
    assert shown[2] == "two: continues from main, 0 tokens shared"
    assert len(shown) == 4


# Typed at a keyboard.


@pytest.fixture
def small(make_model: Make, numpy_backend: ml.Backend) -> Iterator[Chat]:
    folder = make_model()
    tokenizer = Tokenizer.load(folder)
    with Engine(load_model(folder, numpy_backend), tokenizer, EngineOptions(max_sequences=2)) as engine:
        yield Chat(Conversations(engine, tokenizer), FEW)


def test_commands_names_and_files_are_completed(
    small: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noah.kv").touch()
    (tmp_path / "notes").mkdir()
    for name in ("two", "three"):
        small.take(f"/fork {name}")
    cases = {
        ("", "/s"): ["/switch ", "/show", "/save ", "/stats"],
        ("", "/q"): ["/quit"],
        ("", "And"): [],
        ("/switch ", "t"): ["two", "three"],
        ("/switch ", ""): ["main", "two", "three"],
        ("/switch two ", ""): [],
        ("/load ", "no"): ["noah.kv", "notes/"],
        ("/load noah.kv ", "ma"): ["main"],
        ("/load ", "/no/such/folder/x"): [],
        ("/show ", ""): [],
        ("/nonsense ", ""): [],
        ("And God ", "s"): [],
    }
    for (before, word), expected in cases.items():
        assert sorted(small.completions(before, word)) == sorted(expected), (before, word)


def typed(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str]) -> None:
    """As if the lines came from a keyboard, and Ctrl-D after them."""

    left = iter(lines)

    def line(prompt: str) -> str:
        for text in left:
            return text
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", line)


def test_ctrl_c_in_a_command_leaves_the_conversations_as_they_were(
    small: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.kv"
    small.take("abc")
    small.take(f"/save {path}")
    before = path.read_bytes()

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    typed(monkeypatch, [f"/load {path} two", f"/save {path}", "/list"])
    with monkeypatch.context() as patch:
        patch.setattr(kvcache_engine.saved, "deserialize", interrupted)
        patch.setattr(os, "fsync", interrupted)
        capsys.readouterr()
        small.run()
    shown = capsys.readouterr().out
    assert shown.count("interrupted; the conversations are unchanged") == 2
    assert shown.splitlines()[-1].startswith("* main")
    assert [each.name for each in small.conversations] == ["main"]
    assert path.read_bytes() == before
    assert list(tmp_path.glob(".*.tmp")) == []
    small.take(f"/load {path} two")


# Ctrl-C.


def test_ctrl_c_stops_the_answer_and_nothing_else(interrupt_step: Callable[[int], None]) -> None:
    interrupt_step(4)
    before = signal.getsignal(signal.SIGINT)
    shown = chat("And God said unto Noah,", "/stats", "and")
    assert "\n[stopped after 4 tokens]\n" in shown
    assert "* main              13 tokens" in shown
    assert len(shown.splitlines()[-1]) > 0  # the next turn is answered
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Engine) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("chat", text="And God\n")
    assert (result.exit_code, result.stderr) == (130, "kvcache: interrupted\n")


def test_a_real_ctrl_c_in_a_pipe(stories: Path) -> None:
    process = piped(*KVCACHE, "chat", "--model", stories, "--max-tokens", 500)
    process.stdin.write("Once\n")
    process.stdin.flush()
    assert process.stdout.read(8) == " upon a "  # it is answering
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate("/undo\n/quit\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "[stopped after " in out
    assert "tokens removed" in out
