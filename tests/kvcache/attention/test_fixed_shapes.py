"""Fixed shapes: the same tensors again and again; one graph per batch size and context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, ChunkedCache, SlidingWindowCache
from kvcache import cache as errors

torch = pytest.importorskip("torch")
HEADS, DIM, LAYERS = 2, 4, 2
KINDS = {"causal": CausalCache, "window": lambda: SlidingWindowCache(5), "chunked": lambda: ChunkedCache(4)}
every_kind = pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))
FIXED = ml.CacheConfig(fixed_context=4)


@pytest.fixture
def backend() -> Iterator[ml.Backend]:
    with ml.open_backend("torch", device="cpu") as opened:
        yield opened


def bound(backend: ml.Backend, make: Any, config: ml.CacheConfig = FIXED) -> Any:
    cache = make()
    cache.set_config(config)
    cache.init(backend, ml.DType.F32, 3, 16, 8)
    return cache


def batches(seed: int) -> Iterator[Batch]:
    """Chunks and single tokens of three sequences, as an engine mixes them."""
    rng = np.random.default_rng(seed)
    ends = [0, 0, 0]
    for _ in range(14):
        chosen = [s for s in rng.permutation(3)[: rng.integers(1, 4)].tolist() if ends[s] < 14]
        counts = {s: int(rng.integers(1, 3)) for s in chosen}
        places = [(ends[s] + i, s) for s in chosen for i in range(counts[s])]
        if places:
            yield Batch([p for p, _ in places], [s for _, s in places])
        for s in chosen:
            ends[s] += counts[s]


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((count, HEADS, DIM)).astype(np.float32)


@every_kind
def test_tensors_of_a_batch_size_and_context_stay_where_they_are(backend: ml.Backend, make: Any) -> None:
    cache = bound(backend, make)
    rng = np.random.default_rng(0)
    seen: dict[tuple[int, ...], set[tuple[Any, ...]]] = {}
    with backend.new_context() as ctx:
        for batch in batches(seed=2):
            cache.start_forward(ctx, batch)
            assert not any(cache.layer_cells(layer).writable() for layer in cache.storage.buffers)
            for layer in range(LAYERS):
                cache.set_layer(layer)
                cache.put(ctx, *(ctx.from_numpy(tokens(rng, len(batch))) for _ in "kv"))
            for layer in range(LAYERS):
                found = cache.graph_rows(ctx, layer)
                where = [(t.native.data_ptr(), t.shape, t.strides) for t in found]
                seen.setdefault((len(batch), layer, *found.cells.shape), set()).add(tuple(where))
                assert found.key.shape == (cache.cells, HEADS, DIM)
                assert found.mask.shape == (len(batch), found.cells.shape[1])
    assert len(seen) > LAYERS
    assert {len(places) for places in seen.values()} == {1}


class Counting:
    """A compiler that compiles nothing and counts what it is asked for."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("make", [KINDS["causal"], KINDS["window"]], ids=["causal", "window"])
def test_there_is_a_graph_for_each_batch_size_and_doubled_context(backend: ml.Backend, make: Any) -> None:
    torch._dynamo.reset()
    compiler = Counting()

    @torch.compile(backend=compiler, fullgraph=True, dynamic=False)
    def layer(query: Any, new_key: Any, new_value: Any, *tensors: Any) -> Any:
        key, value, targets, cells, mask = tensors
        key.index_copy_(0, targets.long(), new_key)
        value.index_copy_(0, targets.long(), new_value)
        k, v = (x[cells].transpose(1, 2) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query.unsqueeze(2), k, v, mask[:, None, None], scale=0.5
        )
        return out.squeeze(2)

    compiled, dynamic = bound(backend, make, FIXED), bound(backend, make, ml.CacheConfig())
    rng, ends, seen = np.random.default_rng(5), [0, 0, 0], {}
    with backend.new_context() as ctx:
        zeros = ctx.zeros((1, HEADS, DIM), ml.DType.F32)
        compiled.start_forward(ctx, Batch([0], [0]), reserve=True)
        compiled.put(ctx, zeros, zeros)
        for _ in range(14):
            for sequences in ([0], [1, 2]):
                batch = Batch([ends[seq] for seq in sequences], sequences)
                for seq in sequences:
                    ends[seq] += 1
                query, key, value = (ctx.from_numpy(tokens(rng, len(batch))) for _ in range(3))
                compiled.start_forward(ctx, batch)
                inputs = compiled.graph_rows(ctx, 0)
                context = inputs.cells.shape[1]
                assert inputs.mask.shape == inputs.cells.shape == (len(batch), context)
                assert context in (4, 8, 16)
                where = tuple((t.native.data_ptr(), t.shape) for t in inputs)
                assert seen.setdefault((len(batch), context), where) == where
                found = layer(query.native, key.native, value.native, *(t.native for t in inputs))
                dynamic.start_forward(ctx, batch)
                dynamic.put(ctx, key, value)
                expected = dynamic.attend(ctx, query, 0.5).to_numpy()
                np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
                own = compiled.attend(ctx, query, 0.5).to_numpy()
                np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    contexts = {CausalCache: {4, 8, 16}}.get(make, {context for _, context in seen})
    assert compiler.graphs == len(seen) == 2 * len(contexts)


def test_a_pass_uploads_what_its_sequences_store_and_not_what_fits(backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.set_config(FIXED)
    cache.init(backend, ml.DType.F32, 8, 512, 8)
    with backend.new_context() as ctx:
        one = ctx.zeros((8, HEADS, DIM), ml.DType.F32)
        cache.start_forward(ctx, Batch([0] * 8, range(8)))
        cache.put(ctx, one, one)
        uploaded = sum(tensor.nbytes for tensor in cache.graph_rows(ctx, 0)[2:])
    assert uploaded == 8 * 4 + 2 * 8 * 4 * 4


@pytest.mark.parametrize(
    ("sequences", "rows"),
    [
        ([0, 0, 0, 0], 1),
        ([0, 0, 2, 2], 2),
        ([2, 2, 0, 0], 2),
        ([0, 0, 0, 1], 4),
        ([2, 1, 0], 3),
        ([0, 0, 1], 3),
        ([0, 1, 0, 1], 4),
    ],
)
def test_there_is_a_table_for_each_sequence_where_all_have_as_many_tokens_side_by_side(
    backend: ml.Backend, sequences: list[int], rows: int
) -> None:
    caches = [bound(backend, CausalCache, config) for config in (FIXED, ml.CacheConfig())]
    rng, found = np.random.default_rng(3), []
    with backend.new_context() as ctx:
        for shift in (0, 4):
            positions = [shift + sequences[:at].count(seq) for at, seq in enumerate(sequences)]
            arrays = [ctx.from_numpy(tokens(rng, len(sequences))) for _ in range(3)]
            found = []
            for cache in caches:
                cache.start_forward(ctx, Batch(positions, sequences))
                cache.put(ctx, *arrays[1:])
                found.append(cache.attend(ctx, arrays[0], 0.5).to_numpy())
            np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
        assert caches[0].graph_rows(ctx, 0).cells.shape[0] == rows


@pytest.mark.parametrize("stored", [ml.DType.F16, ml.DType.BF16, ml.DType.Q8_0])
def test_attention_is_in_the_dtype_of_the_query(backend: ml.Backend, stored: ml.DType) -> None:
    cache = CausalCache()
    cache.set_config(FIXED)
    cache.init(backend, stored, 2, 16, 8)
    with backend.new_context() as ctx:
        two = ctx.full((2, HEADS, 32), 1.0, ml.DType.F32)
        cache.start_forward(ctx, Batch([0, 0], [0, 1]))
        cache.put(ctx, two, two)
        assert cache.attend(ctx, two, 1.0).dtype is ml.DType.F32


def test_a_token_reads_nothing_of_other_sequences(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache, FIXED)
    with backend.new_context() as ctx:
        for seq, number in ((0, np.nan), (1, 1.0)):
            cache.start_forward(ctx, Batch(range(5), [seq] * 5))
            five = ctx.full((5, HEADS, DIM), number, ml.DType.F32)
            cache.put(ctx, five, five)
        cache.start_forward(ctx, Batch([5, 5], [0, 1]))
        two = ctx.full((2, HEADS, DIM), 1.0, ml.DType.F32)
        cache.put(ctx, two, two)
        found = cache.attend(ctx, two, 0.5).to_numpy()
        assert np.isnan(found[0]).all()
        assert (found[1] == 1).all()


def test_a_context_below_0_is_refused() -> None:
    with pytest.raises(ml.ShapeError, match="fixed_context"):
        ml.CacheConfig(fixed_context=-1)


def test_a_pass_that_only_reads_has_no_graph_and_leaves_the_slots(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache)
    with backend.new_context() as ctx:
        for position in range(3):
            cache.start_forward(ctx, Batch([position, position], [0, 1]))
            two = ctx.full((2, HEADS, DIM), position + 1, ml.DType.F32)
            cache.put(ctx, two, two)
        graph = cache.graph_rows(ctx, 0)
        targets = graph.targets.to_numpy().tolist()
        cache.start_forward(ctx, Batch([0, 1], [1, 0]), read_only=True)
        key, _, mask = cache.get(ctx)
        assert graph.targets.to_numpy().tolist() == targets
        seen = [key.to_numpy()[row == 0][:, 0, 0].tolist() for row in mask.to_numpy()]
        assert seen == [[1], [1, 2]]
        query = ctx.full((2, HEADS, DIM), 0, ml.DType.F32)
        assert cache.attend(ctx, query, 1.0).to_numpy()[:, 0, 0].tolist() == [1, 1.5]
        with pytest.raises(errors.OrderError, match="read-only"):
            cache.graph_rows(ctx, 0)


def test_what_a_graph_wrote_can_be_read_without_put(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache)
    with backend.new_context() as ctx:
        one = ctx.full((1, HEADS, DIM), 7, ml.DType.F32)
        cache.start_forward(ctx, Batch([0], [0]), reserve=True)
        cache.put(ctx, one, one)
        cache.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(errors.OrderError, match="not put in this pass"):
            cache.get(ctx)
        graph = cache.graph_rows(ctx, 0)
        graph.key.set_rows(ctx, one, graph.targets)
        key, _, mask = cache.get(ctx)
        assert key.to_numpy()[mask.to_numpy()[0] == 0].tolist() == one.to_numpy().tolist()


def test_an_except_list_reaches_the_tensors_at_once(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0, 1, 2], [0, 0, 0]))
        three = ctx.zeros((3, HEADS, DIM), ml.DType.F32)
        cache.put(ctx, three, three)
        mask = cache.graph_rows(ctx, 0).mask
        assert (mask.to_numpy() == 0).sum(axis=1).tolist() == [1, 2, 3]
        cache.set_causal(ctx, except_=[0])
        assert (mask.to_numpy() == 0).sum(axis=1).tolist() == [3, 2, 3]


def test_a_pass_that_is_taken_up_again_has_its_own_tensors(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0], [0]))
        one, before = ctx.full((1, HEADS, DIM), 7, ml.DType.F32), cache.pass_under_way()
        cache.start_forward(ctx, Batch([0], [1]))
        cache.undo_forward(before)
        cache.put(ctx, one, one)
        key, _, mask = cache.get(ctx)
        assert key.to_numpy()[np.flatnonzero(mask.to_numpy()[0] == 0)].tolist() == one.to_numpy().tolist()
        assert cache.held() == {0: 1}


def test_graph_rows_are_refused_where_there_are_none(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache, ml.CacheConfig())
    with backend.new_context() as ctx:
        with pytest.raises(errors.OrderError, match="start_forward"):
            cache.graph_rows(ctx, 0)
        cache.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(errors.NotSupportedError, match="fixed_context"):
            cache.graph_rows(ctx, 0)
        cache = bound(backend, CausalCache)
        cache.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(errors.OrderError, match="layer 0"):
            cache.graph_rows(ctx, 0)


@pytest.mark.parametrize("stored", [ml.DType.Q8_0, "F8_E4M3", ("F16", "F32")], ids=str)
def test_a_graph_is_refused_what_is_read_as_copies_and_its_pass_goes_on(
    backend: ml.Backend, stored: Any
) -> None:
    """It would write into the copies, and what it wrote would be lost."""
    cache = CausalCache()
    cache.set_config(FIXED)
    cache.init(backend, stored, 1, 16, 8)
    with backend.new_context() as ctx:
        one = ctx.full((1, HEADS, 32), 1.0, ml.DType.F32)
        cache.start_forward(ctx, Batch([0], [0]), reserve=True)
        cache.put(ctx, one, one)
        cache.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(errors.NotSupportedError, match=r"layer 0 stores \w+/\w+ .* put and attend"):
            cache.graph_rows(ctx, 0)
        with pytest.raises(errors.OrderError, match="not put in this pass"):
            cache.get(ctx)
        cache.put(ctx, one, one)
        np.testing.assert_allclose(cache.attend(ctx, one, 1.0).to_numpy(), 1.0, rtol=1e-2)


def test_what_is_read_behind_a_replay_is_asked_for_in_its_pass(backend: ml.Backend) -> None:
    cache = bound(backend, CausalCache)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0], [0]), reserve=True)
        cache.put(ctx, *[ctx.zeros((1, HEADS, DIM), ml.DType.F32)] * 2)
        for position in range(3):
            cache.start_forward(ctx, Batch([position], [0]))
            if position:
                with pytest.raises(errors.OrderError, match="was not put in this pass"):
                    cache.get(ctx)
            graph = cache.graph_rows(ctx, 0)
            for tensor in (graph.key, graph.value):
                tensor.native[graph.targets.native.long()] = position + 1.0
        cache.start_forward(ctx, Batch([2], [0]), read_only=True)
        found = cache.attend(ctx, ctx.zeros((1, HEADS, DIM), ml.DType.F32), 1.0).to_numpy()
    np.testing.assert_allclose(found, 2.0)
