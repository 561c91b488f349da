"""The bytes that a token stands for, by itself: a text of several tokens may cut a character in two."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["TokenBytes"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """By id, of a ``tokenizers.Tokenizer``: as its decoder puts them together, and with a leading blank.

    Knows what byte-level BPE (GPT-2, Llama 3, Qwen), SentencePiece (Llama 2, Gemma) and byte fallback write;
    of another decoder it is the text of the token decoded alone.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        steps = list(_steps(backend.decoder))
        kinds = {step["type"] for step in steps}
        self._bytes = _byte_level() if "ByteLevel" in kinds else None
        self._known = bool(kinds & {"ByteLevel", "Metaspace", "ByteFallback"})
        self._fallback = "ByteFallback" in kinds
        self._blank = next(filter(None, map(_blank, steps)), None)

    def __getitem__(self, token: int) -> bytes:
        """b"" for an id that the vocabulary lacks, as models padded to a round number have them."""
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if token in self._special:
            return str(text).encode()
        if not self._known:
            return str(self._backend.decode([token])).encode()
        if self._bytes is not None and all(char in self._bytes for char in text):
            return bytes(self._bytes[char] for char in text)
        if self._fallback and (found := _BYTE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        return str(text if self._blank is None else text.replace(self._blank, " ")).encode()


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """Of which a decoder is made, those in others too."""
    waiting = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        waiting[:0] = step.get("decoders", ())
        yield step


def _blank(step: Mapping[str, Any]) -> str | None:
    """What a step turns into a blank."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        found: str | None = step["pattern"].get("String")
        return found
    return None


def _byte_level() -> dict[str, int]:
    """Characters of byte-level BPE to bytes: those that print stand for themselves (Radford et al., 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
