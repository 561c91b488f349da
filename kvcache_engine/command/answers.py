"""The answers to some prompts, complete or interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from kvcache_engine.command.json_output import output_record
from kvcache_engine.requests import Event, Finished, Started, Token

__all__ = ["Answer", "Answers", "tell_full"]


class Answer:
    """The answer so far to ``prompt``, the ``number``-th one."""

    def __init__(self, prompt: str, number: int = 0) -> None:
        self.prompt, self.number = prompt, number
        self._started = Started(number, 0, 0)
        self.finished: Finished | None = None
        self._text = ""
        self.tokens: list[int] = []

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, Token):
            self._text += event.text
            self.tokens += [] if event.token is None else [event.token]

    @property
    def reason(self) -> str:
        """Why it ended; "interrupted" if it did not."""
        return "interrupted" if self.finished is None else self.finished.reason

    @property
    def so_far(self) -> Finished:
        """The answer, or the generated part of an interrupted one."""
        if self.finished is not None:
            return self.finished
        begun, tokens = self._started, tuple(self.tokens)
        return Finished(self.number, "length", self._text, tokens, begun.prompt_tokens, begun.reused)

    def record(self) -> dict[str, Any]:
        """An element of ``outputs`` in ``kvcache generate --json``; "interrupted" is an additional reason."""
        return {**output_record(self.prompt, self.so_far), "reason": self.reason}


class Answers:
    """The answers to several prompts, each shown once."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._all = [Answer(prompt, number) for number, prompt in enumerate(prompts)]
        self._waiting = list(self._all)
        self.begun = False
        """Whether anything has happened."""

    def take(self, event: Event) -> None:
        self.begun = True
        self._all[event.request].take(event)

    def ready(self) -> Iterator[Answer]:
        """Complete answers in the order of the prompts, up to the first incomplete one."""
        while self._waiting and self._waiting[0].finished is not None:
            yield self._waiting.pop(0)

    def rest(self) -> Iterator[Answer]:
        """All other answers that are not empty."""
        waiting, self._waiting = self._waiting, []
        return (answer for answer in waiting if answer.finished is not None or answer.tokens)

    def records(self) -> list[dict[str, Any]]:
        return [answer.record() for answer in self._all]


def tell_full(answers: Sequence[Finished], limit: int, most: int) -> None:
    """Report which answers ended because a sequence holds ``limit`` tokens; the model supports ``most``."""
    full = [str(answer.request + 1) for answer in answers if answer.reason == "capacity"]
    if not full:
        return
    what = "the text was cut short" if len(answers) == 1 else f"texts that were cut short: {', '.join(full)}"
    why = f"--capacity is {limit} tokens, and the model supports up to {most}"
    typer.echo(
        f"kvcache: {what}; {why if limit < most else f'the model supports up to {most} tokens'}", err=True
    )
