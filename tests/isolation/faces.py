"""The faces that need no runtime, and those of runtimes over what names their pages."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import ml
from kvcache import Batch, CausalCache, HostTier, PrefixCache
from kvcache.integrations.lmcache.chunks import chunk_key, identity_of_model, object_key
from kvcache.integrations.sglang.identity import identity_of_server, share_of
from kvcache.integrations.sglang.page_store import PageKind, PageStore
from kvcache.integrations.vllm.chunks import TokenNames
from kvcache.integrations.vllm.identity import identity_of_config, settings_of
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import MemoryStore
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.fingerprint import model_identity
from kvcache_engine.loading import load_model
from kvcache_engine.requests import Finished, GenerationOptions

from ..conftest import CONFIG, save_tokenizer, save_weights
from ..integrations.vllm.test_config import config as vllm_config
from ..kvcache.stores.test_composing import ChunkKey
from .contexts import BLOCK, DIMENSIONS, IDS, IN_PROCESS, NAMES, TIERS, WHOLE, Context, Face, prompt_of

MODEL = {"model", "weights", "rope"}
"""What makes other files."""


class World:
    """Caches on one folder, one open for each context of a process; a tier is where what was kept lies.

    On "device" it stays where it was computed, for the others it is evicted after each request; a folder is
    that of all of them.
    """

    def __init__(self, tier: str, folder: Path, make: Callable[[Context, list[Any]], Any]) -> None:
        """``make`` opens a cache, one with a ``prefix`` or a PrefixCache, in a context over these tiers."""
        self._tier, self._make, self._folder = tier, make, folder
        self._open: dict[Context, Any] = {}
        self._last: Context | None = None

    @contextlib.contextmanager
    def using(self, context: Context) -> Iterator[Any]:
        """The cache for a request in this context."""
        process = context - IN_PROCESS
        if process not in self._open:
            store = f"file://{self._folder / 'store'}"
            tiers = {"device": [], "host": [HostTier(64 << 20)], "folder": [store]}[self._tier]
            self._open[process] = self._make(process, tiers)
        if self._last not in (None, process):
            prefix_of(self._open[self._last]).flush()
        self._last = process
        yield self._open[process]
        if self._tier != "device":
            prefix_of(self._open[process]).evict()

    def found(self, cache: Any) -> int:
        """Tokens that this cache has found in the tier so far; what waits to be written is the host's yet."""
        stats = prefix_of(cache).stats
        places = {"device": stats.live + stats.device, "host": stats.host, "folder": stats.host + stats.store}
        return places[self._tier]

    def close(self) -> None:
        for cache in self._open.values():
            cache.close()


def prefix_of(cache: Any) -> PrefixCache:
    return getattr(cache, "prefix", cache)


def written(folder: Path, context: Context) -> Path:
    """The files of a small model: another one, with other weights, with other rope settings."""
    made = folder / "-".join(["model", *sorted(context & MODEL)])
    if not made.exists():
        made.mkdir(parents=True)
        config = {**CONFIG, "head_dim": 32, "num_hidden_layers": 1 + ("model" in context)}
        config["rope_theta"] = 100.0 if "rope" in context else 10000.0
        (made / "config.json").write_text(json.dumps(config))
        save_tokenizer(made)
        norm = np.full(32, 1 + ("weights" in context), np.float32)
        save_weights(made, config, {"model.norm.weight": norm})
    return made


class Asked:
    """A face under test: ``ask`` is the ``Ask`` of a walk."""

    face: Face

    def __init__(self, tier: str, folder: Path) -> None:
        self.folder = folder

    def ask(self, context: Context) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is open."""


# PrefixCache: K and V say in which context they were computed, and are read back.


class OfPrefixCache(Asked):
    face = Face(
        "PrefixCache",
        dict.fromkeys(IN_PROCESS, TIERS)
        | dict.fromkeys(["model", "weights", "rope", "dtype", "format", "rank"], ("folder",)),
    )

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        self._numbers: dict[Context, int] = {}
        self._backend = ml.open_backend("numpy")
        self._world = World(tier, folder, self._made)

    def _made(self, process: Context, tiers: list[Any]) -> PrefixCache:
        dtype = ml.DType.BF16 if "dtype" in process else ml.DType.F32
        cache = CausalCache()
        cache.init(self._backend, ml.DType.Q8_0 if "format" in process else dtype, 2, 1024, 64)
        named = SimpleNamespace(
            origin=written(self.folder, process), dtype=dtype,
            share=SimpleNamespace(name="0/2") if "rank" in process else None,
        )  # fmt: skip
        return PrefixCache(cache, tiers=tiers, identity=model_identity(named), block_size=BLOCK)

    def ask(self, context: Context) -> int:
        prompt: list[Any] = [item.encode() if isinstance(item, str) else item for item in prompt_of(context)]
        whose: dict[str, Any] = {
            "salt": "tenant" if "salt" in context else "",
            "variant": [name for name in ("adapter", "version", "scale") if name in context] or None,
        }
        with self._world.using(context) as prefix:
            before = self._world.found(prefix)
            with prefix.begin(prompt, **whose) as session:
                found = session.cached
                self._evaluate(prefix.cache, session, context)
            assert self._world.found(prefix) - before == found
        return found

    def _evaluate(self, cache: Any, session: Any, context: Context) -> None:
        """Compute what is missing; what was found must be of this context behind what may be shared."""
        number = float(self._numbers.setdefault(context, 1 + len(self._numbers)))
        count = len(session.remaining)
        with self._backend.new_context() as ctx:
            positions = [*range(session.cached, session.cached + count)]
            cache.start_forward(ctx, Batch(positions, [session.seq] * count))
            cache.set_layer(0)
            plain = ml.DType.F32 if "format" in context or "dtype" not in context else ml.DType.BF16
            new = ctx.full((count, 1, 32), number, plain)
            cache.put(ctx, new, new)
            key, _, mask = cache.get(ctx)
            seen = key.to_numpy().astype(np.float32)[mask.to_numpy()[count - 1] == 0, 0, 0]
        own = np.isclose(seen, number, rtol=0.02).sum()
        assert seen.size == WHOLE + 1
        assert own == WHOLE + 1 if session.cached == 0 else own > WHOLE - 2 * BLOCK, (context, seen)

    def close(self) -> None:
        self._world.close()
        self._backend.close()


# The engine, and what its server passes on.


class OfEngine(Asked):
    face = Face(
        "Engine and server",
        {"salt": TIERS} | dict.fromkeys(["model", "weights", "rope", "dtype", "format", "rank"], ("folder",)),
        {
            **dict.fromkeys(
                ["adapter", "version", "scale"],
                "a request can name none; those that a model of transformers or mlx-lm has are watched",
            ),
            **dict.fromkeys(["image", "place", "embeddings"], "what is given beside token ids is refused"),
        },
    )

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        self._backend = ml.open_backend("numpy")
        self._world = World(tier, folder, self._made)

    def _made(self, process: Context, tiers: list[Any]) -> Engine:
        dtype = ml.DType.BF16 if "dtype" in process else ml.DType.F32
        model: Any = load_model(written(self.folder, process), self._backend, dtype=dtype)
        shared = SimpleNamespace(origin=model.origin, dtype=model.dtype, share=SimpleNamespace(name="0/2"))
        options = EngineOptions(
            capacity=64, block_size=BLOCK, cache_dtype=ml.DType.Q8_0 if "format" in process else dtype
        )
        return Engine(model, None, options, tiers, model_identity(shared) if "rank" in process else None)

    def ask(self, context: Context) -> int:
        with self._world.using(context) as engine:
            before = self._world.found(engine)
            request = engine.submit(
                IDS, GenerationOptions(1, ignore_eos=True), salt="tenant" if "salt" in context else ""
            )
            while engine.busy:
                engine.step()
            found = self._world.found(engine) - before
            assert isinstance(request.answer, Finished)
            assert request.answer.reused == found
        return int(found)

    def close(self) -> None:
        self._world.close()
        self._backend.close()


# Runtimes, by the names that our side gives to their pages: what has a name twice is found under it.


class ByName(Asked):
    """A face whose pages are found exactly by what ``names`` gives."""

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        self._stored: set[str] = set()

    def names(self, context: Context) -> list[str]:
        """Of the prompt's whole blocks, in their order."""
        raise NotImplementedError

    def ask(self, context: Context) -> int:
        names = self.names(context)
        assert len({*names}) == len(names) == WHOLE // BLOCK
        found = [*itertools.takewhile(self._stored.__contains__, names)]
        self._stored.update(names)
        return BLOCK * len(found)

    def adapter(self, context: Context) -> Path:
        """The files of an adapter: another one, other weights, another scale."""
        folder = self.folder / ("two" if "adapter" in context else "one")
        folder.mkdir(exist_ok=True)
        weights = f"weights {'adapter' in context} {'version' in context}"
        (folder / "adapter_model.safetensors").write_text(weights)
        (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8 + ("scale" in context)}))
        return folder


class OfVLLM(ByName):
    face = Face(
        "vLLM",
        {name: NAMES for name in DIMENSIONS if name != "embeddings"},
        {"embeddings": "a request with prompt embeddings is left to vLLM, and nothing of it is kept"},
    )

    def names(self, context: Context) -> list[str]:
        ranks = 1 + ("rank" in context)
        return Pages(*self.model(context), BLOCK, ranks).keys(self.request(context), WHOLE)[0]

    def request(self, context: Context) -> Any:
        """What is read of vLLM's ``Request``."""
        prompt = prompt_of(context)
        lora = SimpleNamespace(
            lora_path=str(self.adapter(context)), lora_name="any", lora_int_id=1, load_inplace=True
        )
        return SimpleNamespace(
            request_id="r", cache_salt="tenant" if "salt" in context else None, lora_request=lora,
            all_token_ids=[item if isinstance(item, int) else 0 for item in prompt], prompt_embeds=None,
            mm_features=[
                SimpleNamespace(identifier=item, mm_position=SimpleNamespace(offset=place, length=2))
                for place, item in enumerate(prompt)
                if isinstance(item, str)
            ],
        )  # fmt: skip

    def model(self, context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
        """The identity of the model, and the settings of its pages."""
        config = vllm_config(
            written(self.folder, context), dtype="torch.bfloat16" if "dtype" in context else "torch.float32"
        )
        stored = "Q8_0" if "format" in context else "F32"
        settings = settings_of(config, {"kind": "CausalCache", "dtype": stored}, [])
        return identity_of_config(config, ConnectorOptions.parse({"store": "memory:"})), settings


class OfVLLMTier(OfVLLM):
    """The tier's names of chunks; those that vLLM's manager of tiers stores are walked where vLLM is:
    ``make test-vllm``.
    """

    face = Face(
        "vLLM's tiers",
        {name: NAMES for name in DIMENSIONS if name not in ("embeddings", "rank")},
        OfVLLM.face.refused,
        dict.fromkeys(
            ["version", "scale"],
            "under `KVCacheOffloadingConnector`: vLLM's own hashes have only an adapter's name",
        ),
    )

    def names(self, context: Context) -> list[str]:
        identity, settings = self.model(context)
        names = TokenNames({0: Pages(identity, settings, BLOCK)})
        names.begin(self.request(context))
        found = [names.of(bytes(4), "r", end) for end in range(BLOCK, WHOLE + 1, BLOCK)]
        return [name for name in found if name is not None]


class OfSGLang(ByName):
    """What our side adds; with SGLang's own names where it is installed: ``make test-sglang``."""

    face = Face(
        "SGLang",
        dict.fromkeys(["version", "scale", "model", "weights", "rope", "dtype", "format", "rank"], NAMES),
        {"embeddings": "SGLang refuses them, unless it runs without a prefix cache"},
        {
            "adapter": "SGLang joins a request's own `extra_key` and the adapter's id without a border: "
            "let no stranger choose `extra_key`"
        },
    )

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        self._pages = PageStore(StoreTier([MemoryStore()], 0))

    def names(self, context: Context) -> list[str]:
        return [self._pages.key(self.kind(context), page) for page in self.hashes(context)]

    def hashes(self, context: Context) -> list[str]:
        """SGLang's names of the pages."""
        return [f"{page:064x}" for page in range(WHOLE // BLOCK)]

    def kind(self, context: Context) -> PageKind:
        args = SimpleNamespace(
            model_path=str(written(self.folder, context)), load_format="auto",
            dtype="bfloat16" if "dtype" in context else "float32",
        )  # fmt: skip
        lora = SimpleNamespace(lora_name="fine", lora_path=str(self.adapter(context - {"adapter"})))
        config = SimpleNamespace(
            tp_rank=0, tp_size=1 + ("rank" in context), pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1
        )
        settings = {
            "model": identity_of_server(args, [lora]),
            "share": share_of(config, replicated=False),
            "dtype": "torch.uint8" if "format" in context else f"torch.{args.dtype}",
        }
        return PageKind(settings, (BLOCK,))


class OfLMCache(ByName):
    """What our side makes of LMCache's keys; its own are walked where it is: ``make test-lmcache``."""

    face = Face(
        "LMCache",
        dict.fromkeys(
            ["salt", "adapter", "version", "scale", "model", "weights", "rope", "dtype", "rank"], NAMES
        ),
        told=dict.fromkeys(
            ["salt", "adapter", "version", "scale"],
            "its names have neither salt nor adapter: give each request a tag, "
            '`"kv_transfer_params": {"lmcache.tag.NAME": "VALUE"}`',
        ),
        open={
            **dict.fromkeys(["image", "place", "embeddings"], "LMCache names these itself: not run"),
            "format": "its names do not tell kinds of FP8 apart: with FP8, set `kvcache.identity`",
        },
    )

    def names(self, context: Context) -> list[str]:
        identity = identity_of_model(str(written(self.folder, context)))
        tags = {f"lmcache.tag.{name}": "other" for name in sorted(context) if name in self.face.told}
        return [chunk_key(identity, key) for key in self.keys(context, tags)]

    def keys(self, context: Context, tags: dict[str, Any]) -> list[Any]:
        """Those of LMCache."""
        dtype = "torch.bfloat16" if "dtype" in context else "torch.float32"
        size = 1 + ("rank" in context)
        chunks = range(WHOLE // BLOCK)
        return [ChunkKey(chunk, world_size=size, dtype=dtype, request_configs=tags) for chunk in chunks]


@dataclass
class ObjectKey:
    """The fields of LMCache's ``ObjectKey``, as of 0.5.6."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class OfLMCacheServer(ByName):
    """What our side makes of the keys of objects; those that its server stores are walked where it is:
    ``make test-lmcache``.
    """

    face = Face(
        "LMCache's server",
        dict.fromkeys(["salt", "adapter", "version", "scale", "model", "weights", "rope", "rank"], NAMES),
        told=dict.fromkeys(
            ["adapter", "version", "scale"],
            "its names have no adapter: put it into each request's `cache_salt`",
        ),
        open={
            **dict.fromkeys(["image", "place", "embeddings"], OfLMCache.face.open["image"]),
            **dict.fromkeys(
                ["dtype", "format"],
                "its names have no dtype: objects of another are misses; with FP8, set `identity`",
            ),
        },
    )

    def names(self, context: Context) -> list[str]:
        identity = identity_of_model(str(written(self.folder, context)))
        return [object_key(identity, key) for key in self.keys(context, self.salt(context))]

    def salt(self, context: Context) -> str:
        """A request's ``cache_salt``, with its adapter."""
        return "-".join(sorted(context & {"salt", "adapter", "version", "scale"}))

    def keys(self, context: Context, salt: str) -> list[Any]:
        """Those of LMCache."""
        chunks = range(WHOLE // BLOCK)
        return [ObjectKey(bytes([i]), "m", 1 + ("rank" in context), cache_salt=salt) for i in chunks]
