"""The server's answers: OpenAI's objects, complete or in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache_engine.requests import Finished
from kvcache_engine.sampling import Logprobs
from kvcache_engine.tokenizer import Tokenizer

__all__ = ["DONE", "Form", "sse"]

DONE = b"data: [DONE]\n\n"
_REASONS = {"stop": "stop", "length": "length", "capacity": "length"}
_LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks, as in OpenAI's API and vLLM."""


@dataclass(frozen=True, slots=True)
class Form:
    """The objects of one answer: of completions, or of chat completions."""

    model: str
    chat: bool
    choices: int = 1
    """Answers to each prompt."""
    show_cached: bool = True
    tokenizer: Tokenizer | None = None
    """Needed for log probabilities."""
    prompts: Sequence[Sequence[int]] = ()
    """The prompt of each answer; needed for log probabilities."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: list[Finished]) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(answers):
            reason = _REASONS[answer.reason]
            said: dict[str, Any] = {"text": answer.text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": answer.text}}
            form = self.logprobs(i)
            likely = form and form.record(answer.tokens, answer.logprobs)
            choices.append({"index": i, **said, "logprobs": likely, "finish_reason": reason})
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage(answers)}

    def logprobs(self, choice: int) -> LogprobsForm | None:
        """The form of one answer's log probabilities; None if not requested."""
        if self.tokenizer is None:
            return None
        return LogprobsForm(self.tokenizer, self.prompts[choice], self.chat)

    def first(self, choice: int) -> bytes | None:
        """The first chunk of a chat, with its role."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None) if self.chat else None

    def text(self, choice: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        return self._chunk(choice, {"content": text}, None, logprobs)

    def last(self, choice: int, answer: Finished) -> bytes:
        return self._chunk(choice, {}, _REASONS[answer.reason])

    def total(self, answers: list[Finished]) -> bytes:
        return sse({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage(answers)})

    def _usage(self, answers: list[Finished]) -> dict[str, Any]:
        """The numbers of prompt and answer tokens, counting each prompt once; ``cached_tokens`` were
        cached.
        """
        first = answers[:: self.choices]
        prompt, cached = sum(each.prompt_tokens for each in first), sum(each.reused for each in first)
        completion = sum(len(answer.tokens) for answer in answers)
        counts = {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion
        }  # fmt: skip
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}} if self.show_cached else counts

    def _chunk(
        self,
        choice: int,
        delta: dict[str, str],
        reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        said: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        one = {"index": choice, **said, "logprobs": logprobs, "finish_reason": reason}
        return sse({**self._head("chat.completion.chunk"), "choices": [one]})

    def _head(self, kind: str) -> dict[str, Any]:
        kind, prefix = (kind, "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def sse(record: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n".encode()


class LogprobsForm:
    """Log probabilities of one answer to ``prompt``, complete or in chunks."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], chat: bool) -> None:
        self._texts, self._chat = tokenizer.token_bytes, chat
        self._decoder = tokenizer.stream(prompt)
        self._offset = 0

    def record(self, tokens: Sequence[int], logprobs: Iterable[Logprobs]) -> dict[str, Any]:
        """The ``logprobs`` of a choice for the next tokens."""
        pairs = list(zip(tokens, logprobs, strict=True))
        if self._chat:
            return {"content": [self._chat_token(token, one) for token, one in pairs], "refusal": None}
        return {
            "tokens": [self._text(token) for token, _ in pairs],
            "token_logprobs": [max(one.token, _LEAST) for _, one in pairs],
            "top_logprobs": [
                {self._text(each): max(value, _LEAST) for each, value in (*one.top, (token, one.token))}
                for token, one in pairs
            ],
            "text_offset": [self._pass(token) for token, _ in pairs],
        }

    def _chat_token(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        likeliest = [self._one(each, value) for each, value in logprobs.top]
        return {**self._one(token, logprobs.token), "top_logprobs": likeliest}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": max(value, _LEAST), "bytes": list(self._texts[token])}

    def _text(self, token: int) -> str:
        r"""The text of a token; part of a character is bytes:\xe2, as in OpenAI's API, so that tokens stay
        distinct.
        """
        text = self._texts[token]
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def _pass(self, token: int) -> int:
        """The offset of a token in the answer's text, in characters."""
        before = self._offset
        self._offset += len(self._decoder.push(token))
        return before
