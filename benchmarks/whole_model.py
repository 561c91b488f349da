"""Decoding with whole models: our runner, and transformers with each of its caches, on the same torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

import ml
from benchmarks.models import RANDOM, STORIES, transformers_llama
from benchmarks.report import Row
from kvcache import Batch
from kvcache.testing.bench import Contender, interleave
from kvcache_engine import Llama
from kvcache_engine.models.families import parse_config

LENGTHS = (128, 2048, 8192)
PART, ROOM = 512, 600


def run(quick: bool, _: str) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models: dict[str, dict[str, Any]] = {}
    if (STORIES / "config.json").is_file():
        models["stories260K"] = json.loads((STORIES / "config.json").read_text(encoding="utf-8"))
    if not quick:
        models["random Llama, 24 layers of 1,024"] = RANDOM
    for name, raw in models.items():
        own = {key: value for key, value in raw.items() if key != "torch_dtype"}
        theirs = transformers_llama(**own, attn_implementation="sdpa")
        backend = ml.open_backend("torch", device="cpu")
        state = {key: tensor.numpy() for key, tensor in theirs.state_dict().items()}
        ours = Llama(backend, parse_config(raw), state)
        _share(ours, theirs)
        for history in LENGTHS[:1] if quick else LENGTHS:
            yield from _measure(name, theirs, ours, history, raw["num_hidden_layers"] > 8)


def _share(ours: Llama, theirs: Any) -> None:
    """Let their layers read our weights: where in memory weights lie makes 5% of a large model's step."""
    with torch.inference_mode():
        for own, layer in zip(ours._layers, theirs.model.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            for joined, parts in (
                (own.mixer.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (own.mixer.output, (attention.o_proj,)),
                (own.mlp.gate_up, (mlp.gate_proj, mlp.up_proj)),
                (own.mlp.down, (mlp.down_proj,)),
            ):
                rows = joined.weight.native.t().split([part.weight.shape[0] for part in parts])
                for part, weight in zip(parts, rows, strict=True):
                    assert torch.equal(part.weight, weight)
                    part.weight = torch.nn.Parameter(weight, requires_grad=False)


def _measure(name: str, theirs: Any, ours: Llama, history: int, large: bool) -> Iterator[Row]:
    contenders = {"ours": Ours(ours, history).fill(history).contender()}
    contenders |= {
        f"transformers {kind}": Theirs(theirs, kind, history).fill(history).contender()
        for kind in ("StaticCache", "DynamicCache")
    }
    peers = [key for key in contenders if key != "ours"]
    trial = interleave(contenders, 12 if large else 120, warmup=2 if large else 5, floors=peers, seconds=60)
    for key, sample in trial.samples().items():
        yield Row(
            "torch float32",
            f"decode, {name}, {history}",
            key,
            1e6 / sample.median,
            1e6 / sample.high,
            1e6 / sample.low,
            sample.ratio,
            "tokens/s",
            rounds=len(trial.times[key]),
            dropped=trial.dropped,
            target=1.0 if key == "ours" else None,
            note="ratio of times to the best of transformers'",
        )


class Ours:
    """A model of ours and a cache with room for ``ROOM`` tokens more than ``history``."""

    def __init__(self, model: Any, history: int) -> None:
        self.model, self.at, self.ctx = model, 0, model.backend.new_context()
        self.cache = model.make_cache()
        self.cache.init(model.backend, model.dtype, 1, history + ROOM, PART)

    def fill(self, history: int) -> Ours:
        """Random keys and values in place of a prompt's."""
        config, self.at = self.model.config, history
        for begin in range(0, history, PART):
            count = min(PART, history - begin)
            part = self.ctx.from_numpy(torch.randn(count, config.kv_heads, config.head_dim).numpy())
            self.cache.start_forward(self.ctx, Batch(range(begin, begin + count), [0] * count))
            for layer in range(config.layers):
                self.cache.set_layer(layer)
                self.cache.put(self.ctx, part, part)
        return self

    def forward(self, tokens: list[int]) -> ml.Tensor:
        """Logits behind the last of these, which come next."""
        count = len(tokens)
        batch = Batch(range(self.at, self.at + count), [0] * count, inputs=tokens, outputs=[count - 1])
        self.at += count
        with torch.inference_mode():
            self.cache.start_forward(self.ctx, batch)
            logits: ml.Tensor = self.model.forward(self.ctx, batch, self.cache)
        return logits

    def step(self) -> int:
        """One token: the id in, the likeliest next one out."""
        with torch.inference_mode():
            return int(self.forward([7]).argmax(self.ctx, -1).to_numpy()[0])

    def contender(self) -> Contender:
        return Contender(self.step)


class Theirs:
    """As Ours, a model of transformers with one of its caches."""

    def __init__(self, model: Any, kind: str, history: int) -> None:
        from transformers.cache_utils import DynamicCache, StaticCache

        self.model, config, length = model, model.config, history + ROOM
        static = kind == "StaticCache"
        self.cache: Any = StaticCache(config, max_cache_len=length) if static else DynamicCache(config=config)

    def fill(self, history: int) -> Theirs:
        config = self.model.config
        shape = 1, config.num_key_value_heads, history, config.hidden_size // config.num_attention_heads
        with torch.inference_mode():
            for layer in range(config.num_hidden_layers):
                part = torch.randn(shape)
                self.cache.update(part, part, layer)
        return self

    def forward(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found = self.model(torch.tensor([tokens]), cache=self.cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = found.logits[0, -1]
        return logits

    def step(self) -> int:
        return int(self.forward([7]).argmax())

    def contender(self) -> Contender:
        return Contender(self.step)
