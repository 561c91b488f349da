"""What one context computed is found in that context and in no other: every face, tier and dimension.

A cell is one dimension of one face on one tier: the prompt in each context in which that dimension is other,
alone and together with each other dimension, finds nothing of any other context; and in the same context it
finds all. ``python -m benchmarks.isolation`` makes the table of docs/prefix-cache.md of what passes here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import torch
import transformers
from mlx.nn.layers.distributed import shard_linear
from mlx_lm.utils import load_model as load_mlx

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm import MLXPrefixCache
from kvcache.integrations.transformers import HFPrefixCache
from kvcache.integrations.vllm.naming import Pages
from kvcache_engine.serve.asked import Fields, Text, parse_chat, parse_completion
from kvcache_engine.serve.errors import ApiError

from . import faces, runtimes
from .cells import cells, check_cell, walks
from .contexts import DIMENSIONS, IDS, Context, walk

FACES = [
    faces.OfPrefixCache, faces.OfEngine, runtimes.OfHF, runtimes.OfMLX, faces.OfVLLM, faces.OfVLLMTier,
    faces.OfSGLang, faces.OfLMCache, faces.OfLMCacheServer,
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of what PEFT asks
walked = walks()


@cells(FACES)
def test_what_is_other_is_kept_apart(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)


# What cannot occur on a face is refused when it is given.


def chat(content: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    parse_chat(Fields(json.dumps(body).encode()), "m", lambda messages: Text("x"))


def completion(**more: Any) -> None:
    parse_completion(Fields(json.dumps({"prompt": "x", **more}).encode()), "m")


def hf(folder: Path, **given: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(faces.written(folder, frozenset()))
    with HFPrefixCache(model, capacity=64) as prefix:
        prefix.generate(torch.tensor([IDS]), max_new_tokens=1, **given)


def mlx(folder: Path, **given: Any) -> None:
    model, _ = load_mlx(faces.written(folder, frozenset()))
    with MLXPrefixCache(model, capacity=64) as prefix:
        next(prefix.generate(IDS, **given))


def split_hf(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(faces.written(folder, frozenset()))
    model._tp_size = 2
    HFPrefixCache(model, capacity=64, tiers=["memory:"], identity={"model": "m"})


def split_mlx(folder: Path) -> None:
    model, _ = load_mlx(faces.written(folder, frozenset()))
    for part in model.modules():
        if "q_proj" in part:
            part.q_proj = shard_linear(part.q_proj, "all-to-sharded")
            part.q_proj.group = SimpleNamespace(size=lambda: 2)
    MLXPrefixCache(model, capacity=64, tiers=["memory:"], identity={"model": "m"})


def embedded() -> None:
    request: Any = SimpleNamespace(prompt_embeds=object())
    Pages({"model": "m"}, {}, 4).of(request)


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
REFUSALS: dict[tuple[str, str], tuple[Callable[[Path], None], type[Exception], str]] = {
    ("Engine and server", "adapter"): (lambda _: completion(model="adapter"), ApiError, "does not exist"),
    ("Engine and server", "version"): (lambda _: completion(lora_path="x"), ApiError, "not supported"),
    ("Engine and server", "scale"): (lambda _: completion(lora_scale=0.5), ApiError, "not supported"),
    ("Engine and server", "image"): (lambda _: chat(IMAGE), ApiError, "only have text parts"),
    ("Engine and server", "place"): (
        lambda _: chat([{"type": "text", "text": "x"}, *IMAGE]), ApiError, "only have text parts"
    ),
    ("Engine and server", "embeddings"): (
        lambda _: completion(prompt_embeds="AAAA"), ApiError, "not supported"
    ),
    ("HFPrefixCache", "image"): (
        lambda folder: hf(folder, pixel_values=torch.ones(1, 3, 8, 8)), NotSupportedError, "besides the"
    ),
    ("HFPrefixCache", "place"): (
        lambda folder: hf(folder, mm_token_type_ids=torch.ones(1, len(IDS))), NotSupportedError,
        "besides the tokens",
    ),
    ("HFPrefixCache", "embeddings"): (
        lambda folder: hf(folder, inputs_embeds=torch.ones(1, len(IDS), 32)), NotSupportedError,
        "besides the tokens",
    ),
    ("HFPrefixCache", "rank"): (split_hf, NotSupportedError, "tiers= of a model split over 2 ranks"),
    ("MLXPrefixCache", "image"): (
        lambda folder: mlx(folder, pixel_values=mx.ones((1, 3))), InvalidRangeError, "pixel_values"
    ),
    ("MLXPrefixCache", "place"): (
        lambda folder: mlx(folder, image_positions=[4]), InvalidRangeError, "image_positions"
    ),
    ("MLXPrefixCache", "embeddings"): (
        lambda folder: mlx(folder, input_embeddings=mx.ones((13, 32))), InvalidRangeError, "input_embeddings"
    ),
    ("MLXPrefixCache", "rank"): (split_mlx, NotSupportedError, "tiers= of a model split over 2 ranks"),
    ("vLLM", "embeddings"): (lambda _: embedded(), NotSupportedError, "embeddings"),
    ("vLLM's tiers", "embeddings"): (lambda _: embedded(), NotSupportedError, "embeddings"),
}  # fmt: skip


@pytest.mark.parametrize(("face", "dimension"), REFUSALS)
def test_what_cannot_occur_is_refused(
    face: str, dimension: str, tmp_path: Path, record_property: Any
) -> None:
    call, kind, said = REFUSALS[face, dimension]
    with pytest.raises(kind, match=said):
        call(tmp_path)
    record_property("cell", [face, dimension, "refused"])


def test_every_cell_is_kept_apart_or_refused_or_says_why_it_is_open() -> None:
    theirs = {("SGLang", name) for name in ("salt", "adapter", "image", "place", "embeddings")}
    theirs.add(("vLLM's tiers", "rank"))
    for made in FACES:
        face = made.face
        for dimension in DIMENSIONS:
            said = [dimension in some for some in (face.tiers, face.refused, face.open)]
            assert sum(said) == 1 or (face.name, dimension) in theirs, (face.name, dimension)
            assert dimension not in face.refused or (face.name, dimension) in {*REFUSALS, *theirs}


def test_a_face_that_forgets_a_dimension_fails_its_row_and_no_other() -> None:
    """And one that finds nothing again fails all."""
    known: set[Context] = set()

    def forgetful(context: Context) -> int:
        name = context - {"salt"}
        found = 12 * (name in known)
        known.add(name)
        return found

    found = walk(forgetful, ["salt", "adapter", "rope"])
    assert found.leaks("salt")
    assert not found.lost("salt")
    assert set(found.leaks("rope")) == {("rope", "salt")}
    assert walk(lambda context: 0, ["salt"]).lost("rope") == {(): 0}
