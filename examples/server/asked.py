"""What a request asks for: the JSON of OpenAI's completions and chat completions, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcache.runner.errors import RequestError
from kvcache.runner.requests import Settings

from .errors import ApiError

__all__ = ["Asked", "Fields", "Template", "parse_chat", "parse_completion"]

MAX_CHOICES = 32
Template = Callable[[list[dict[str, str]]], str | list[int]]
"""Makes a prompt of messages."""
_REFUSED = {
    "logit_bias": ({}, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "suffix": ("", None),
    "echo": (False, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "tools": ([], None),
    "functions": ([], None),
    "response_format": ({"type": "text"}, None),
}
"""Fields that would change the answer and are not served, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``prompts`` are texts or token ids, ``choices`` answers to each; ``settings`` without a limit set."""

    prompts: list[str | list[int]]
    choices: int
    max_tokens: int | None
    settings: Settings
    stream: bool
    include_usage: bool

    def settings_for(self, choice: int, max_tokens: int) -> Settings:
        """Of one answer: with a seed, each has its own."""
        seed = self.settings.seed
        return Settings(
            max_tokens,
            self.settings.temperature,
            self.settings.top_k,
            self.settings.top_p,
            None if seed is None else seed + choice,
            self.settings.stop,
        )


class Fields:
    """The fields of a JSON object; each is checked as it is read. ApiError names the one that is wrong."""

    def __init__(self, body: bytes) -> None:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON ({error})") from None
        if not isinstance(found, dict):
            raise ApiError(400, "the body is no JSON object")
        self._found: Mapping[str, Any] = found

    def raw(self, name: str) -> Any:
        return self._found.get(name)

    def model(self, served: str) -> None:
        """There is one model; a request names it, or none."""
        name = self._found.get("model", served)
        if name != served:
            raise ApiError(
                404, f"The model '{name}' does not exist; there is {served}", "model", "model_not_found"
            )

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._read(name, default, lambda value: type(value) is bool, "true or false"))

    def integer(self, name: str, default: int | None, low: int, high: int | None = None) -> Any:
        def fits(value: Any) -> bool:
            return type(value) is int and low <= value and (high is None or value <= high)

        return self._read(name, default, fits, f"an integer >= {low}" + (f" and <= {high}" if high else ""))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        def fits(value: Any) -> bool:
            return type(value) in (int, float) and low <= value <= high

        return float(self._read(name, default, fits, f"a number in [{low:g}, {high:g}]"))

    def stops(self) -> tuple[str, ...]:
        found = self._found.get("stop") or ()
        stops = (found,) if isinstance(found, str) else found
        if (
            not isinstance(stops, (list, tuple))
            or len(stops) > 4
            or not all(isinstance(stop, str) and stop for stop in stops)
        ):
            raise ApiError(400, "'stop' is a string, or up to 4 of them, none empty", "stop")
        return tuple(stops)

    def refuse(self) -> None:
        """Say which field is not served, rather than answer as if it had not been given."""
        for name, idle in _REFUSED.items():
            if name in self._found and self._found[name] not in idle:
                raise ApiError(
                    400, f"'{name}' is not supported by this server", name, "unsupported_parameter"
                )

    def _read(self, name: str, default: Any, fits: Callable[[Any], bool], what: str) -> Any:
        value = self._found.get(name)
        if value is None:
            return default
        if not fits(value):
            raise ApiError(400, f"'{name}' is {value!r}; it is {what}", name)
        return value


def parse_completion(fields: Fields, served: str) -> Asked:
    """The body of ``POST /v1/completions``."""
    prompts = _prompts(fields.raw("prompt"))
    return _asked(fields, served, prompts, fields.integer("max_tokens", 16, 1))


def parse_chat(
    fields: Fields, served: str, template: Callable[[list[dict[str, str]]], str | list[int]]
) -> Asked:
    """The body of ``POST /v1/chat/completions``; ``template`` makes a prompt of messages."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "'messages' is a list of at least one message", "messages")
    prompt = template([_message(message, i) for i, message in enumerate(messages)])
    limit = fields.integer("max_completion_tokens", fields.integer("max_tokens", None, 1), 1)
    return _asked(fields, served, [prompt], limit)


def _asked(fields: Fields, served: str, prompts: list[str | list[int]], max_tokens: int | None) -> Asked:
    fields.model(served)
    fields.refuse()
    choices = fields.integer("n", 1, 1, MAX_CHOICES)
    if len(prompts) * choices > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts with n={choices}; {MAX_CHOICES} answers at most", "n")
    seed = fields.raw("seed")
    try:
        settings = Settings(
            temperature=fields.number("temperature", 1.0, 0, 2),
            top_k=fields.integer("top_k", 0, 0),
            top_p=fields.number("top_p", 1.0, 1e-9, 1),
            seed=None if seed is None else fields.integer("seed", 0, -(2**63)) % 2**32,
            stop=fields.stops(),
        )
    except RequestError as error:
        raise ApiError(400, str(error)) from None
    options = fields.raw("stream_options") or {}
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return Asked(prompts, choices, max_tokens, settings, fields.flag("stream"), usage)


def _prompts(found: Any) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(found, str):
        return [found]
    if isinstance(found, list) and found:
        if all(isinstance(item, str) for item in found):
            return list(found)
        if all(type(item) is int for item in found):
            return [found]
        if all(
            isinstance(item, list) and item and all(type(token) is int for token in item) for item in found
        ):
            return list(found)
    raise ApiError(400, "'prompt' is a string, an array of strings, or of token ids, and not empty", "prompt")


def _message(found: Any, i: int) -> dict[str, str]:
    where = f"messages[{i}]"
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise ApiError(400, f"'{where}' is an object with a role and a content", where)
    content = found.get("content")
    if isinstance(content, list):
        parts = [_text(part) for part in content]
        if None in parts:
            raise ApiError(400, f"'{where}.content' has parts that are no text", where)
        content = "".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        raise ApiError(400, f"'{where}.content' is a string", where)
    return {"role": found["role"], "content": content}


def _text(part: Any) -> str | None:
    """The text of a part of a message's content; None for an image, a sound, or no part at all."""
    found = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return found if isinstance(found, str) else None
