"""The keys of a request's pages: our chain over its tokens, salted by all that vLLM keeps apart."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvcache.stores import Keys, SaltedToken

__all__ = ["Pages", "Request", "adapter_digest", "refusal", "salted"]


class Request(Protocol):
    """What is read of vLLM's ``Request``."""

    request_id: str
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any

    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Pages:
    """The names of pages of ``tokens`` tokens, for each of ``ranks`` ranks.

    A rank's keys are those of ``PrefixCache(..., identity=, block_size=tokens)`` over a cache of these
    ``settings``. Where there are several, the identity says which one of how many it is, as
    :func:`kvcache.runner.fingerprint.identity_of` does: each has K and V of its own heads.
    """

    def __init__(
        self, identity: Mapping[str, Any], settings: Mapping[str, Any], tokens: int, ranks: int = 1
    ) -> None:
        self.tokens, self.ranks = tokens, ranks
        self._identity, self._settings = dict(identity), dict(settings)
        self._keys = self._made({})

    def _made(self, more: Mapping[str, Any]) -> list[Keys]:
        shares = [
            {} if self.ranks == 1 else {"tensor_parallel": f"{rank}/{self.ranks}"}
            for rank in range(self.ranks)
        ]
        return [
            Keys(
                {"given": {**self._identity, **share, **more}, "salt": "", "cache": self._settings},
                self.tokens,
            )
            for share in shares
        ]

    def reset(self) -> None:
        """Name pages anew, so that nothing that was stored is found: the weights have changed, say."""
        self._keys = self._made({"reset": secrets.token_hex(16)})

    def keys(self, request: Request, tokens: int) -> list[list[str]]:
        """By rank the keys of the full pages among a request's first ``tokens`` tokens."""
        count = tokens - tokens % self.tokens
        items = salted(request, count)
        return [keys.chain(items).aligned for keys in self._keys]


def salted(request: Request, count: int) -> np.ndarray | list[int | bytes | SaltedToken]:
    """A request's first ``count`` tokens as they are named, for a chain.

    The first one carries vLLM's ``cache_salt``, as ``PrefixCache.begin`` has it, and the adapter; the
    first one of each image its hash. What is more than an id is bytes, which no salt can imitate.
    """
    tokens = np.array(request.all_token_ids[:count], np.int64)
    more: dict[int, list[str]] = {}
    if request.lora_request is not None:
        more[0] = ["lora", str(adapter_digest(request.lora_request.lora_path))]
    for feature in request.mm_features:
        more.setdefault(feature.mm_position.offset, []).extend(("mm", feature.identifier))
    if not count or not (more or request.cache_salt):
        return tokens
    named: list[int | bytes | SaltedToken] = tokens.tolist()
    for place in more.keys() & range(count):
        named[place] = json.dumps([int(tokens[place]), *more[place]]).encode()
    if request.cache_salt:
        first = named[0]
        assert not isinstance(first, SaltedToken)
        named[0] = SaltedToken(request.cache_salt, first)
    return named


def refusal(request: Request) -> str | None:
    """Why nothing of this request is stored or looked up; None: it is."""
    if request.prompt_embeds is not None:
        return "its prompt has embeddings, which keys do not name"
    if request.lora_request is not None and adapter_digest(request.lora_request.lora_path) is None:
        return f"the files of its LoRA adapter {request.lora_request.lora_path!r} are not in a folder here"
    return None


_digests: dict[tuple[str, tuple[tuple[str, int, int], ...]], str] = {}


def adapter_digest(path: str) -> str | None:
    """sha256 (hex) over the names and bytes of the files of a LoRA adapter; None where it is no folder.

    The name that a server gives it says nothing of its weights, and means another adapter elsewhere.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    seen = path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    if seen not in _digests:
        total = hashlib.sha256()
        for file in files:
            total.update(json.dumps([file.name, file.stat().st_size]).encode())
            total.update(file.read_bytes())
        _digests[seen] = total.hexdigest()
    return _digests[seen]
