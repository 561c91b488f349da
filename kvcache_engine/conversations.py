"""Named conversations over one engine, which share their prefixes and can be forked and undone."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Generator, Iterator

from kvcache_engine.engine import Engine, EngineEvent
from kvcache_engine.errors import RequestError, TextTooLongError
from kvcache_engine.kept import Conversation, KeptConversations
from kvcache_engine.language_model import settings_for
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.saved import ConversationError, adopt, capture, read, write
from kvcache_engine.tokenizer import Tokenizer

__all__ = ["Conversation", "ConversationFullError", "Conversations", "Turn"]

PART = 256 << 20
"""About how many bytes are written to the stores after a turn; the rest follows when the engine is closed."""

Turn = Generator[EngineEvent, None, None]


class ConversationFullError(RequestError):
    """The conversation has no room for another turn."""


class Conversations:
    """Conversations by name, one of which is ``current``. Evictions never lose a conversation.

    A conversation is a list of tokens; the engine computes only those that neither it nor its stores have.
    With ``kept``, saved conversations are available from the start and every change is saved, a user's text
    even before it is answered.

    >>> import ml
    >>> from kvcache_engine import Conversations, Engine, GenerationOptions
    >>> from kvcache_engine import Tokenizer, bundled_model, load_model
    >>> name = bundled_model()
    >>> with ml.open_backend("numpy") as backend:
    ...     tokenizer = Tokenizer.load(name)
    ...     with Engine(load_model(name, backend), tokenizer) as engine:
    ...         talk = Conversations(engine, tokenizer)
    ...         events = list(talk.say("And God said", GenerationOptions(max_new_tokens=4)))
    ...         talk.fork("another")                 # shares everything with the first so far
    ...         talk.current.name, talk.undo() > 0
    ('another', True)
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, kept: KeptConversations | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.kept = kept
        self._all = {each.name: each for each in (kept.read() if kept is not None else ())}
        self.current = self._all.setdefault("main", Conversation("main"))

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all.values())

    def switch(self, name: str) -> bool:
        """Switch to another conversation; True if it is a new, empty one."""
        _check_name(name)
        new = name not in self._all
        self.current = self._all.setdefault(name, Conversation(name))
        return new

    def fork(self, name: str) -> None:
        """Switch to a new conversation that starts as a copy of the current one."""
        self._check_new(name)
        source = self.current
        self.current = self._all[name] = Conversation(name, [*source.tokens], [*source.turns])
        self._keep(self.current)

    def undo(self) -> int:
        """Remove the last turn of the current conversation; returns the number of tokens removed."""
        count = self.current.undo()
        self._keep(self.current)
        return count

    def delete(self, name: str) -> int:
        """Delete a conversation other than the current one; returns its number of tokens."""
        if name not in self._all:
            raise RequestError(f"there is no conversation {name}")
        if name == self.current.name:
            raise RequestError(
                f"{name} is the current conversation; switch to another one before deleting it"
            )
        gone = self._all.pop(name)
        self._keep(Conversation(gone.name))
        return len(gone.tokens)

    def text(self) -> str:
        """The whole text of the current conversation."""
        return self.tokenizer.decode(self.current.tokens)

    def say(self, text: str, settings: GenerationOptions | None = None) -> Turn:
        """One turn: the text, and the model's answer to it. Events are produced as the iterator is consumed.

        The turn begins with the first event. If the iterator is closed early, the answer is what was
        generated until then; if it is closed before the first event, or fails, there was no turn. A space is
        inserted before a text that begins with a letter or digit. Raises RequestError if the text does not
        fit.
        """
        conversation = self.current
        blank, limit = " " if text[:1].isalnum() else "", self.engine.limit
        if conversation.tokens:
            more = self.tokenizer.encode_more(blank + text, limit)
        else:
            more = self.tokenizer.encode(text, most=limit)
        said, count = len(conversation.tokens), len(more)
        if count > limit:
            raise TextTooLongError(count, limit)
        if said + count > limit:
            raise ConversationFullError(
                f"{conversation.name} has {said} tokens and the text {count}; together they may have {limit}"
            )
        settings = settings_for(self.engine.tokenizer, settings)
        prompt = self.engine.encode([*conversation.tokens, *more])
        return self._answer(conversation, said, prompt, settings)

    def _answer(
        self, conversation: Conversation, said: int, prompt: list[int], settings: GenerationOptions
    ) -> Turn:
        if len(conversation.tokens) != said:
            raise RequestError(
                f"say: {conversation.name} had {said} tokens when this turn began, and now has "
                f"{len(conversation.tokens)}; finish one turn before you begin the next"
            )
        request = self.engine.submit(prompt, settings)
        whole = False
        before = conversation.tokens, conversation.turns
        try:
            self._set(conversation, [*request.tokens], [*before[1], len(before[0])])
            while not request.done:
                yield from (event for event in self.engine.step() if event.request == request.id)
            whole = request.error is None
        except GeneratorExit:
            whole = request.started and request.error is None
            raise
        except SystemExit:  # the process is being terminated: the turn so far is kept
            whole = True
            raise
        finally:
            self.engine.cancel(request)
            tokens, turns = (list(request.tokens), conversation.turns) if whole else before
            self._set(conversation, tokens, turns)
        if self.kept is None or self.kept.writable:
            self.engine.prefix.write_through(PART)

    def _set(self, conversation: Conversation, tokens: list[int], turns: list[int]) -> None:
        conversation.tokens, conversation.turns = tokens, turns
        self._keep(conversation)

    def _keep(self, conversation: Conversation) -> None:
        if self.kept is None:
            return
        name = conversation.name
        self.kept.write(conversation, self._all)
        if conversation.name != name:  # another process uses the name
            self._all = {each.name: each for each in self._all.values()}

    def save(self, path: str | os.PathLike[str], inside: int | None = None) -> int:
        """Write the current conversation to a file; returns its bytes. ``inside`` is that of ``capture``."""
        if not self.current.tokens:
            raise ConversationError(f"save: {self.current.name} is empty, so there is nothing to save")
        return write(path, capture(self.engine, self.current.tokens, inside))

    def load(
        self, path: str | os.PathLike[str], name: str, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Switch to a new conversation read from a file; ``progress`` as for ``read``.

        Raises ConversationError.
        """
        self._check_new(name)
        saved = read(path, progress)
        adopt(self.engine, saved)
        self.current = self._all[name] = Conversation(name, list(saved.tokens))
        self._keep(self.current)

    def _check_new(self, name: str) -> None:
        _check_name(name)
        if name in self._all:
            raise RequestError(f"there is a conversation {name} already; /switch {name} goes to it")


def _check_name(name: str) -> None:
    if not name or name.split() != [name]:
        raise RequestError(f"the name {name!r}; it must be one word")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise RequestError(f"the name {name!r}; it must be Unicode text without control characters")
