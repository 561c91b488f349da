"""Parsing requests: the JSON of OpenAI's completions and chat completions, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcache import Retention, TokenRange
from kvcache.cache import InvalidRangeError
from kvcache_engine.errors import RequestError
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.serve.errors import ApiError

__all__ = [
    "MAX_SALT", "Asked", "Fields", "Prompt", "Template", "Text", "parse_chat", "parse_completion",
    "parse_next_use", "parse_retention",
]  # fmt: skip

MAX_CHOICES = 32
MAX_LOGPROBS = 20
"""The most likely tokens that are reported, as in OpenAI's chat completions and in vLLM."""
MAX_SALT = 256
"""The most characters of a salt, which is stored with the content computed for it, and of a session's id."""
_LARGEST = 2**63 - 1
"""The largest integer: JSON has no limit, but floats, arrays and messages do."""
_BOTH = {"model", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos",
         "stream", "stream_options", "cache_salt",
         "cache_retention", "session_id", "next_use", "prompt_cache_key"}  # fmt: skip
_COMPLETION = _BOTH | {"prompt", "logprobs"}
_CHAT = _BOTH | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
_NO_MATTER = {
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
}
"""Fields that never affect an answer."""
_IDLE: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Unsupported fields, with the values that have no effect; neither has null, for any field."""
_SHOWN = 200
"""Characters of a value that an error quotes."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text; without ``bos`` it contains its first special tokens itself."""

    text: str
    bos: bool = True


Prompt = Text | list[int]
Template = Callable[[list[dict[str, str]]], Text]
"""Turns messages into a prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``prompts``, ``choices`` answers to each; ``settings`` without a limit set."""

    prompts: list[Prompt]
    choices: int
    max_tokens: int | None
    settings: GenerationOptions
    stream: bool
    include_usage: bool
    salt: str
    """Requests with other salts reuse nothing of these; vLLM's ``cache_salt``."""
    retention: Retention | None = None
    """How long computed content is kept; ``cache_retention``."""
    session_id: str = ""
    """The session of an agent; without it, OpenAI's ``prompt_cache_key``."""
    next_use: float | None = None
    """Seconds from the end of the request until the session's next one."""

    def settings_for(self, choice: int, max_tokens: int) -> GenerationOptions:
        """The settings of one answer; with a seed, each answer has its own."""
        seed = self.settings.seed
        return replace(self.settings, max_new_tokens=max_tokens, seed=None if seed is None else seed + choice)


class Fields:
    """The fields of a JSON object; each is checked as it is read. ApiError names the one that is wrong."""

    def __init__(self, body: bytes, defaults: Mapping[str, Any] | None = None) -> None:
        """``defaults``: numbers by the names of the fields that a request may omit."""
        self._defaults = defaults or {}
        try:
            text = body.decode("utf-8")
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON ({error})") from None
        if not isinstance(content, dict):
            raise ApiError(400, "the body must be a JSON object")
        if "\\u" in text:  # the only source of half of a surrogate pair
            for name, value in content.items():
                _check_unicode(name, value)
        self._fields: Mapping[str, Any] = content

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def model(self, served: str) -> None:
        """Check the model's name; it may be absent."""
        name = self._fields.get("model")
        if name not in (None, served):
            message = f"The model '{str(name)[:_SHOWN]}' does not exist; this server has '{served}'"
            raise ApiError(404, message, "model", "model_not_found")

    def flag(self, name: str) -> bool:
        return bool(self._read(name, False, lambda value: type(value) is bool, "true or false"))

    def integer(self, name: str, default: int | None, low: int, high: int = _LARGEST) -> Any:
        def fits(value: Any) -> bool:
            return type(value) is int and low <= value <= high

        return self._read(name, default, fits, f"an integer >= {low} and <= {high}")

    def number(self, name: str, default: float, low: float, high: float) -> float:
        def fits(value: Any) -> bool:
            return type(value) in (int, float) and low <= value <= high

        return float(self._read(name, default, fits, f"a number in [{low:g}, {high:g}]"))

    def text(self, name: str, most: int) -> str:
        """The text of a field; "" if it is absent."""

        def fits(value: Any) -> bool:
            return isinstance(value, str) and 0 < len(value) <= most

        return str(self._read(name, "", fits, f"a string of 1 to {most} characters"))

    def stops(self) -> tuple[str, ...]:
        value = self._fields.get("stop")
        stops = () if value is None else (value,) if isinstance(value, str) else value
        if (
            not isinstance(stops, (list, tuple))
            or len(stops) > 4
            or not all(isinstance(stop, str) and stop for stop in stops)
        ):
            raise ApiError(400, "'stop' must be a non-empty string, or a list of up to 4 of them", "stop")
        return tuple(stops)

    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage, which is the only supported field of ``stream_options``."""
        stream_options = self._fields.get("stream_options")
        options = {} if stream_options is None else stream_options
        idle = isinstance(options, dict) and not any(
            value for name, value in options.items() if name != "include_usage"
        )
        if not idle or not isinstance(options.get("include_usage"), bool | None):
            raise ApiError(
                400, "'stream_options' must be an object; only include_usage is supported", "stream_options"
            )
        return bool(options.get("include_usage"))

    def refuse(self, served: Collection[str]) -> None:
        """Refuse unsupported fields by name, rather than ignore them."""
        for name, value in self._fields.items():
            if value is None or name in served or name in _NO_MATTER:
                continue
            if not any(_same(value, idle) for idle in _IDLE.get(name, ())):
                shown = name[:_SHOWN]
                raise ApiError(
                    400, f"'{shown}' is not supported by this server", shown, "unsupported_parameter"
                )

    def _read(self, name: str, default: Any, fits: Callable[[Any], bool], what: str) -> Any:
        value = self._fields.get(name)
        if value is None:
            return self._defaults.get(name, default)
        if not fits(value):
            raise ApiError(400, f"'{name}' is {repr(value)[:_SHOWN]}; it must be {what}", name)
        return value


def parse_completion(fields: Fields, served: str) -> Asked:
    """The body of ``POST /v1/completions``."""
    fields.refuse(_COMPLETION)
    prompts = _prompts(fields.raw("prompt"))
    likely = None if fields.raw("logprobs") is False else fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    return _asked(fields, served, prompts, fields.integer("max_tokens", 16, 1), likely)


def parse_chat(fields: Fields, served: str, template: Template) -> Asked:
    """The body of ``POST /v1/chat/completions``; ``template`` makes a prompt of messages."""
    fields.refuse(_CHAT)
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "'messages' must be a list with at least one message", "messages")
    prompt = template([_message(message, i) for i, message in enumerate(messages)])
    limit = fields.integer("max_completion_tokens", fields.integer("max_tokens", None, 1), 1)
    likely = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if not fields.flag("logprobs"):
        if likely:
            raise ApiError(400, "'top_logprobs' requires 'logprobs' to be true", "top_logprobs")
        return _asked(fields, served, [prompt], limit)
    return _asked(fields, served, [prompt], limit, likely or 0)


def _asked(
    fields: Fields, served: str, prompts: list[Prompt], max_tokens: int | None, logprobs: int | None = None
) -> Asked:
    fields.model(served)
    choices = fields.integer("n", 1, 1, MAX_CHOICES)
    if len(prompts) * choices > MAX_CHOICES:
        raise ApiError(
            400, f"{len(prompts)} prompts with n={choices}; at most {MAX_CHOICES} answers are allowed", "n"
        )
    seed = fields.raw("seed")
    try:
        settings = GenerationOptions(
            temperature=fields.number("temperature", 1.0, 0, 2),
            top_k=fields.integer("top_k", 0, 0, 2**31 - 1),
            top_p=fields.number("top_p", 1.0, 1e-9, 1),
            min_p=fields.number("min_p", 0.0, 0, 1),
            seed=None if seed is None else fields.integer("seed", 0, -(2**63)) % 2**32,
            stop=fields.stops(),
            ignore_eos=fields.flag("ignore_eos"),
            logprobs=logprobs,
        )
    except RequestError as error:
        raise ApiError(400, str(error)) from None
    salt = fields.text("cache_salt", MAX_SALT)
    stream, usage = fields.flag("stream"), fields.includes_usage()
    retention = parse_retention(fields.raw("cache_retention"))
    key = fields.text("prompt_cache_key", MAX_SALT)
    session_id = fields.text("session_id", MAX_SALT) or key
    whose = salt, retention, session_id, parse_next_use(fields)
    return Asked(prompts, choices, max_tokens, settings, stream, usage, *whose)


def parse_next_use(fields: Fields) -> float | None:
    """Seconds, at most some 30 years; None: unknown."""
    return None if fields.raw("next_use") is None else fields.number("next_use", 0, 0, 1e9)


def parse_retention(ranges: Any) -> Retention | None:
    """Ranges of tokens, each with some of begin, end, priority and duration."""
    if ranges is None:
        return None
    names = {"begin", "end", "priority", "duration"}
    if not isinstance(ranges, list) or not all(
        isinstance(each, dict) and {*each} <= names for each in ranges
    ):
        raise ApiError(
            400,
            "'cache_retention' must be an array of objects with begin, end, priority and duration",
            "cache_retention",
        )
    if any(isinstance(value, int) and value > _LARGEST for each in ranges for value in each.values()):
        raise ApiError(400, f"'cache_retention' has a number above {_LARGEST}", "cache_retention")
    try:
        return Retention([TokenRange(**each) for each in ranges])
    except InvalidRangeError as error:
        raise ApiError(400, f"'cache_retention': {error}", "cache_retention") from None


def _prompts(prompt: Any) -> list[Prompt]:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [Text(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [Text(item) for item in prompt]
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(
            isinstance(item, list) and item and all(type(token) is int for token in item) for item in prompt
        ):
            return list(prompt)
    raise ApiError(
        400, "'prompt' must be a non-empty string, or a non-empty array of strings or of token ids", "prompt"
    )


def _message(message: Any, i: int) -> dict[str, str]:
    where = f"messages[{i}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"'{where}' must be an object with a role and a content", where)
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in (None, "", [], {}):
            what = f"{where}.{name[:_SHOWN]}"
            raise ApiError(400, f"'{what}' is not supported by this server", what, "unsupported_parameter")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_text(part) for part in content]
        if None in parts:
            raise ApiError(400, f"'{where}.content' may only have text parts", where)
        content = "".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        raise ApiError(400, f"'{where}.content' must be a string", where)
    name = message.get("name")
    return {"role": message["role"], "content": content, **({"name": name} if isinstance(name, str) else {})}


def _text(part: Any) -> str | None:
    """The text of a part of a message's content; None for an image, a sound, or an invalid part."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _same(value: Any, idle: Any) -> bool:
    """JSON equality: 0 equals 0.0, but not false."""
    return bool(value == idle) and isinstance(value, bool) == isinstance(idle, bool)


def _check_unicode(name: str, value: Any) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(
            400, "the name of a field is not valid Unicode: it has half of a surrogate pair"
        ) from None
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ApiError(400, f"'{name[:_SHOWN]}' is nested too deeply", name[:_SHOWN]) from None
    except UnicodeEncodeError as error:
        text = f"U+{ord(error.object[error.start]):04X}, half of a surrogate pair"
        raise ApiError(400, f"'{name[:_SHOWN]}' is not valid Unicode: it has {text}", name[:_SHOWN]) from None
