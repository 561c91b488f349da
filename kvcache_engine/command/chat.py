"""``kvcache chat``: several named conversations that share common beginnings."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import ml
from kvcache import HostTier, bytes_text
from kvcache.stores import path_of, without_secrets
from kvcache.views.pictures import Picture
from kvcache.views.rendering import render
from kvcache.views.terminal import Beneath
from kvcache.views.words import counted
from kvcache_engine.command.answers import Answer
from kvcache_engine.command.chat_input import Reader, words_of
from kvcache_engine.command.chat_replies import (
    Reply,
    aligned,
    conversation_records,
    conversation_rows,
    engine_record,
    engine_rows,
)
from kvcache_engine.command.completing import files_beginning, stores
from kvcache_engine.command.grouped import ungrouped
from kvcache_engine.command.inspection import show, write_page
from kvcache_engine.command.json_output import print_json
from kvcache_engine.command.options import Debug, Dtypes, MaxTokens, Place, Sampling, named_store
from kvcache_engine.command.progress import Bars, bars_until_done, draws
from kvcache_engine.command.reporting import one_line, reported
from kvcache_engine.command.saved import saved_line
from kvcache_engine.conversations import ConversationFullError, Conversations, Turn
from kvcache_engine.engine import Engine, EngineOptions, Failed, Tier
from kvcache_engine.errors import RequestError, RunnerError
from kvcache_engine.kept import KeptConversations
from kvcache_engine.requests import GenerationOptions, Token
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.warm_up import warm_up

__all__ = ["Chat", "chat"]

LIVE_NODES = 8
"""The number of nodes of the radix tree drawn below an answer."""
_LOAD = " (use /load FILE for a saved conversation)"
MORE_ROOM = "/undo removes its last turn, /switch NAME starts another"
SEQUENCES = 2
"""Only one answers at a time; the other's share of the cache keeps other conversations."""


@ungrouped
def chat(
    place: Place,
    dtypes: Dtypes,
    sampling: Sampling,
    max_tokens: MaxTokens = 64,
    capacity: Annotated[
        int | None,
        typer.Option(help="Tokens per conversation.", min=2, show_default="the model's, at most 4096"),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="A folder that keeps conversations for the next chat, or a store's URL. A folder takes at "
            "most a tenth of its disk; file:kept?budget=64MiB sets another limit.",
            show_default="none",
            autocompletion=stores,
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Draw the cache below each answer; /live stops.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per answer.")] = False,
    debug: Debug = False,
) -> None:
    """Hold several conversations with a model; common prefixes are computed once. /help lists the commands.

    Reads lines from the terminal or a pipe. Ctrl-C stops an answer and keeps the part that was generated.

    Example: kvcache chat --backend torch --max-tokens 48
    """
    with reported(debug):
        path = place.path
        settings = sampling.settings(max_tokens, path)
        tokenizer = Tokenizer.load(path)
        options = EngineOptions(
            max_sequences=SEQUENCES,
            capacity=capacity,
            cache_dtype=dtypes.cache,
            write_through=False,  # Conversations does this, if the store is writable
        )
        tiers: list[Tier] = [HostTier(), *([named_store(store, _LOAD)] if store else [])]
        with contextlib.ExitStack() as stack:
            with bars_until_done(as_json) as bars:
                loaded = stack.enter_context(place.loaded(dtypes.weights, bars.loading))
                warm_up(loaded.backend)
            with Engine(loaded, tokenizer, options, tiers) as engine:
                kept = _kept(store, engine) if store else None
                Chat(Conversations(engine, tokenizer, kept=kept), settings, as_json, live).run()
                if kept is not None:
                    engine.close(flush=kept.writable)
                    if kept.failed:
                        names, (why, *_) = ", ".join(kept.failed), kept.failed.values()
                        raise RunnerError(f"not kept completely: {names} ({why})")


class Chat:
    """The loop over input lines: text for the model, and commands, which begin with a slash."""

    def __init__(
        self,
        conversations: Conversations,
        settings: GenerationOptions,
        as_json: bool = False,
        live: bool = False,
    ) -> None:
        self.conversations = conversations
        self.settings = settings
        self._as_json = as_json
        self._ended = False
        self._live = live

    def run(self) -> None:
        """Run until the end of the input, or /quit. Ctrl-C ends it only if the input is not a terminal."""
        reader = Reader(self.completions, _say_aside if self._as_json else _show)
        if reader.typed and not self._as_json:
            _show(self._greeting())
        while not self._ended and (line := reader.read(self._prompt)) is not None:
            try:
                self.take(line)
            except ml.MLError as error:
                self._tell(Reply(one_line(error), {"error": one_line(error)}))
            except KeyboardInterrupt:
                if not reader.typed:
                    raise
                text = "interrupted; the conversations are unchanged"
                self._tell(Reply(f"\n{text}", {"error": text}))

    def _greeting(self) -> str:
        greeting = (
            f"continues after {counted(self._tokens, 'token')} (/show prints them); " if self._tokens else ""
        )
        names = [each.name for each in self.conversations if each is not self.conversations.current]
        others = f"; /switch goes to {', '.join(names)}" if names else ""
        return f"{self._name}: {greeting}type a text for the model to continue, or /help{others}"

    def take(self, line: str) -> None:
        """Execute one line. An error is raised, and changes nothing."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self._tell(self._say(line))
            return
        name, *arguments = words_of(line[1:]) or [""]
        command = _COMMANDS.get(name)
        if command is None:
            close = difflib.get_close_matches(name, _COMMANDS, 1)
            meant = f"did you mean /{close[0]}? " if close else ""
            raise RequestError(f"there is no /{name}; {meant}/help lists the commands")
        least, most = command.arguments
        if not least <= len(arguments) <= most:
            raise RequestError(f"usage: {command.usage}")
        reply = command.run(self, *arguments)
        self._tell(Reply(reply.text, {"command": f"/{name}", **reply.record}))

    def _tell(self, reply: Reply) -> None:
        if self._as_json:
            print_json({"conversation": self._name, **reply.record})
        elif reply.text is not None:
            _show(reply.text)

    @property
    def _name(self) -> str:
        return self.conversations.current.name

    @property
    def _prompt(self) -> str:
        return "" if self._as_json else f"{self._name}> "

    def completions(self, before: str, word: str) -> list[str]:
        """The completions of ``word``: commands, conversations' names, files."""
        if not before.strip():
            return [each.begun for name, each in _COMMANDS.items() if f"/{name}".startswith(word)]
        command = _COMMANDS.get(before.split()[0].removeprefix("/"))
        if not before.startswith("/") or command is None:
            return []
        expected = command.usage.split()[1:]
        at = len(before.split()) - 1
        kind = expected[at].strip("[]") if at < len(expected) else ""
        if kind == "FILE":
            return files_beginning(word)
        known = (each.name for each in self.conversations)
        return [name for name in known if name.startswith(word)] if kind == "NAME" else []

    def _say(self, text: str) -> Reply:
        answer = Answer(text)
        with (
            stop_flag() as stopped,
            contextlib.closing(self._events(text)) as events,
            bars_until_done(self._as_json or self._draws) as bars,
            self._answer() as write,
            self._restoring(bars),
        ):
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                bars.event(event)
                answer.take(event)
                if isinstance(event, Token):
                    write(event.text)
                if stopped.is_set():
                    break
        end = ""
        if stopped.is_set():
            end = f"\n[stopped after {counted(len(answer.tokens), 'token')}]"
        elif answer.reason == "capacity":
            end = f"\n[{self._name} is full; {MORE_ROOM}]"
        return Reply(end, answer.record())

    def _events(self, text: str) -> Turn:
        try:
            return self.conversations.say(text, self.settings)
        except ConversationFullError as error:
            engine = self.conversations.engine
            larger = engine.limit < engine.model.config.max_positions
            hint = ", and kvcache chat --capacity gives more room" if larger else ""
            raise RequestError(f"{error}; {MORE_ROOM}{hint}") from None

    @contextlib.contextmanager
    def _answer(self) -> Iterator[Callable[[str], None]]:
        """The output of an answer; on a terminal, after /live, with the cache drawn below it."""
        if self._as_json:
            yield lambda text: None
        elif not self._draws:
            yield _write
        else:
            with Beneath(lambda: self._picture(LIVE_NODES), Console(highlight=False)) as below:
                yield below.write

    @contextlib.contextmanager
    def _restoring(self, bars: Bars) -> Iterator[None]:
        """Show the progress of restoring from host memory or a store."""
        prefix = self.conversations.engine.prefix
        prefix.on_restore = bars.restored
        try:
            yield
        finally:
            prefix.on_restore = None

    @property
    def _draws(self) -> bool:
        return self._live and not self._as_json and draws(sys.stdout)

    def _picture(self, nodes: int = 100) -> Picture:
        decode = self.conversations.tokenizer.decode
        return render(self.conversations.engine.prefix, decode, nodes)

    # Commands.

    def inspect(self, file: str = "") -> Reply:
        """Draw kept content and the cells, or write the page."""
        picture = self._picture()
        if file:
            size = write_page(picture, Path(file))
            return Reply(f"wrote {file} ({bytes_text(size)})", {"file": file, "bytes": size})
        if not self._as_json:
            show(picture, Console(highlight=False) if draws(sys.stdout) else None)
        return Reply(None, picture.record())

    def live(self) -> Reply:
        self._live = not self._live
        text = "the cache is drawn below answers" if self._live else "answers alone"
        return Reply(text, {"live": self._live})

    def switch(self, name: str) -> Reply:
        new, tokens = self.conversations.switch(name), self._tokens
        what = "a new conversation" if new else counted(tokens, "token")
        return Reply(f"{name}: {what}", {"new": new, "tokens": tokens})

    def fork(self, name: str) -> Reply:
        source = self._name
        self.conversations.fork(name)
        text = f"{name}: continues from {source}, {counted(self._tokens, 'token')} shared"
        return Reply(text, {"from": source, "tokens": self._tokens})

    def delete(self, name: str) -> Reply:
        count = self.conversations.delete(name)
        return Reply(f"{name}: {counted(count, 'token')} deleted", {"deleted": name, "tokens": count})

    def undo(self) -> Reply:
        count = self.conversations.undo()
        return Reply(
            f"{self._name}: {counted(count, 'token')} removed", {"taken_back": count, "tokens": self._tokens}
        )

    def save(self, file: str) -> Reply:
        saved = {"file": file, "tokens": self._tokens, "bytes": self.conversations.save(file)}
        return Reply(saved_line(saved), {"saved": saved})

    def load(self, file: str, name: str = "") -> Reply:
        with bars_until_done(self._as_json) as bars:
            self.conversations.load(file, name or Path(file).stem, bars.reading)
        return Reply(
            f"{self._name}: {counted(self._tokens, 'token')}", {"file": file, "tokens": self._tokens}
        )

    def show(self) -> Reply:
        text = self.conversations.text()
        return Reply(text, {"text": text, "tokens": self._tokens})

    def names(self) -> Reply:
        every = self.conversations, self.conversations.current
        text = aligned(conversation_rows(*every), _columns())
        return Reply(text, {"conversations": conversation_records(*every)})

    def stats(self) -> Reply:
        every, engine = (self.conversations, self.conversations.current), self.conversations.engine
        figures = ((f"  {name}", value) for name, value in engine_rows(engine))
        record = {"conversations": conversation_records(*every), **engine_record(engine)}
        return Reply(aligned([*conversation_rows(*every), *figures], _columns()), record)

    def help(self) -> Reply:
        commands = [{"usage": each.usage, "what": each.what} for each in _COMMANDS.values()]
        lines = aligned([(each.usage, each.what) for each in _COMMANDS.values()], _columns())
        text = f"The model continues any other line.\n{lines}"
        return Reply(text, {"commands": commands})

    def quit(self) -> Reply:
        self._ended = True
        return Reply(None)

    @property
    def _tokens(self) -> int:
        """The number of tokens of the current conversation."""
        return len(self.conversations.current.tokens)


class _Command:
    def __init__(self, usage: str, what: str, run: Callable[..., Reply]) -> None:
        self.usage, self.what, self.run = usage, what, run
        name, *words = usage.split()
        self.begun = f"{name} " if words else name
        """The text inserted by completion."""
        self.arguments = sum(not word.startswith("[") for word in words), len(words)


_COMMANDS = {
    "switch": _Command("/switch NAME", "switch to another conversation, or start it", Chat.switch),
    "fork": _Command("/fork NAME", "start a conversation from all of this one", Chat.fork),
    "list": _Command("/list", "list the conversations and their lengths", Chat.names),
    "delete": _Command("/delete NAME", "delete another conversation", Chat.delete),
    "undo": _Command("/undo", "remove the last turn and its answer", Chat.undo),
    "show": _Command("/show", "print all of this conversation", Chat.show),
    "save": _Command("/save FILE", "write it to a file, for /load or kvcache load", Chat.save),
    "load": _Command("/load FILE [NAME]", "load a conversation from a file", Chat.load),
    "inspect": _Command(
        "/inspect [FILE]", "draw the radix tree and the cells, or write them to an HTML page", Chat.inspect
    ),
    "live": _Command("/live", "draw them below each answer as it arrives; again: stop", Chat.live),
    "stats": _Command(
        "/stats", "show the conversations, and how many tokens were computed and reused", Chat.stats
    ),
    "help": _Command("/help", "this list", Chat.help),
    "quit": _Command("/quit", "leave", Chat.quit),
}


@contextlib.contextmanager
def stop_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the current answer ends cleanly; a second one interrupts it."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # only the main thread receives signals
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


def _kept(store: str, engine: Engine) -> KeptConversations | None:
    """The conversations kept in the store's folder, which exists by now; None for other stores."""
    place = named_store(store, _LOAD)
    if isinstance(place, str):
        if not place.startswith("file:"):
            _say_aside(
                f"kvcache: {without_secrets(place)} keeps what is computed. Names and texts are kept in a "
                "folder; /save writes a conversation to a file"
            )
            return None
        place = Path(path_of(place.partition("?")[0]))
    assert engine.tokenizer is not None
    kept = KeptConversations(place, engine.identity, engine.tokenizer.decode)
    if not kept.writable:
        _say_aside(f"kvcache: {store} is read-only: this chat is not kept")
    if kept.others:
        _say_aside(f"kvcache: {store} also has conversations with another model: {kept.others}")
    return kept


def _columns() -> int | None:
    """The columns of the terminal; None: lines are not wrapped."""
    return shutil.get_terminal_size().columns if draws(sys.stdout) else None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say_aside(text: str) -> None:
    typer.echo(text, err=True)


def _show(text: str) -> None:
    _write(f"{text}\n")
