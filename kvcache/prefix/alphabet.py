"""Tokens as integers of the radix tree: items without an id, and the first private token of a tenant, get
numbers of their own.
"""

from __future__ import annotations

import operator
import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.cache import InvalidRangeError, check_whole
from kvcache.stores import Part, SaltedToken, compose

__all__ = ["EVERYONE", "Alphabet", "Tenant"]

Tokens = Sequence[int | bytes] | np.ndarray
_SPARE = 1024
"""How many items may be known in addition to those in use."""
_PACKED = 1024
"""How many tokens are converted at a time."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who may share a conversation: conversations with the same ``salt``; its first ``shared`` tokens,
    everyone.

    Conversations of different variants share nothing; ``variant`` (see ``compose``) is whatever else K and V
    depend on.
    """

    salt: str = ""
    shared: int = 0
    variant: bytes = b""

    @classmethod
    def of(cls, salt: str, shared: int, variant: Part) -> Tenant:
        return cls(salt, shared, b"" if variant is None else compose(variant))

    def __post_init__(self) -> None:
        if not isinstance(self.salt, str):
            raise InvalidRangeError(f"salt={self.salt!r:.60}; it must be a string")
        try:
            self.salt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRangeError(f"salt={self.salt!r:.60}: {error}; it must be valid Unicode") from None
        check_whole("tenant", "shared", self.shared)


EVERYONE = Tenant()


class Alphabet:
    """Ids are unchanged; other items (bytes of an image's digest) become negative numbers.

    So do the first private token of a tenant, with a different number for each salt and token, and the first
    token of a variant: conversations of different tenants diverge there, whatever follows.
    """

    def __init__(self) -> None:
        self._codes: dict[bytes | SaltedToken, int] = {}
        self._items: dict[int, bytes | SaltedToken] = {}
        self._next = -1
        self._crowded = _SPARE

    def encode(
        self, tokens: Tokens, tenant: Tenant = EVERYONE, begin: int = 0, op: str = "encode"
    ) -> np.ndarray:
        """``tokens`` of a conversation, from position ``begin`` on, as int64, for the call ``op``.

        Raises InvalidRangeError unless ``tokens`` is a sequence of bytes and ids >= 0.
        """
        ids = self._plain(tokens, op)
        own = tenant.shared - begin
        if tenant.variant and not begin and ids.size:
            self._mark(ids, 0, tenant.salt if not own else "", tenant.variant)
            own = own or -1
        if tenant.salt and 0 <= own < ids.size:
            self._mark(ids, own, tenant.salt)
        return ids

    def _mark(self, tokens: np.ndarray, at: int, salt: str, variant: bytes = b"") -> None:
        token = int(tokens[at])
        item = token if token >= 0 else self._items[token]
        assert not isinstance(item, SaltedToken)
        tokens[at] = self._code(SaltedToken(salt, item, variant))

    def _plain(self, tokens: Tokens, op: str) -> np.ndarray:
        shape = getattr(tokens, "shape", None)
        if shape is not None and (not len(shape) or (len(shape) > 1 and shape[0] != 1)):
            raise InvalidRangeError(
                f"{op}: tokens is {type(tokens).__name__} of shape {tuple(shape)}; it must be one sequence "
                "of ids"
            )
        if shape is not None and not isinstance(tokens, np.ndarray) and hasattr(tokens, "tolist"):
            foreign: Any = tokens  # a framework's
            tokens = np.asarray(foreign.tolist())
        if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu":
            if tokens.dtype.kind == "u" and tokens.size and int(tokens.max()) >= 2**63:
                raise InvalidRangeError(f"{op}: token {int(tokens.max())}; ids must be below 2**63")
            ids = tokens.astype(np.int64, copy=True).reshape(-1)
        elif isinstance(tokens, (str, bytes, bytearray, Mapping)) or not isinstance(tokens, Sized):
            remedy = "encode text with the model's tokenizer first"
            if isinstance(tokens, Mapping) and "input_ids" in tokens:
                remedy = "pass its ['input_ids']"
            elif hasattr(tokens, "__index__"):  # one id
                remedy = f"pass [{tokens!r}]"
            raise InvalidRangeError(
                f"{op}: tokens={reprlib.repr(tokens)}; it must be a sequence of ids, or of bytes for items "
                f"without an id; {remedy}"
            )
        else:
            listed = tokens if isinstance(tokens, (list, tuple)) else [*tokens]
            try:
                ids = _packed(listed)
            except struct.error:  # items without an id, or what is none
                return np.array([self._number(token, op) for token in listed], dtype=np.int64)
        if ids.size and int(ids.min()) < 0:
            raise InvalidRangeError(
                f"{op}: token {int(ids.min())}; ids must be at least 0, and other items must be bytes"
            )
        return ids

    def tenant_of(self, tokens: np.ndarray) -> tuple[str, int]:
        """The salt of a conversation, and the position of its first private token; ("", all) without a
        salt.
        """
        for at in np.flatnonzero(tokens < 0).tolist() if self._items and tokens.size else ():
            if isinstance(item := self._items[int(tokens[at])], SaltedToken) and item.salt:
                return item.salt, at
        return "", int(tokens.size)

    def checked(self, tokens: Tokens, op: str) -> list[int | bytes]:
        """``tokens`` as a list, checked as by ``encode``."""
        if type(tokens) is list and all(type(token) is int and 0 <= token < 2**63 for token in tokens):
            return [*tokens]  # a decoded token costs no arrays
        return self.decode(self.encode(tokens, op=op))

    def decode(self, tokens: np.ndarray) -> list[int | bytes]:
        """The original tokens that ``encode`` received."""
        return [item.token if isinstance(item, SaltedToken) else item for item in self._named(tokens)]

    def named(self, tokens: np.ndarray) -> np.ndarray | list[int | bytes | SaltedToken]:
        """The names of these tokens outside this process; the tokens themselves if all are shared ids."""
        return tokens if not self._items or not tokens.size or int(tokens.min()) >= 0 else self._named(tokens)

    def _named(self, tokens: np.ndarray) -> list[int | bytes | SaltedToken]:
        return [token if token >= 0 else self._items[token] for token in tokens.tolist()]

    def forget(self, used: Iterable[np.ndarray]) -> None:
        """Forget the items that do not occur in ``used``."""
        kept = {int(code) for tokens in used for code in tokens[tokens < 0]}
        self._items = {code: item for code, item in self._items.items() if code in kept}
        self._codes = {item: code for code, item in self._items.items()}
        self._crowded = 2 * len(kept) + _SPARE

    @property
    def crowded(self) -> bool:
        """Whether it is time to ``forget``."""
        return len(self._items) > self._crowded

    def _number(self, token: int | bytes, op: str) -> int:
        if isinstance(token, (bytes, bytearray)):
            return self._code(bytes(token))
        try:
            value = operator.index(token)
        except TypeError as error:
            raise InvalidRangeError(
                f"{op}: token {token!r:.60}; ids must be integers, and other items must be bytes"
            ) from error
        if not 0 <= value < 2**63:
            raise InvalidRangeError(
                f"{op}: token {value}; ids must be at least 0 and below 2**63, and other items must be bytes"
            )
        return value

    def _code(self, item: bytes | SaltedToken) -> int:
        if item not in self._codes:
            self._codes[item], self._items[self._next] = self._next, item
            self._next -= 1
        return self._codes[item]


def _packed(tokens: list[Any] | tuple[Any, ...]) -> np.ndarray:
    """Integers as int64; struct.error for anything else.

    struct accepts only integers, whereas ``np.asarray`` truncates floats and parses bytes, and it is faster.
    Tokens are converted in parts, which stay in the processor's cache.
    """
    parts = (tokens[start : start + _PACKED] for start in range(0, len(tokens), _PACKED))
    return np.frombuffer(bytearray().join(struct.pack(f"{len(part)}q", *part) for part in parts), np.int64)
