"""Log probabilities in OpenAI's two forms, of chat completions and of completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from kvcache.runner.sampling import Logprobs
from kvcache.runner.token_bytes import TokenBytes

__all__ = ["LogprobsForm"]

_LEAST = -9999.0
"""In the place of minus infinity, which JSON lacks: OpenAI's and vLLM's."""


class LogprobsForm:
    """Of one answer, whole or part after part; ``texts`` has the bytes of each token."""

    def __init__(self, texts: TokenBytes, chat: bool) -> None:
        self._texts, self._chat = texts, chat
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def record(self, tokens: Sequence[int], logprobs: Iterable[Logprobs]) -> dict[str, Any]:
        """What ``logprobs`` of a choice says of the next tokens."""
        pairs = list(zip(tokens, logprobs, strict=True))
        if self._chat:
            return {"content": [self._chat_token(token, found) for token, found in pairs], "refusal": None}
        return {
            "tokens": [self._text(token) for token, _ in pairs],
            "token_logprobs": [max(found.token, _LEAST) for _, found in pairs],
            "top_logprobs": [
                {self._text(each): max(value, _LEAST) for each, value in (*found.top, (token, found.token))}
                for token, found in pairs
            ],
            "text_offset": [self._pass(token) for token, _ in pairs],
        }

    def _chat_token(self, token: int, found: Logprobs) -> dict[str, Any]:
        likeliest = [self._one(each, value) for each, value in found.top]
        return {**self._one(token, found.token), "top_logprobs": likeliest}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": max(value, _LEAST), "bytes": list(self._texts[token])}

    def _text(self, token: int) -> str:
        r"""Part of a character is bytes:\xe2, as OpenAI has it, so that no two tokens are one."""
        found = self._texts[token]
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _pass(self, token: int) -> int:
        """Where in the answer a token begins, in characters."""
        before = self._offset
        self._offset += len(self._decoder.decode(self._texts[token]))
        return before
