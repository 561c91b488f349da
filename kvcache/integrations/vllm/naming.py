"""The keys of a request's pages: a chain over its tokens, salted by everything that vLLM distinguishes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvcache.cache import NotSupportedError
from kvcache.integrations.model_folder import weights_digest
from kvcache.stores import Keys, SaltedToken, compose

__all__ = ["Pages", "Request", "RequestKeys", "salted"]


class Request(Protocol):
    """The attributes used of vLLM's ``Request``."""

    request_id: str
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any

    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Pages:
    """The keys of pages of ``tokens`` tokens, for each of ``ranks`` ranks. A rank's keys are those of
    ``PrefixCache(..., identity=, block_size=tokens)`` over a cache with these ``settings``. With several
    ranks, the identity includes the rank and their number, as in ``kvcache.stores.identity_of``, since each
    stores K and V of its own heads.
    """

    def __init__(
        self, identity: Mapping[str, Any], settings: Mapping[str, Any], tokens: int, ranks: int = 1
    ) -> None:
        self.tokens, self.ranks = tokens, ranks
        self._identity, self._settings = dict(identity), dict(settings)
        self._keys = self._made({})
        self._adapters: dict[tuple[int, str], str | None] = {}

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
        """Use new keys from now on, so that earlier pages are not found, for example after the weights have
        changed.
        """
        self._keys = self._made({"reset": secrets.token_hex(16)})

    def of(self, request: Request) -> RequestKeys:
        """The keys of a request. Raises NotSupportedError for a request that keys cannot identify."""
        if request.prompt_embeds is not None:
            raise NotSupportedError("its prompt has embeddings, which keys do not identify")
        return RequestKeys(self._keys, request, self._adapter(request.lora_request))

    def _adapter(self, lora: Any) -> str | None:
        """The digest of an adapter's files at its first use, when vLLM loaded them."""
        if lora is None:
            return None
        digest = weights_digest(lora.lora_path)
        if not lora.load_inplace:  # else vLLM loads it again
            first = self._adapters.setdefault((lora.lora_int_id, lora.lora_path), digest)
            if first != digest:
                raise NotSupportedError(
                    f"the files of its LoRA adapter {lora.lora_path!r} have changed since it was first used; "
                    "load it under another name"
                )
        if digest is None:
            raise NotSupportedError(
                f"the files of its LoRA adapter {lora.lora_path!r} are not in a folder here"
            )
        return digest

    def keys(self, request: Request, tokens: int) -> list[list[str]]:
        """By rank, the keys of the full pages among a request's first ``tokens`` tokens."""
        return self.of(request).upto(tokens)


class RequestKeys:
    """The keys of a request's pages, each hashed once, since full pages do not change."""

    def __init__(self, keys: Sequence[Keys], request: Request, adapter: str | None) -> None:
        self._keys, self._request, self._adapter = keys, request, adapter
        self._known: list[list[str]] = [[] for _ in keys]

    def upto(self, tokens: int) -> list[list[str]]:
        """By rank, the keys of the full pages among the first ``tokens`` tokens."""
        size = self._keys[0].block_size
        known, count = len(self._known[0]), tokens // size
        if known < count:
            ids, others = salted(self._request, self._adapter, known * size, count * size)
            for keys, own in zip(self._keys, self._known, strict=True):
                own += keys.chain(ids, own[-1] if own else None, others).aligned
        return [own[:count] for own in self._known]


def salted(
    request: Request, adapter: str | None, begin: int, end: int
) -> tuple[np.ndarray, dict[int, bytes | SaltedToken]]:
    """A request's tokens ``[begin, end)`` for a chain: ids, and by position additional data. The first token
    of the request carries vLLM's ``cache_salt``, as in ``PrefixCache.begin``, and the adapter; the first
    token of each image carries its hash. Additional data is a variant, which no salt can imitate.
    """
    ids = np.array(request.all_token_ids[begin:end], np.int64)
    more: dict[int, list[tuple[str, str]]] = {}
    if adapter is not None:
        more[0] = [("lora", adapter)]
    for feature in request.mm_features:
        more.setdefault(feature.mm_position.offset, []).append(("image", feature.identifier))
    if request.cache_salt:
        more.setdefault(0, [])
    others: dict[int, bytes | SaltedToken] = {}
    for place, what in more.items():
        if begin <= place < begin + ids.size:
            salt = (request.cache_salt or "") if not place else ""
            variant = compose(*what) if what else b""
            others[place - begin] = SaltedToken(salt, int(ids[place - begin]), variant)
    return ids, others
