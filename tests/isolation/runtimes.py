"""The faces inside transformers and mlx-lm, over real models with real adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import peft
import torch
import transformers
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model as load_mlx

import ml
from kvcache.integrations.mlx_lm import MLXPrefixCache
from kvcache.integrations.transformers import HFPrefixCache
from kvcache.stores import identity_of

from .contexts import BLOCK, IDS, TIERS, Context, Face
from .faces import Asked, World, written

ADAPTED = ["q_proj", "k_proj"]
_FACE: dict[str, Any] = {
    "tiers": dict.fromkeys(["salt", "adapter", "version", "scale"], TIERS)
    | dict.fromkeys(["model", "weights", "rope", "dtype", "format"], ("folder",)),
    "refused": {
        **dict.fromkeys(["image", "place", "embeddings"], "what is given beside token ids is refused"),
        "rank": "tiers of a model that is split over ranks are refused",
    },
}


class OfRuntime(Asked):
    """``adapt`` sets the model's adapters as they are in a context."""

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        self._world = World(tier, folder, self.made)

    def made(self, process: Context, tiers: list[Any]) -> Any:
        raise NotImplementedError

    def adapt(self, cache: Any, context: Context) -> None:
        raise NotImplementedError

    def ask(self, context: Context) -> int:
        with self._world.using(context) as cache:
            self.adapt(cache, context)
            before = self._world.found(cache)
            with cache.begin(IDS, salt="tenant" if "salt" in context else "") as session:
                session.prefill()
                found = int(session.cached)
            assert self._world.found(cache) - before == found
        return found

    def options(self, process: Context, tiers: list[Any]) -> dict[str, Any]:
        identity = identity_of(written(self.folder, process), "BF16" if "dtype" in process else "F32")
        return {
            "dtype": ml.DType.Q8_0 if "format" in process else None, "tiers": tiers, "identity": identity,
            "block_size": BLOCK, "capacity": 512, "max_sequences": 2,
        }  # fmt: skip

    def close(self) -> None:
        self._world.close()


class OfHF(OfRuntime):
    face = Face("HFPrefixCache", **_FACE)

    def made(self, process: Context, tiers: list[Any]) -> HFPrefixCache:
        dtype = torch.bfloat16 if "dtype" in process else torch.float32
        base = transformers.AutoModelForCausalLM.from_pretrained(written(self.folder, process), dtype=dtype)
        torch.manual_seed(0)
        given = peft.LoraConfig(r=2, target_modules=ADAPTED, init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, given, "one").eval()
        model.add_adapter("two", given)
        return HFPrefixCache(model, **self.options(process, tiers))

    def adapt(self, cache: HFPrefixCache, context: Context) -> None:
        cache.model.set_adapter("two" if "adapter" in context else "one")
        for part in cache.model.modules():
            if hasattr(part, "set_scale"):
                for name in ("one", "two"):
                    part.set_scale(name, 0.5 if "scale" in context else 1.0)
        with torch.no_grad():
            for i, (name, tensor) in enumerate(cache.model.named_parameters()):
                if "lora_" in name:
                    seed = torch.Generator().manual_seed(1000 * ("version" in context) + i)
                    tensor.copy_(torch.randn(tensor.shape, generator=seed))


class OfMLX(OfRuntime):
    face = Face("MLXPrefixCache", **_FACE)

    def made(self, process: Context, tiers: list[Any]) -> MLXPrefixCache:
        model, _ = load_mlx(written(self.folder, process))
        model.set_dtype(mx.bfloat16 if "dtype" in process else mx.float32)
        given = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": [f"self_attn.{name}" for name in ADAPTED]}
        linear_to_lora_layers(model, 2, given)
        return MLXPrefixCache(model, **self.options(process, tiers))

    def adapt(self, cache: MLXPrefixCache, context: Context) -> None:
        mx.random.seed(2 * ("adapter" in context) + ("version" in context))
        for _, layer in cache.model.named_modules():
            if hasattr(layer, "lora_a"):
                layer.scale = 0.5 if "scale" in context else 1.0
                layer.lora_a, layer.lora_b = (
                    mx.random.normal(part.shape, part.dtype) for part in (layer.lora_a, layer.lora_b)
                )
