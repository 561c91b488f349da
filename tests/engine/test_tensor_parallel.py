"""How a model is divided over ranks, and ranks of torch and MLX on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import ml
from kvcache.cache import Batch, CacheFullError
from kvcache_engine import (
    EngineOptions,
    GenerationOptions,
    Generator,
    ModelError,
    Tokenizer,
    bundled_model,
    load_model,
)
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.config import ModelConfig
from kvcache_engine.loading import load_config
from kvcache_engine.models.families import FAMILIES, expected_shapes, parameter_count
from kvcache_engine.parallel import device_of_rank, failed_elsewhere, join, share_of, sizes_of
from kvcache_engine.rank import RanksError
from kvcache_engine.ranks import run_ranks
from ml.distributed import free_ports, launched

from ..rigs import small_models
from ..rigs.each_backend import need_backend
from . import local_launcher
from .parallel_ranks import Rank, collectives, greedy

PROGRAM = Path(__file__).with_name("parallel_ranks.py")
STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K"
ENGINES = ("torch", "mlx")
TEXT = "And God said"


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a group, and no more of it."""

    rank: int
    size: int


# Dividing.


def config_with(heads: int, kv_heads: int, **more: Any) -> ModelConfig:
    return replace(load_config(bundled_model()), heads=heads, kv_heads=kv_heads, **more)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (6, 2, [1, 2, 4, 6]),
        (8, 4, [1, 2, 4, 8]),
        (32, 8, [1, 2, 4, 8, 16, 24, 32]),
        (5, 1, [1, 2, 3, 4, 5]),
        (3, 3, [1, 3]),
        (1, 1, [1]),
    ],
)
def test_a_model_takes_divisors_of_its_kv_heads_and_multiples_up_to_one_query_head_each(
    heads: int, kv_heads: int, sizes: list[int]
) -> None:
    assert sizes_of(config_with(heads, kv_heads)) == sizes


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 4), (32, 8), (5, 1), (12, 3)])
def test_the_shares_of_all_ranks_are_the_model_and_each_head_keeps_its_keys(
    heads: int, kv_heads: int
) -> None:
    config = config_with(heads, kv_heads, intermediate_size=43, vocab_size=101)
    for size in sizes_of(config):
        shares = [share_of(config, Place(rank, size)) for rank in range(size)]
        assert [head for share in shares for head in share.heads] == list(range(heads))
        assert [i for share in shares for i in share.inner] == list(range(43))
        assert [i for share in shares for i in share.vocab] == list(range(101))
        assert {head for share in shares for head in share.kv_heads} == set(range(kv_heads))
        for share in shares:
            local = share.config(config)
            queries = local.heads // local.kv_heads
            for place, head in enumerate(share.heads):  # the keys that it reads are those of the whole model
                assert share.kv_heads[place // queries] == head // (heads // kv_heads)
            assert len(share.kv_heads) == max(1, kv_heads // size)


def test_a_rank_reads_only_its_slices_and_their_shapes_are_those_of_its_config() -> None:
    path = bundled_model()
    config, weights = load_config(path), open_weights(path)
    for size in (2, 4, 6):
        total = 0
        for rank in range(size):
            share = share_of(config, Place(rank, size))
            part = share.weights(weights, config.head_dim)
            for name, shape in expected_shapes(share.config(config)).items():
                assert part[name].shape == shape, name
                assert np.shares_memory(part[name], weights[name]) or part[name].base is not None
                total += part[name].size
        assert total < parameter_count(config) * (1 + size * 0.5)  # embeddings are on each


def test_what_every_rank_adds_is_stored_by_rank_0_alone() -> None:
    """The biases of o and down come once into the sum."""
    config = config_with(4, 2)
    bias = {"model.layers.0.self_attn.o_proj.bias": np.ones(3, np.float32), "model.norm.weight": np.ones(2)}
    for rank in range(2):
        part = share_of(config, Place(rank, 2)).weights(bias, 32)
        assert part["model.layers.0.self_attn.o_proj.bias"].tolist() == [1.0 - rank] * 3
        assert part["model.norm.weight"].tolist() == [1, 1]
        assert "model.norm.weight" in part
        assert "model.norm.bias" not in part


def test_families_that_are_not_divided_say_so_and_name_those_that_are() -> None:
    config = replace(load_config(bundled_model()), architecture="MixtralForCausalLM")
    with pytest.raises(
        ModelError, match=r"MixtralForCausalLM is not split .*LlamaForCausalLM.*Gemma3ForCausalLM"
    ):
        FAMILIES["MixtralForCausalLM"].check_ranks(config, 2)


def test_a_backend_without_an_engine_is_refused_with_those_that_have_one() -> None:
    with ml.open_backend("numpy") as backend:
        assert not isinstance(backend, ml.SupportsDistributed)
        with pytest.raises(ml.NotSupportedError, match=r"'numpy' cannot join processes.* torch or mlx"):
            join(backend)


def test_each_rank_of_a_machine_gets_an_accelerator_of_its_own_or_there_are_too_few() -> None:
    assert [device_of_rank(("cuda:0", "cuda:1", "cpu"), i, 2) for i in range(2)] == ["cuda:0", "cuda:1"]
    assert device_of_rank(("cpu",), 1, 2) is None
    with pytest.raises(ml.GroupError, match=r"2 ranks on a machine with cuda:0; .* --device cpu"):
        device_of_rank(("cuda:0", "cpu"), 0, 2)


@pytest.mark.parametrize(("said", "kind"), [(-1, CacheFullError), (-2, ml.GroupError), (-7, ml.GroupError)])
def test_a_rank_has_no_room_only_if_it_says_so(said: int, kind: type[Exception]) -> None:
    error = failed_elsewhere("begin", [5, said])
    assert type(error) is kind
    assert "rank 1 of 2" in str(error)


# What launchers say.


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "3", "MLX_RANK": "0", "MLX_WORLD_SIZE": "3"},
        {"MLX_RANK": "1", "MLX_WORLD_SIZE": "3"},
    ],
)
def test_a_process_knows_its_rank_by_what_its_launcher_has_set(variables: dict[str, str]) -> None:
    assert launched(variables) == (1, 3)
    assert launched({}) is None


def test_a_ring_of_one_has_a_file_without_hosts(tmp_path: Path) -> None:
    """As ``mlx.launch -n 1`` makes it."""
    (tmp_path / "hosts").write_text("\n")
    assert launched({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}) == (0, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "zero", "WORLD_SIZE": "2"},
        {"MLX_RANK": "0", "MLX_HOSTFILE": "/nowhere.json"},
    ],
)
def test_variables_that_make_no_sense_are_told(variables: dict[str, str]) -> None:
    with pytest.raises(ml.GroupError, match="start the ranks with"):
        launched(variables)


def test_a_rank_without_addresses_is_told(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text('[["127.0.0.1:23801"], []]')
    with pytest.raises(ml.GroupError, match="a rank has no address"):
        launched({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")})


def test_ports_are_free_and_follow_each_other() -> None:
    ports = free_ports(20)
    assert ports == list(range(ports[0], ports[0] + 20))
    assert not {port for port in ports if port >= 32768}, "systems give those to outgoing connections"


# Ranks on this machine.


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    need_backend(request.param)
    return str(request.param)


Alone = Callable[[Path, Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """The greedy answer of a model on one rank, by NumPy, to a prompt of so many tokens."""
    with ml.open_backend("numpy") as backend:

        def answer(path: Path, prompt: Sequence[int], count: int) -> list[int]:
            with Generator(load_model(path, backend), None, options=EngineOptions(capacity=96)) as g:
                (found,) = g.complete([prompt], GenerationOptions(max_new_tokens=count, ignore_eos=True))
            return list(found.tokens)

        yield answer


def start(engine: str, size: int, checks: Sequence[str], **job: Any) -> None:
    record = {"backend": engine, "size": size, "timeout": 60.0, "checks": list(checks), **job}
    command = [sys.executable, "-P", str(PROGRAM)]
    try:
        kernels = ["backends.cpu_kernels"] if engine == "torch" else []
        launcher = local_launcher.launcher(size, *local_launcher.IMPORTS[engine], *kernels)
        run_ranks(launcher, command, size, json.dumps(record).encode(), 60.0)
    except RanksError as error:
        print("\n".join(error.told))  # pytest shows it where the test fails
        raise


def greedy_jobs(
    alone: Alone, size: int, count: int, *paths: Path
) -> list[tuple[str, list[int], list[int], int]]:
    jobs = []
    for path in (bundled_model(), *paths):
        prompt = Tokenizer.load(path).encode(TEXT)
        kv_heads = max(1, load_config(path).kv_heads // size)
        jobs.append((str(path), prompt, alone(path, prompt, count), kv_heads))
    return jobs


DIVIDED: dict[str, dict[str, Any]] = {
    "llama, biases, head of its own": {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "vocab_size": 259,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "gemma3": small_models.SLIDING,
}  # fmt: skip


def logit_jobs(make_model: Callable[..., Path], size: int, *kinds: Any) -> list[tuple[str, list[int]]]:
    """Small random models, beside their logits on one rank."""
    jobs = []
    prompt = [int(token) for token in np.random.default_rng(size).integers(3, 200, 12)]
    for overrides in kinds:
        path = make_model(**{**overrides, "num_key_value_heads": min(size, 2), "intermediate_size": 62})
        with ml.open_backend("numpy") as backend:
            model: Any = load_model(path, backend)
            cache = model.make_cache()
            cache.init(backend, ml.DType.F32, 1, 64, 64)
            batch = Batch(range(len(prompt)), [0] * len(prompt), inputs=prompt)
            with backend.new_context() as ctx:
                cache.start_forward(ctx, batch)
                np.save(path / "expected.npy", model.forward(ctx, batch, cache).to_numpy())
        jobs.append((str(path), prompt))
    return jobs


def test_two_ranks_compute_what_one_does_and_keep_pages_of_their_own(
    engine: str, alone: Alone, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Collectives, greedy text, logits of every divided family, memory and stores.

    What ranks agree on that find and evict different things is tried by ``test_ranks.py``: here are
    other processes and stores, which know no engine. Those of torch start slowly, so they start once.
    """
    greedy = greedy_jobs(alone, 2, 4, *([STORIES] if STORIES.is_dir() else []))
    path, prompt, tokens, _ = greedy[0]
    job = {
        "greedy": greedy,
        "turn": alone(Path(path), [*prompt, *tokens, 5], len(tokens)),
        "logits": logit_jobs(make_model, 2, *DIVIDED.values()),
        "store": str(tmp_path / "store"),
        "again": False,
        "part": part_job(),
        "forgetful": [forgetful_job(alone, make_model, {"torch": "full", "mlx": "sliding"}[engine])],
    }
    checks = "collectives lazy_work refusals joined_anew greedy logits own_part_only out_of_step forgetful"
    start(engine, 2, [*checks.split(), *["stored"] * (engine == "mlx")], **job)
    if engine == "mlx":
        start(engine, 2, ["stored"], **job | {"again": True})  # other processes: nothing is computed again


def test_four_ranks_compute_what_one_does(engine: str, alone: Alone, make_model: Callable[..., Path]) -> None:
    """The bundled model has 2 KV heads: each is on two ranks, which share its 3 query heads unevenly."""
    if engine == "torch" and "ML_LONG" not in os.environ:
        pytest.skip("the division knows no engine, and four processes of torch start slowly: set ML_LONG=1")
    job = {"greedy": greedy_jobs(alone, 4, 3), "logits": logit_jobs(make_model, 4, DIVIDED["qwen3"])}
    start(engine, 4, ["collectives", "greedy", "logits"], **job)


def forgetful_job(
    alone: Alone, make_model: Callable[..., Path], kind: str
) -> tuple[str, list[list[int]], int, list[list[int]]]:
    """(model, prompts that begin alike, how many come at a time, their answers)."""
    shared = np.random.default_rng(5).integers(3, 200, 30).tolist()
    prompts = [[*shared[:end], *range(20 + end, 32 + end)] for end in (30, 24, 30, 9, 17, 30, 24, 12)]
    path = make_model(**{**small_models.KINDS[kind], "num_key_value_heads": 2})
    return str(path), prompts, 4, [alone(path, prompt, 4) for prompt in prompts]


def part_job() -> tuple[str, int, int]:
    """(model, bytes of all weights, bytes of those that every rank has)."""
    path = bundled_model()
    config = load_config(path)
    shapes = expected_shapes(config)
    kept = sum(int(np.prod(s)) for name, s in shapes.items() if "norm" in name or "embed" in name)
    return str(path), 4 * parameter_count(config), 4 * kept


@pytest.mark.parametrize("engine", ["mlx"], indirect=True)
def test_what_one_rank_fails_with_ends_all_and_is_told(engine: str) -> None:
    with pytest.raises(RanksError, match=r"^rank 1 of 2: last_one_raises: ValueError: no such luck$"):
        start(engine, 2, ["last_one_raises"])


def test_a_launcher_may_start_a_single_rank(engine: str, alone: Alone) -> None:
    with (
        local_launcher.local_ranks(1) as (variables,),
        patch.dict(os.environ, variables),
        ml.open_backend(engine) as backend,
    ):
        rank = Rank(backend, {"size": 1, "timeout": 60.0, "greedy": greedy_jobs(alone, 1, 4)})
        collectives(rank)
        greedy(rank)
        rank.group.close()
