"""``kvcache chat --store``: conversations are there the next time, by name, text and cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("xxhash")
if os.name != "posix":
    pytest.skip("FileStore needs a POSIX system", allow_module_level=True)

import resource

import ml
from kvcache_engine.conversations import Conversations
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.kept import Conversation, KeptConversations
from kvcache_engine.loading import load_model
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.tokenizer import Tokenizer

from ..rigs.small_models import KINDS
from .cli_held import KVCACHE, held, piped
from .cli_rig import run

NOAH = "And God said unto Noah,"
Make = Callable[..., Path]


def words(store: object, *options: object) -> list[str]:
    return [*map(str, ("chat", "--max-tokens", 12, *(["--store", store] if store else []), *options))]


def ran(store: object, *lines: str, options: Sequence[object] = ()) -> Any:
    """Exit code, stdout and stderr of a chat."""
    return run(*words(store, *options), text="".join(f"{line}\n" for line in lines))


def chat(store: object, *lines: str, told: str = "", options: Sequence[object] = ()) -> str:
    """What is printed; on stderr what is ``told``."""
    ended = ran(store, *lines, options=options)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stderr.count("\n") == bool(told), ended.stderr
    assert told in ended.stderr
    return str(ended.stdout)


@contextlib.contextmanager
def chatting(store: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has answered NOAH, whose pages are written, and two tokens of the next answer."""
    turn = "kvcache.caches.causal:CausalCache.start_forward:15"
    arguments = ["chat", "--max-tokens", 12, "--store", store]
    with held(turn, tmp_path, *arguments, text=f"{NOAH}\nand he went\n") as process:
        for _ in range(600):
            if any((store / "pages").glob("*.entry")):
                break
            time.sleep(0.1)
        yield process


def reused(shown: str) -> int:
    """Tokens from the store, as /stats tells it."""
    (row,) = [line for line in shown.splitlines() if "tokens reused" in line]
    return int(row.split("store ")[1].split(")")[0]) if "store " in row else 0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def files(store: Path) -> dict[str, Path]:
    return {path.name: path for path in (store / "conversations").rglob("*.*")}


# Resumed.


def test_conversations_go_on_as_if_nothing_had_ended_them(store: Path) -> None:
    """By their names, behind answers that have line breaks, and hardly anything is computed again."""
    first = [NOAH, " and he went", " out from me", "/switch two", "In the beginning", "/switch main"]
    second = [", and his sons", "/switch two", "God created", "/list"]
    one, other = chat(store, *first), chat(store, *second, "/stats")
    assert "\n" in one.split("two:")[0].strip("\n").replace("\n ", " "), "an answer of several lines"
    assert (one + other).startswith(chat(None, *first, *second))
    assert reused(other) > 40
    assert int(other.split("tokens computed")[1].split()[0]) < 15


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_kind_of_cache(
    kind: str, make_model: Make, numpy_backend: ml.Backend, store: Path
) -> None:
    folder, settings = make_model(**KINDS[kind]), GenerationOptions(6, ignore_eos=True)
    tokenizer, model = Tokenizer.load(folder), load_model(folder, numpy_backend)

    def talk(texts: Sequence[str], tiers: Sequence[Path]) -> tuple[list[int], int, list[str]]:
        """The conversation, what of it came from the store, and its answers."""
        with Engine(model, tokenizer, EngineOptions(max_sequences=2), tiers) as engine:
            kept = KeptConversations(store, engine.identity, tokenizer.decode) if tiers else None
            conversations, answers = Conversations(engine, tokenizer, kept=kept), []
            for text in texts:
                *_, last = conversations.say(text, settings)
                assert isinstance(last, Finished)
                answers.append(last.text)
            return conversations.current.tokens, engine.prefix.stats.store, answers

    texts = ["In the beginning", "was the word\n", "and so", "it was"]
    begun, _, one = talk(texts[:2], [store])
    gone_on, restored, other = talk(texts[2:], [store])
    assert (gone_on, one + other) == (talk(texts, ())[0], talk(texts, ())[2])
    assert restored == len(begun) - 1, "all that had been computed"


def test_undo_fork_load_and_delete_are_kept_too(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.kv"
    chat(
        store, NOAH, "/fork two", "and he went", "/undo", f"/save {file}", f"/load {file} three", "/fork four"
    )
    listed = chat(store, "/list", "/delete three", "/undo", "/delete main", "/switch two", "/undo", "/undo")
    assert listed.splitlines()[:4] == [f"{name} {count} tokens" for name, count in [
        ("  four  ", 21), ("* main  ", 21), ("  three ", 21), ("  two   ", 21)]]  # fmt: skip
    assert listed.splitlines()[4:] == [
        "three: 21 tokens deleted",
        "main: 21 tokens removed",
        "main is the current conversation; switch to another one before deleting it",
        "two: 21 tokens",
        "two: 21 tokens removed",
        "undo: two has no turn to remove",
    ]
    assert chat(store, "/list") == "  four  21 tokens\n* main  0 tokens\n"


def test_names_of_any_letters(store: Path) -> None:
    names = ["..", "a/b", "é" * 100, "é" * 101, "%41", "a.json", "日本"]
    chat(store, NOAH, *(f"/fork {name}" for name in names))
    shown = chat(store, "/list", "/switch a/b", "and he", options=["--json"])
    listed = json.loads(shown.splitlines()[0])["conversations"]
    assert sorted(each["name"] for each in listed) == sorted([*names, "main"])
    assert all(path.parent.parent == store / "conversations" for path in files(store).values())


# However it ends.


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGKILL, 0), (signal.SIGTERM, 2), (signal.SIGHUP, 2)])
def test_what_ends_the_process_costs_the_running_answer_at_most(
    number: signal.Signals, kept: int, store: Path, tmp_path: Path
) -> None:
    """Told to end, it keeps what there is of it: two tokens."""
    with chatting(store, tmp_path) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    code = -number if number == signal.SIGKILL else 128 + number
    assert (process.returncode, errors) == (code, "")
    said, answered = chat(None, NOAH), chat(None, NOAH, "and he went").splitlines()[1]
    shown = chat(store, "/list", "/undo", "/show", "and he went", "/stats").splitlines()
    assert shown[:3] == [
        f"* main  {24 + kept} tokens",
        f"main: {3 + kept} tokens removed",
        f"{NOAH}{said[:-1]}",
    ]
    assert shown[3] == answered
    assert reused("\n".join(shown)) == 20
    assert not [name for name in files(store) if name.endswith(".tmp")]


def test_two_at_once_lose_nothing_of_each_other(store: Path) -> None:
    """The one that writes second goes on under another name."""
    with piped(*KVCACHE, *words(store)) as process:
        process.stdin.write("/list\n")
        process.stdin.flush()
        process.stdout.readline()
        chat(store, NOAH)
        _, errors = process.communicate("In the beginning\n/list\n", timeout=60)
    assert errors.startswith("kvcache: main has since been written by another process")
    assert chat(store, "/show", "/switch main-2", "/show").split("main-2:")[0].startswith(NOAH)
    assert chat(store, "/switch main-2", "/show").splitlines()[1].startswith("In the beginning")


# What cannot be kept is said, once.


def test_a_full_device_is_told_and_the_exit_code_says_so(store: Path) -> None:
    """The limit of a file's size, as ``ulimit -f`` sets it: none of 100 bytes can be written."""

    @contextlib.contextmanager
    def limited(count: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    chat(store, "/list")
    with limited(100):
        ended = ran(store, NOAH)
    assert ended.stdout == chat(None, NOAH)
    assert ended.exit_code == 1
    assert ended.stderr.splitlines()[-1] == "kvcache: not kept completely: main (File too large)"
    assert "kvcache: a store is full: " in ended.stderr
    lost = "kvcache: close: 40.0 KiB could not be written to any store and are lost\n"
    assert lost in ended.stderr
    assert ended.stderr.count("\n") == 4, ended.stderr
    with limited(4000):
        kept = ran(store, NOAH)
    assert (kept.exit_code, kept.stdout) == (0, ended.stdout), "the text is kept, the pages are not"
    assert kept.stderr.startswith("kvcache: a store is full: put: ")
    assert kept.stderr.splitlines(keepends=True)[1:] == [lost]
    assert "and he" in chat(store, "and he", "/show")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("mounted", ["full", "read only"])
def test_a_real_device_that_takes_nothing(mounted: str, store: Path) -> None:
    store.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", store], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        said = chat(store, NOAH)
        if mounted == "full":
            with contextlib.suppress(OSError), (store / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            ended = ran(store, "and he went")
            assert ended.exit_code == 1
            assert ended.stderr.endswith("main (No space left on device)\n")
            (store / "filler").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,ro", store], check=True)
            told = f"kvcache: {store} is read-only: this chat is not kept"
            shown = chat(store, "/show", "and he went", "/stats", told=told)
            assert shown.startswith(NOAH + said.rstrip("\n"))
            assert reused(shown) > 10
        assert chat(store, "/show", told="is read-only" if mounted == "read only" else "") == f"{NOAH}{said}"
    finally:
        subprocess.run(["umount", store], check=True)


def test_a_damaged_file_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def kept() -> KeptConversations:
        return KeptConversations(tmp_path, "a" * 64, lambda tokens: f"{len(tokens)} tokens\n")

    kept().write(Conversation("main", [1, 2, 3, 4], [0, 2]))
    assert kept().read() == [Conversation("main", [1, 2, 3, 4], [0, 2])]
    (path,) = files(tmp_path).values()
    sound = path.read_bytes()
    for at in range(len(sound)):
        caplog.clear()
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert kept().read() == [], at
        assert str(path) in caplog.text
    other = kept()
    other.read()
    conversation = Conversation("main", [5])
    other.write(conversation, {"main-2"})
    assert conversation.name == "main-3"
    assert path.read_bytes() == damaged
    assert kept().read() == [Conversation("main-3", [5])]


def test_a_writer_that_died_leaves_no_debris(tmp_path: Path) -> None:
    kept = KeptConversations(tmp_path, "a" * 64, lambda tokens: "")
    (kept.folder / ".main.json.0123.tmp").write_bytes(b"half")
    assert kept.read() == []
    assert list(kept.folder.iterdir()) == []


def test_conversations_with_another_model_are_left_alone_and_told(store: Path, stories: Path) -> None:
    said = chat(store, NOAH)
    other = chat(
        store,
        "/list",
        told=f"{store} also has conversations with another model: 1",
        options=["--model", stories],
    )
    assert other == "* main  0 tokens\n"
    assert chat(store, "/show") == f"{NOAH}{said}"


def test_a_store_that_is_no_folder_keeps_no_names_and_says_so() -> None:
    told = "kvcache: memory://***@x keeps what is computed. Names and texts are kept in a folder"
    assert chat("memory://me:secret@x", "/list", told=told) == "* main  0 tokens\n"
