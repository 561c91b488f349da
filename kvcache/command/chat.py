"""``kvcache chat``: several named conversations that share what they begin with."""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import ml
from kvcache.command.app import app, reported
from kvcache.command.chat_input import Reader, files_beginning, words_of
from kvcache.command.completing import stores
from kvcache.command.inspection import show, write_page
from kvcache.command.options import (
    BackendName,
    CacheDtype,
    Debug,
    Device,
    Devices,
    Dtype,
    MaxTokens,
    ModelPath,
    Precision,
    Seed,
    Temperature,
    TopK,
    TopP,
    open_backend_for,
)
from kvcache.command.progress import bars_until_done, draws
from kvcache.command.usage import one_line
from kvcache.runner.config import load_config
from kvcache.runner.conversations import Conversations
from kvcache.runner.engine import Engine, EngineOptions, Failed, Tier
from kvcache.runner.errors import RequestError
from kvcache.runner.loading import bundled_model, load_model
from kvcache.runner.memory import human_bytes
from kvcache.runner.requests import Settings, Token
from kvcache.runner.tokenizer import Tokenizer
from kvcache.tiers import HostTier
from kvcache.views.models import Picture
from kvcache.views.terminal import Beneath

__all__ = ["Chat", "chat"]

Rows = list[tuple[str, str]]

LIVE_NODES = 8
"""Nodes of the trie that are drawn below an answer."""
SEQUENCES = 2
"""One answers at a time: the other's share of the cache keeps what others have said."""


@app.command()
def chat(
    model: ModelPath = None,
    backend: BackendName = "numpy",
    device: Device = None,
    devices: Devices = None,
    dtype: Dtype = Precision.F32,
    cache_dtype: CacheDtype = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    capacity: Annotated[
        int | None, typer.Option(help="Tokens per conversation.", min=2, show_default="the model's, to 4096")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="A folder or URL that keeps conversations.", show_default="none", autocompletion=stores
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Hold several conversations with a model; what they share is computed once. /help tells what to type.

    Reads lines from the terminal or a pipe. Ctrl-C stops an answer and keeps what there is of it.

    Example: kvcache chat --backend torch --max-tokens 48
    """
    with reported(debug):
        settings = Settings(max_tokens, temperature, top_k, top_p, seed)
        path = bundled_model() if model is None else model
        config = load_config(path)
        tokenizer = Tokenizer.load(path)
        stored = (cache_dtype or dtype).dtype
        options = EngineOptions(max_sequences=SEQUENCES, capacity=capacity, cache_dtype=stored)
        tiers: list[Tier] = [HostTier(), *([_url(store)] if store else [])]
        with open_backend_for(config, backend, device, devices) as opened:
            with bars_until_done(quiet=False) as bars:
                loaded = load_model(path, opened, dtype.dtype, bars.loading)
            with Engine(loaded, tokenizer, options, tiers) as engine:
                Chat(Conversations(engine, tokenizer), settings).run()


class Chat:
    """Lines in, answers out: what is said, and commands, which begin with a slash."""

    def __init__(self, conversations: Conversations, settings: Settings) -> None:
        self.conversations = conversations
        self.settings = settings
        self._ended = False
        self._live = False

    def run(self) -> None:
        """To the end of the input, or /quit. Ctrl-C ends it only where the input is no terminal."""
        reader = Reader(self.completions, _show)
        if reader.typed:
            _show(f"{self._name}: type a text to be continued, or /help")
        while not self._ended and (line := reader.read(f"{self._name}> ")) is not None:
            try:
                self.take(line)
            except ml.MLError as error:
                _show(one_line(error))
            except KeyboardInterrupt:
                if not reader.typed:
                    raise
                _show("\ninterrupted; the conversations are as they were")

    def take(self, line: str) -> None:
        """One line. What it is refused for is raised, and nothing has changed then."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self._say(line)
            return
        name, *arguments = words_of(line[1:]) or [""]
        found = _COMMANDS.get(name)
        if found is None:
            close = difflib.get_close_matches(name, _COMMANDS, 1)
            meant = f"did you mean /{close[0]}? " if close else ""
            raise RequestError(f"there is no /{name}; {meant}/help lists what there is")
        least, most = found.arguments
        if not least <= len(arguments) <= most:
            raise RequestError(f"usage: {found.usage}")
        found.run(self, *arguments)

    @property
    def _name(self) -> str:
        return self.conversations.current.name

    def completions(self, before: str, word: str) -> list[str]:
        """What ``word`` may become: a command, a conversation's name, a file."""
        if not before.strip():
            return [each.begun for name, each in _COMMANDS.items() if f"/{name}".startswith(word)]
        found = _COMMANDS.get(before.split()[0].removeprefix("/"))
        if not before.startswith("/") or found is None:
            return []
        expected = found.usage.split()[1:]
        at = len(before.split()) - 1
        kind = expected[at].strip("[]") if at < len(expected) else ""
        if kind == "FILE":
            return files_beginning(word)
        known = (each.name for each in self.conversations)
        return [name for name in known if name.startswith(word)] if kind == "NAME" else []

    def _say(self, text: str) -> None:
        count = 0
        with (
            stop_flag() as stopped,
            contextlib.closing(self.conversations.say(text, self.settings)) as events,
            bars_until_done(quiet=self._draws) as bars,
            self._answer() as write,
        ):
            for event in events:
                if not isinstance(event, Failed):
                    bars.event(event)
                if isinstance(event, Token):
                    count += event.token is not None
                    write(event.text)
                elif isinstance(event, Failed):
                    raise event.error
                if stopped.is_set():
                    break
        _show(f"\n[stopped after {count} tokens]" if stopped.is_set() else "")

    @contextlib.contextmanager
    def _answer(self) -> Iterator[Callable[[str], None]]:
        """Where an answer is written: on a terminal, after /live, with the cache drawn below it."""
        if not self._draws:
            yield _write
            return
        with Beneath(lambda: self._picture(LIVE_NODES), Console(highlight=False)) as below:
            yield below.write

    @property
    def _draws(self) -> bool:
        return self._live and draws(sys.stdout)

    def _picture(self, nodes: int = 100) -> Picture:
        decode = self.conversations.tokenizer.decode
        return self.conversations.engine.prefix.render(decode, nodes)

    # Commands.

    def inspect(self, file: str = "") -> None:
        """Draw what is kept, and the cells; or write the page."""
        if not file:
            show(self._picture(), Console(highlight=False) if draws(sys.stdout) else None)
            return
        write_page(self._picture(), Path(file).expanduser())
        _show(f"wrote {file}")

    def live(self) -> None:
        self._live = not self._live
        _show("the cache is drawn below answers" if self._live else "answers alone")

    def switch(self, name: str) -> None:
        new = self.conversations.switch(name)
        _show(
            f"{name}: {'a new conversation' if new else f'{len(self.conversations.current.tokens)} tokens'}"
        )

    def fork(self, name: str) -> None:
        source = self._name
        self.conversations.fork(name)
        _show(f"{name}: goes on from {source}, {len(self.conversations.current.tokens)} tokens shared")

    def undo(self) -> None:
        _show(f"{self._name}: {self.conversations.undo()} tokens taken back")

    def save(self, file: str) -> None:
        size = self.conversations.save(file)
        tokens = len(self.conversations.current.tokens)
        _show(f"saved {tokens} tokens to {file} ({human_bytes(size)})")

    def load(self, file: str, name: str = "") -> None:
        self.conversations.load(file, name or Path(file).stem)
        _show(f"{self._name}: {len(self.conversations.current.tokens)} tokens")

    def show(self) -> None:
        _show(self.conversations.text())

    def names(self) -> None:
        _show_rows(self._listed())

    def _listed(self) -> Rows:
        """The current one is marked."""
        current = self.conversations.current
        return [
            (f"{'*' if each is current else ' '} {each.name}", f"{len(each.tokens)} tokens")
            for each in self.conversations
        ]

    def stats(self) -> None:
        figures = _figures(self.conversations.engine)
        _show_rows([*self._listed(), *((f"  {name}", value) for name, value in figures)])

    def help(self) -> None:
        width = max(len(each.usage) for each in _COMMANDS.values()) + 2
        lines = (f"{each.usage:<{width}}{each.what}" for each in _COMMANDS.values())
        _show("\n".join(["Any other line is a text that the model goes on with.", *lines]))

    def quit(self) -> None:
        self._ended = True


class _Command:
    def __init__(self, usage: str, what: str, run: Callable[..., None]) -> None:
        self.usage, self.what, self.run = usage, what, run
        name, *words = usage.split()
        self.begun = f"{name} " if words else name
        """As far as it is typed for whoever asks for its completion."""
        self.arguments = sum(not word.startswith("[") for word in words), len(words)


_COMMANDS = {
    "switch": _Command("/switch NAME", "go to another conversation, or begin it", Chat.switch),
    "fork": _Command("/fork NAME", "begin a conversation with all of this one", Chat.fork),
    "list": _Command("/list", "the conversations, and how long they are", Chat.names),
    "undo": _Command("/undo", "take the last turn and its answer back", Chat.undo),
    "show": _Command("/show", "print all of this conversation", Chat.show),
    "save": _Command("/save FILE", "write it to a file, for /load or kvcache load", Chat.save),
    "load": _Command("/load FILE [NAME]", "go to a conversation from a file", Chat.load),
    "inspect": _Command("/inspect [FILE]", "draw trie and cells, or write a page of them", Chat.inspect),
    "live": _Command("/live", "draw them below answers while they come; again: stop it", Chat.live),
    "stats": _Command("/stats", "conversations, and what was computed and reused", Chat.stats),
    "help": _Command("/help", "this list", Chat.help),
    "quit": _Command("/quit", "leave", Chat.quit),
}


def _figures(engine: Engine) -> Rows:
    """What was computed, where the rest came from, and what is kept."""
    totals, reused = engine.statistics, engine.prefix.stats
    origins = {"live": reused.live, "device": reused.device, "host": reused.host, "store": reused.store}
    shown = ", ".join(f"{name} {count}" for name, count in origins.items() if count)
    kept = ", ".join(f"{name} {human_bytes(size)}" for name, size in engine.prefix.nbytes.items())
    return [
        ("tokens reused", f"{reused.reused}{f' ({shown})' if shown else ''}"),
        ("tokens computed", str(totals.computed_tokens)),
        ("tokens generated", str(totals.generated_tokens)),
        ("decode", f"{totals.decode_tokens_per_second:.1f} tokens/s"),
        ("kept", kept),
        ("cache", human_bytes(engine.cache_bytes)),
    ]


@contextlib.contextmanager
def stop_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that what is under way comes to a clean end; a second one interrupts it."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # signals are the main thread's
        return

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _url(store: str) -> str:
    """As ``open_store`` takes it, which a bare folder is not."""
    return store if "://" in store else Path(store).expanduser().absolute().as_uri()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show(text: str) -> None:
    _write(f"{text}\n")


def _show_rows(rows: Rows) -> None:
    width = max(len(name) for name, _ in rows) + 2
    _show("\n".join(f"{name:<{width}}{value}" for name, value in rows))
