"""What each rank does in the tests of several processes: named checks, for ``kvcache_engine.ranks``.

A check raises where something does not hold; its last line is what the starting test sees.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache.cache import Batch
from kvcache.stores import FileStore
from kvcache_engine import Engine, EngineOptions, GenerationOptions, Generator, load_model
from kvcache_engine.fingerprint import model_identity
from kvcache_engine.parallel import join, of_all
from kvcache_engine.rank import LOST, job_of_rank, leave
from ml import DType

Job = dict[str, Any]
SHAPES = (40, 129), (1,), (3,), (2, 3, 4)
"""Of sums of F32; those of other dtypes have the first."""
OTHERS = DType.F16, DType.BF16, DType.I32, DType.I64


class Rank:
    """One process's backend and group."""

    def __init__(self, backend: ml.Backend, job: Job) -> None:
        self.backend, self.job = backend, job
        self.group = join(backend, job["size"], job["timeout"])
        self.rank, self.size = self.group.rank, self.group.size

    @contextmanager
    def model(self, path: str, dtype: DType = DType.F32) -> Iterator[Any]:
        yield load_model(path, self.backend, dtype, None, self.group)

    def agree(self, ctx: ml.Context, tensor: ml.Tensor) -> None:
        """All ranks hold the same bits."""
        digest = hashlib.blake2b(tensor.to_numpy().tobytes(), digest_size=8).digest()
        found = of_all(ctx, self.group, int.from_bytes(digest, "little") >> 1)
        assert len(set(found)) == 1, f"ranks differ: {found}"


def collectives(rank: Rank) -> None:
    """Against NumPy, over dtypes, shapes and views."""
    group, size = rank.group, rank.size
    # MLX's ring is slow where ranks are more than cores: more than two try a part of the dtypes.
    others = OTHERS[: 4 if size == 2 else 2]
    stored = sorted(ml.STORAGE_DTYPES - {DType.F32}, key=str)[: None if size == 2 else 1]
    with rank.backend.new_context() as ctx:
        for shape, dtype in [*((s, DType.F32) for s in SHAPES), *((SHAPES[0], d) for d in others)]:
            parts = [_values(shape, dtype, seed) for seed in range(size)]
            mine = ctx.from_numpy(parts[rank.rank], dtype)
            total = group.all_reduce(ctx, mine)
            assert (total.shape, total.dtype) == (shape, dtype)
            _check_sum(total, parts, dtype)
            rank.agree(ctx, total)
            assert mine.to_numpy().tobytes() == parts[rank.rank].tobytes(), "the operand was written"
        axes = [((4,), -1), *(((2, 1, 5), axis) for axis in range(-3, 3))]
        for shape, axis, dtype in [*((*at, DType.F32) for at in axes), *(((2, 3), 1, d) for d in stored)]:
            parts = [_values(shape, dtype, seed) for seed in range(size)]
            whole = group.all_gather(ctx, ctx.from_numpy(parts[rank.rank], dtype), axis)
            expected = np.concatenate(parts, axis)
            assert (whole.shape, whole.dtype) == (expected.shape, dtype)
            assert whole.to_numpy().tobytes() == expected.tobytes()
        parts = [_values((4, 6), DType.F32, seed) for seed in range(size)]
        whole = ctx.from_numpy(parts[rank.rank])
        column = whole.permute(ctx, 1, 0).slice(ctx, 0, 1, 5, 2)
        _check_sum(group.all_reduce(ctx, column), [part.T[1:5:2] for part in parts], DType.F32)
        gathered = group.all_gather(ctx, column, 1).to_numpy()
        np.testing.assert_array_equal(gathered, np.concatenate([part.T[1:5:2] for part in parts], 1))
        assert group.all_reduce(ctx, ctx.zeros((0, 3), DType.F32)).shape == (0, 3)
        assert group.all_gather(ctx, ctx.zeros((0, 3), DType.F32), 1).shape == (0, 3 * size)
    group.barrier()


def lazy_work(rank: Rank) -> None:
    """Results that nobody reads, writes in between and long chains do not put ranks out of step."""
    with rank.backend.new_context() as ctx:
        buffer = ctx.zeros((64, 8), DType.F32)
        x = ctx.full((8,), 1.0, DType.F32)
        for i in range(64):
            dropped = rank.group.all_reduce(ctx, x.scale(ctx, 3.0))
            del dropped
            if rank.rank == i % rank.size:  # one rank alone reads, and so waits, here
                x.to_numpy()
            x = rank.group.all_reduce(ctx, x).scale(ctx, 1 / rank.size)
            x.reshape(ctx, 1, 8).copy(ctx, buffer.slice(ctx, 0, i, i + 1))
        np.testing.assert_array_equal(buffer.to_numpy(), np.ones((64, 8), np.float32))


def greedy(rank: Rank) -> None:
    """The tokens that one rank alone gives; the cache has this rank's KV heads only."""
    for path, prompt, tokens, kv_heads in rank.job["greedy"]:
        with rank.model(path) as model, Generator(model, None, options=EngineOptions(capacity=96)) as g:
            assert model.config.kv_heads == kv_heads
            settings = GenerationOptions(max_new_tokens=len(tokens), ignore_eos=True)
            (answer,) = g.complete([prompt], settings)
            assert list(answer.tokens) == tokens, f"{path}: {answer.tokens}"


def logits(rank: Rank) -> None:
    """Close to those of one rank, on all families that are divided, and the same on all ranks."""
    for path, prompt in rank.job["logits"]:
        expected = np.load(Path(path) / "expected.npy")
        with rank.model(path) as model:
            cache = model.make_cache()
            cache.init(rank.backend, DType.F32, 1, 64, 64)
            for begin, end in ((0, 5), (5, len(prompt))):
                batch = Batch(range(begin, end), [0] * (end - begin), inputs=prompt[begin:end])
                with rank.backend.new_context() as ctx:
                    cache.start_forward(ctx, batch)
                    found = model.forward(ctx, batch, cache)
                    rank.agree(ctx, found)
                    np.testing.assert_allclose(
                        found.to_numpy(), expected[begin:end], rtol=0, atol=2e-4, err_msg=path
                    )
            cache.close()


def own_part_only(rank: Rank) -> None:
    """What a rank holds of the weights: divided, but for embeddings and norms."""
    path, whole, kept = rank.job["part"]
    before = rank.backend.memory().allocated
    with rank.model(path):
        held = rank.backend.memory().allocated - before
    share = kept + (whole - kept) / rank.size
    assert held <= share * 1.01 + 4096, f"{held} bytes of {whole}; a share is {share}"


def out_of_step(rank: Rank) -> None:
    """Ranks that are given different requests are told so, all of them."""
    path, prompt = rank.job["greedy"][0][:2]
    with rank.model(path) as model:
        cache = model.make_cache()
        cache.init(rank.backend, DType.F32, 1, 64, 64)
        tokens = [*prompt, 5 + rank.rank]
        batch = Batch(range(len(tokens)), [0] * len(tokens), inputs=tokens)
        with rank.backend.new_context() as ctx:
            cache.start_forward(ctx, batch)
            with pytest.raises(ml.GroupError, match="rank 1 computes a different pass"):
                model.forward(ctx, batch, cache)
        cache.close()


def refusals(rank: Rank) -> None:
    group = rank.group
    with rank.backend.new_context() as ctx:
        with pytest.raises(ml.DTypeError, match=r"all_reduce: a tensor of .*BOOL"):
            group.all_reduce(ctx, ctx.zeros((2,), DType.BOOL))
        with pytest.raises(ml.ShapeError, match="a scalar has no axis"):
            group.all_gather(ctx, ctx.zeros((), DType.F32))
        with pytest.raises(ml.ShapeError, match="axis 1"):
            group.all_gather(ctx, ctx.zeros((2,), DType.F32), 1)
        with pytest.raises(ml.GroupError, match=f"rank {rank.rank} of {rank.size}.* is open"):
            rank.backend.distributed()  # type: ignore[attr-defined]
    group.barrier()


def joined_anew(rank: Rank) -> None:
    """Rank 1 comes while rank 0 still serves the group that both are leaving, or before it serves again."""
    for leaves, comes in ((0, 0), (0.3, 0), (0, 0.3)):
        time.sleep(leaves * (rank.rank == 0))
        rank.group.close()
        time.sleep(comes * (rank.rank == 0))
        with pytest.raises(ml.ClosedError, match="join again"):
            rank.group.barrier()
        rank.group = join(rank.backend, rank.size, rank.job["timeout"])
        with rank.backend.new_context() as ctx:
            total = rank.group.all_reduce(ctx, ctx.from_numpy([1.0 + rank.rank]))
            assert total.to_numpy()[0] == sum(range(1, rank.size + 1))


def stored(rank: Rank) -> None:
    """Each rank keeps pages of its own in one store, and has them again in another process."""
    path, prompt, tokens, _ = rank.job["greedy"][0]
    folder, again = rank.job["store"], rank.job["again"]
    options = EngineOptions(max_sequences=1, capacity=96)
    settings = GenerationOptions(max_new_tokens=len(tokens), ignore_eos=True)
    turn = [*prompt, *tokens, 5]
    with rank.model(path) as model:
        identity = model_identity(model)
        assert identity["tensor_parallel"] == f"{rank.rank}/{rank.size}"
        with FileStore(folder) as store, Engine(model, None, options, tiers=[store]) as engine:
            if not again:
                (answer,) = engine.complete([prompt], settings)
                assert list(answer.tokens) == tokens
                return
            (answer,) = engine.complete([turn], settings)
            assert list(answer.tokens) == rank.job["turn"]
            assert answer.reused == len(turn) - 2, f"{answer.reused} of {len(turn)} reused"
            assert engine.prefix.stats.store == answer.reused
        # As the neighbour, or as a rank of another number of them, nothing of it is found.
        for name in (f"{(rank.rank + 1) % rank.size}/{rank.size * 2}", f"{rank.rank}/{rank.size * 3}"):
            other = {**identity, "tensor_parallel": name}
            with FileStore(folder) as store, Engine(model, None, options, [store], other) as engine:
                assert engine.complete([turn], GenerationOptions(max_new_tokens=1))[0].reused == 0


def forgetful(rank: Rank) -> None:
    """Ranks that find different things, evict at different times and run out of room at different times.

    Each loses pages of its own store, all but one keep nothing on the device, and prompts come in waves.
    The answers are those of one rank that keeps nothing.
    """
    for path, prompts, wave, expected in rank.job["forgetful"]:
        settings = GenerationOptions(max_new_tokens=4, ignore_eos=True)
        options = EngineOptions(max_sequences=3, capacity=40, context=72, prefill_chunk=24, interval=8)
        folder = Path(rank.job["store"]).with_name(f"{Path(path).name}-own-{rank.rank}")
        with rank.model(path) as model:
            with FileStore(folder) as store, Engine(model, None, options, [store]) as engine:
                engine.complete(prompts[: len(prompts) // 2], settings)
            _lose_pages(folder, rank.rank)
            rank.group.barrier()
            own = dataclasses.replace(options, budget=None if rank.rank == 0 else 0)
            with FileStore(folder) as store, Engine(model, None, own, [store]) as engine:
                requests, waiting = [], list(prompts)
                while waiting or engine.busy:
                    requests += [engine.submit(prompt, settings) for prompt in waiting[:wave]]
                    del waiting[:wave]
                    for _ in range(3):
                        engine.step()
                for request, tokens in zip(requests, expected, strict=True):
                    assert request.error is None, request.error
                    assert list(request.tokens[-len(tokens) :]) == tokens, f"{path}: {request.tokens}"
                found = of_all(rank.backend.new_context(), rank.group, engine.statistics.reused_tokens)
                assert len(set(found)) == 1, f"reused: {found}"
                assert found[0] > 0, "nothing was reused"


def _lose_pages(folder: Path, seed: int) -> None:
    """Every second of them, drawn by chance."""
    entries = sorted(folder.rglob("*.entry"))
    assert len(entries) > 4, entries
    for entry in random.Random(seed).sample(entries, len(entries) // 2):
        entry.unlink()


def last_one_raises(rank: Rank) -> None:
    if rank.rank == rank.size - 1:
        raise ValueError("no such luck")
    rank.group.barrier()


def _values(shape: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    random = np.random.default_rng((seed, *shape))
    if dtype.is_float:
        return random.normal(size=shape).astype(dtype.numpy)
    low, high = (0, 2) if dtype in (DType.BOOL, DType.U8) else (-100, 100)
    return random.integers(low, high, shape).astype(dtype.numpy)


def _check_sum(total: ml.Tensor, parts: list[np.ndarray], dtype: DType) -> None:
    found = total.to_numpy()
    if not dtype.is_float:
        np.testing.assert_array_equal(found, sum(part.astype(np.int64) for part in parts).astype(dtype.numpy))
        return
    exact = sum(part.astype(np.float64) for part in parts)
    if dtype is DType.F32:
        np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    else:  # added up in F32 and rounded once: at most one unit in the last place off where that is a tie
        spacing = np.abs(np.spacing(exact.astype(dtype.numpy)).astype(np.float64))
        assert np.all(np.abs(found.astype(np.float64) - exact) <= 0.51 * spacing + 1e-7)


CHECKS: dict[str, Callable[[Rank], None]] = {
    check.__name__: check
    for check in (
        collectives, lazy_work, greedy, logits, own_part_only, out_of_step, refusals, joined_anew, stored,
        forgetful, last_one_raises,
    )
}  # fmt: skip


def main() -> None:
    job = json.loads(job_of_rank())
    with ml.open_backend(job["backend"]) as backend:
        rank = Rank(backend, job)
        for name in job["checks"]:
            try:
                CHECKS[name](rank)
            except BaseException as error:
                print(
                    f"kvcache: {name}: {type(error).__name__}: {' '.join(str(error).split())}",
                    file=sys.stderr,
                )
                leave(LOST if isinstance(error, ml.GroupError) else 1)
        rank.group.barrier()
    leave(0)


if __name__ == "__main__":
    main()
