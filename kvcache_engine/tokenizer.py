"""Text to token ids and back, and text that streams without breaking a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvcache_engine.checkpoints.source import located, read_json
from kvcache_engine.errors import ModelError, RequestError, TextTooLongError

__all__ = ["StreamDecoder", "TokenBytes", "Tokenizer"]

_CONTEXT = 8
"""Tokens of context, and the longest wait for consecutive incomplete characters."""
_LONGEST = 4
"""The most tokens of one character."""
_ANCHORS = "\n."
"""A continued text is tokenized after the first of these with which it shares no token."""
_PIECE = 1 << 15
"""How many characters of a long text are tokenized at a time to find out whether it can fit."""
_SEAM = 16
"""By how many tokens, at most, a piece may differ from the same characters within the whole text."""


class Tokenizer:
    """A ``tokenizers.Tokenizer`` that knows whether its model expects a BOS token.

    ``prefix`` are the tokens that the model expects before every text: those of the template in
    tokenizer.json (Llama: BOS; Qwen: none), or BOS if tokenizer_config.json requests it.

    >>> from kvcache_engine import Tokenizer, bundled_model
    >>> tokenizer = Tokenizer.load(bundled_model())
    >>> tokenizer.decode(tokenizer.encode("And God said"))
    'And God said'
    """

    def __init__(self, backend: Any, prefix: Sequence[int] | None = None) -> None:
        self._backend = backend
        self._prefix = _template_prefix(backend) if prefix is None else list(prefix)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a folder's tokenizer.json; for a .gguf file, one beside it, else the file's vocabulary.

        Raises ModelError if there is none, or it cannot be read.
        """
        path = located(path)
        folder = path if path.is_dir() else path.parent
        file = folder / "tokenizer.json"
        if file.is_file():
            return cls._from_folder(folder, file)
        if path.suffix == ".gguf":
            from kvcache_engine.checkpoints.gguf import open_gguf
            from kvcache_engine.checkpoints.gguf_vocab import tokenizer_from_gguf

            backend, prefix = tokenizer_from_gguf(open_gguf(path))
            return cls(backend, prefix)
        raise ModelError(f"{folder}: no tokenizer.json; save one with AutoTokenizer(...).save_pretrained")

    @classmethod
    def _from_folder(cls, folder: Path, file: Path) -> Tokenizer:
        try:
            import tokenizers
        except ImportError as error:
            raise ModelError("reading tokenizer.json needs: pip install 'ml-kvcache[engine]'") from error
        try:
            loaded = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise ModelError(f"{file}: not a tokenizer.json that tokenizers can read ({error})") from error
        loaded.no_truncation()
        loaded.no_padding()
        prefix, bos = _template_prefix(loaded), _configured_bos(loaded, folder / "tokenizer_config.json")
        return cls(loaded, prefix if bos is None or bos in prefix else [bos, *prefix])

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, bos: bool = True, most: int | None = None) -> list[int]:
        """The token ids of ``text``; with ``bos`` after the tokens that the model expects first.

        A text that certainly has more than ``most`` tokens (None: no limit) is refused after tokenizing only
        its beginning; one that is slightly longer is returned. Other threads run meanwhile.

        Raises TextTooLongError, and RequestError for invalid Unicode text.
        """
        _check_unicode(text)
        if most is not None and len(text) > _PIECE:
            count = 0
            for piece in _pieces(text):
                count += max(0, len(self._ids(piece)) - _SEAM)
                if count > most:
                    raise TextTooLongError(count, most)
        ids = self._ids(text)
        return [*self._prefix, *ids] if bos else ids

    def encode_more(self, text: str, most: int | None = None) -> list[int]:
        """The token ids of a text that continues another, within the limits of ``encode``.

        SentencePiece puts a space before every text; here there is none.
        """
        ids = self.encode(text, bos=False, most=most)
        for anchor in _ANCHORS if self._begins_with_blank else ():
            if (shared := self._ids_after(anchor, text)) is not None:
                return shared
        return ids

    @cached_property
    def _begins_with_blank(self) -> bool:
        return self._ids_after(_ANCHORS[0], "a") not in (None, self._ids("a"))

    def _ids_after(self, anchor: str, text: str) -> list[int] | None:
        """The ids of ``text`` after ``anchor``; None if the two share a token."""
        head, whole = self._ids(anchor), self._ids(anchor + text)
        return whole[len(head) :] if whole[: len(head)] == head else None

    def _ids(self, text: str) -> list[int]:
        # ``encode`` would hold the GIL, and block all threads, for its whole duration.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """For each id, the bytes that the token stands for by itself."""
        return TokenBytes(self._backend)

    def stream(self, context: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for the tokens that follow ``context``, the prompt, which determines a leading space."""
        return StreamDecoder(self, context)


class StreamDecoder:
    """Text as its tokens arrive: each ``push`` returns what is new, and never half a character.

    A token may contain part of a character's UTF-8 bytes, and its text may depend on the token before. A
    short window of tokens is therefore decoded twice, with and without the new token. The difference is the
    new text, which is held back while the tokens' bytes end within a character (a final U+FFFD does not prove
    that, since a model may write one). The window begins at a character, since byte fallback also breaks
    complete characters after an incomplete one. A character that the context does not finish is part of the
    new text.

    >>> from kvcache_engine import Tokenizer, bundled_model
    >>> tokenizer = Tokenizer.load(bundled_model())
    >>> decoder = tokenizer.stream([])
    >>> "".join([*map(decoder.push, tokenizer.encode("And God said")), decoder.flush()])
    'And God said'
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        tokens = list(context[-_CONTEXT - _LONGEST :])
        pieces = [self._bytes(token) for token in tokens]
        begins = [0, *(i for i, piece in enumerate(pieces) if piece and piece[0] & 0xC0 != 0x80)]
        first = max(i for i in begins if i <= max(0, len(tokens) - _CONTEXT))
        self._show(tokens[first:])
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        ending = self._utf8.decode(b"".join(pieces[begins[-1] :]))
        if self._unfinished:
            self._read = begins[-1] - first
            self._whole = len(tokenizer.decode(self._window[: self._read])) + len(ending)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" while a character is unfinished."""
        self._window.append(token)
        self._utf8.decode(self._bytes(token))
        return self._advance(final=False)

    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text = self._tokenizer.decode(self._window)
        known = len(self._shown) if text.startswith(self._shown) else self._whole
        waits = self._unfinished and not final and len(self._window) - self._read < _CONTEXT
        if len(text) <= known or waits:
            return ""
        self._show(self._window[self._read :])
        return text[known:]

    def _bytes(self, token: int) -> bytes:
        """The bytes that ``decode`` shows; none for a special token."""
        known = self._tokenizer.token_bytes
        return b"" if token in known.special else known[token]

    @property
    def _unfinished(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _show(self, window: list[int]) -> None:
        """Record that the window's text has been shown, and that its first ``_whole`` characters are
        final.
        """
        self._window, self._read = window, len(window)
        self._shown = self._tokenizer.decode(window)
        self._whole = len(self._shown)


def _template_prefix(backend: Any) -> list[int]:
    """The tokens that the template adds before a text; those after it (an EOS) are not part of a prompt."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _configured_bos(backend: Any, file: Path) -> int | None:
    """The BOS token of older folders, which have ``add_bos_token`` instead of a template."""
    config = read_json(file) if file.is_file() else {}
    if not isinstance(config, dict):
        raise ModelError(f"{file}: not valid JSON (it must be an object)")
    bos = config.get("bos_token") if config.get("add_bos_token") else None
    return backend.token_to_id(bos["content"] if isinstance(bos, dict) else bos) if bos else None


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code, before = ord(text[error.start]), text[max(0, error.start - 20) : error.start]
        what = f"U+{code:04X}, half of a surrogate pair"
        if 0xDC80 <= code <= 0xDCFF:  # how Python decodes invalid UTF-8 from a terminal or an argument
            what = f"the byte 0x{code & 0xFF:02X}, which is not UTF-8"
        raise RequestError(f"the text is not valid Unicode: after {before!r} it has {what}") from None


def _pieces(text: str) -> Iterator[str]:
    """The text, split at spaces if possible: hardly any token spans one."""
    start = 0
    while start < len(text):
        stop = start + _PIECE
        if stop < len(text):
            blank = text.rfind(" ", start + _PIECE // 2, stop)
            stop = blank if blank > 0 else stop
        yield text[start:stop]
        start = stop


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a ``tokenizers.Tokenizer``, as its decoder joins them, with a leading space.

    It supports byte-level BPE (GPT-2, Llama 3, Qwen), SentencePiece (Llama 2, Gemma) and byte fallback; for
    other decoders it is the text of the token decoded alone.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        steps = list(_steps(backend.decoder))
        kinds = {step["type"] for step in steps}
        self._bytes = _byte_level() if "ByteLevel" in kinds else None
        self._known = bool(kinds & {"ByteLevel", "Metaspace", "ByteFallback"})
        self._fallback = "ByteFallback" in kinds
        self._blank = next(filter(None, map(_blank, steps)), None)

    def __getitem__(self, token: int) -> bytes:
        """b"" for an id outside the vocabulary, as in models whose size is padded to a round number."""
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if token in self.special:
            return str(text).encode()
        if not self._known:
            return str(self._backend.decode([token])).encode()
        if self._bytes is not None and all(char in self._bytes for char in text):
            return bytes(self._bytes[char] for char in text)
        if self._fallback and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return str(text if self._blank is None else text.replace(self._blank, " ")).encode()


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder, including nested ones."""
    waiting = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        waiting[:0] = step.get("decoders", ())
        yield step


def _blank(step: Mapping[str, Any]) -> str | None:
    """The text that a step turns into a space."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        pattern: str | None = step["pattern"].get("String")
        return pattern
    return None


def _byte_level() -> dict[str, int]:
    """Maps characters of byte-level BPE to bytes; printable ones stand for themselves (Radford et al.,
    2019).
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
