"""Named conversations over one engine: they share what they begin with, and can be forked and taken back."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from kvcache.runner.engine import Engine, EngineEvent, Request
from kvcache.runner.errors import RequestError
from kvcache.runner.requests import Settings
from kvcache.runner.saved import adopt, capture, read, write
from kvcache.runner.tokenizer import Tokenizer

__all__ = ["Conversation", "Conversations"]

Turn = Generator[EngineEvent, None, None]


@dataclass(slots=True)
class Conversation:
    """``tokens`` that were said, and at ``turns`` where each turn began."""

    name: str
    tokens: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def undo(self) -> int:
        """Take the last turn back, and its answer; returns how many tokens went."""
        if not self.turns:
            raise RequestError(f"undo: {self.name} has no turn to take back")
        begin = self.turns.pop()
        count = len(self.tokens) - begin
        del self.tokens[begin:]
        return count


class Conversations:
    """Conversations by name, one of them the ``current`` one. Nothing here is lost by an eviction.

    A conversation is its tokens; what the engine still has of them is never computed again.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str = "main") -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.current = Conversation(name)
        self._all = {name: self.current}

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all.values())

    def switch(self, name: str) -> bool:
        """Go to another conversation; True where it is a new, empty one."""
        _check_name(name)
        new = name not in self._all
        self.current = self._all.setdefault(name, Conversation(name))
        return new

    def fork(self, name: str) -> None:
        """Go to a new conversation that begins with all of the current one."""
        self._check_new(name)
        source = self.current
        self.current = self._all[name] = Conversation(name, [*source.tokens], [*source.turns])

    def undo(self) -> int:
        """Take the last turn of the current conversation back; returns how many tokens went."""
        return self.current.undo()

    def text(self) -> str:
        """All that was said in the current conversation."""
        return self.tokenizer.decode(self.current.tokens)

    def say(self, text: str, settings: Settings | None = None) -> Turn:
        """A turn: the text, and the model's answer to it. Events come as the iterator is drawn from.

        Where it is closed early, what was generated until then is the answer; where it fails, there was
        no turn. A text that begins with a letter or digit follows what was said before after a blank.
        Raises RequestError for one that does not fit.
        """
        conversation = self.current
        blank = " " if conversation.tokens and text[:1].isalnum() else ""
        more = self.tokenizer.encode(blank + text, bos=not conversation.tokens)
        request = self.engine.submit([*conversation.tokens, *more], settings)
        return self._answer(conversation, request)

    def _answer(self, conversation: Conversation, request: Request) -> Turn:
        whole = False
        try:
            while not request.done:
                yield from (event for event in self.engine.step() if event.request == request.id)
            whole = request.error is None
        except GeneratorExit:
            whole = request.started
            raise
        finally:
            self.engine.cancel(request)
            if whole:
                conversation.turns.append(len(conversation.tokens))
                conversation.tokens = list(request.tokens)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the current conversation to a file; returns its bytes."""
        return write(path, capture(self.engine, self.current.tokens))

    def load(
        self, path: str | os.PathLike[str], name: str, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Go to a new conversation, the one that a file holds; ``progress`` as ``read`` takes it.

        Raises ConversationError.
        """
        self._check_new(name)
        saved = read(path, progress)
        adopt(self.engine, saved)
        self.current = self._all[name] = Conversation(name, list(saved.tokens))

    def _check_new(self, name: str) -> None:
        _check_name(name)
        if name in self._all:
            raise RequestError(f"there is a conversation {name} already; /switch {name} goes to it")


def _check_name(name: str) -> None:
    if not name or name.split() != [name]:
        raise RequestError(f"the name {name!r}; it is one word")
