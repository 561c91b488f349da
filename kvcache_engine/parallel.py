"""Tensor parallelism: one model split over ranks by heads; each rank's cache stores its own KV heads.

After Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053). Rank r of n has the rows of q, k, v, gate and up
for its heads and its part of the MLP, and the columns of o and down that read them::

    hidden += sum over ranks of  o[:, heads]   (attention of the heads)
    hidden += sum over ranks of  down[:, inner](silu(gate[inner]) * up[inner])

Two sums per layer. Embeddings are on every rank, the head's rows are divided and the logits gathered, so
that all ranks see the same logits bit for bit and sample the same token.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import ml
from kvcache.cache import Batch, CacheFullError
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import ModelError
from kvcache_engine.weights import Weights

__all__ = [
    "FAILED",
    "NO_ROOM",
    "Share",
    "check_ranks",
    "device_of_rank",
    "failed_elsewhere",
    "join",
    "no_engine",
    "of_all",
    "share_of",
    "sizes_of",
]

NO_ROOM, FAILED = -1, -2
"""Values that a rank exchanges in place of a pass that it cannot compute."""

C = TypeVar("C", bound=ModelConfig)


def join(backend: ml.Backend, size: int | None = None, timeout: float = 60.0) -> ml.Group:
    """The group of the ranks that a launcher has started, ``size`` of them (None: any number). Raises
    NotSupportedError if the backend cannot join processes, GroupError if their number differs.
    """
    if not isinstance(backend, ml.SupportsDistributed):
        raise no_engine(backend.name)
    group = backend.distributed(timeout)
    if size is not None and group.size != size:
        started = group.size
        group.close()
        raise ml.GroupError(
            f"tensor parallelism: {size} ranks were requested but the launcher has started {started}; use "
            "the same number for both"
        )
    return group


def no_engine(backend: str) -> ml.NotSupportedError:
    """The error for a backend that cannot join processes."""
    return ml.NotSupportedError(
        f"tensor parallelism: backend {backend!r} cannot join processes; use torch or mlx, or a single rank"
    )


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model: half-open ranges of query heads, KV heads, the MLP's inner features and
    rows of the head. ``width``: rows of the head per rank; the last rank may have fewer.
    """

    group: ml.Group
    heads: range
    kv_heads: range
    inner: range
    vocab: range
    width: int

    def config(self, config: C) -> C:
        """The config of this rank's part, which is a complete model except for the sums."""
        return dataclasses.replace(
            config, heads=len(self.heads), kv_heads=len(self.kv_heads), intermediate_size=len(self.inner)
        )

    def weights(self, weights: Weights, head_dim: int) -> Weights:
        """This rank's part of all weights; the head and embeddings are whole."""
        return _PartialWeights(weights, self, head_dim)

    @property
    def name(self) -> str:
        """ "1/4": the rank and the size, which are part of the identity of snapshots."""
        return f"{self.group.rank}/{self.group.size}"

    # Between ranks.

    def all_logits(self, ctx: ml.Context, logits: ml.Tensor, vocab_size: int) -> ml.Tensor:
        """The logits (rows, vocab_size), gathered from all ranks' parts."""
        rows, columns = logits.shape
        if columns < self.width:
            logits = logits.concat(ctx, ctx.zeros((rows, self.width - columns), logits.dtype), 1)
        whole = self.group.all_gather(ctx, logits, 1)
        return whole if whole.shape[1] == vocab_size else whole.slice(ctx, 1, 0, vocab_size)

    def check_step(self, ctx: ml.Context, batch: Batch) -> None:
        """Raise GroupError unless all ranks are about to compute the same pass. If another rank has no room
        (``kvcache_engine.consensus``), raise CacheFullError as that one does.
        """
        try:
            digests = of_all(ctx, self.group, _digest(batch))
        except BaseException as error:  # the other ranks wait for it
            self.group.abandon("forward", error)
            raise
        if min(digests) < 0:
            raise failed_elsewhere("forward", digests)
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ml.GroupError(
                f"forward: rank {self.group.rank} of {self.group.size} found that rank {others[0]} computes "
                "a different pass from rank 0; submit the same requests in the same order on all ranks, with "
                "a seed if they sample"
            )


def share_of(config: ModelConfig, group: ml.Group) -> Share:
    """The part of this rank. There may be up to one rank per query head; if there are fewer KV heads than
    ranks, they are repeated.

    Raises ModelError for a number of ranks that the heads cannot be divided among evenly.
    """
    size, rank = group.size, group.rank
    check_ranks(config, size)
    queries = config.heads // config.kv_heads
    if size <= config.kv_heads:
        kv_heads = _part(config.kv_heads, rank, size)
        heads = range(kv_heads.start * queries, kv_heads.stop * queries)
    else:
        copies = size // config.kv_heads
        kv = rank // copies
        kv_heads, mine = range(kv, kv + 1), _part(queries, rank % copies, copies)
        heads = range(kv * queries + mine.start, kv * queries + mine.stop)
    width = -(-config.vocab_size // size)
    first = min(rank * width, config.vocab_size)
    vocab = range(first, min(first + width, config.vocab_size))
    return Share(group, heads, kv_heads, _part(config.intermediate_size, rank, size), vocab, width)


def check_ranks(config: ModelConfig, size: int) -> None:
    """Raise ModelError if the heads cannot be divided evenly among the ranks."""
    if size not in sizes_of(config):
        sizes = ", ".join(map(str, sizes_of(config)))
        raise ModelError(
            f"tensor parallelism: {config.heads} heads with {config.kv_heads} KV heads cannot be split over "
            f"{size} ranks; this model supports {sizes}"
        )


def sizes_of(config: ModelConfig) -> list[int]:
    """The numbers of ranks that a model can be split over: divisors of its KV heads, and multiples of their
    number if each rank has a query head.
    """
    kv, queries = config.kv_heads, config.heads // config.kv_heads
    divisors = [size for size in range(1, kv + 1) if kv % size == 0]
    multiples = [kv * copies for copies in range(2, queries + 1)]
    return [size for size in divisors + multiples if size <= config.intermediate_size]


def of_all(ctx: ml.Context, group: ml.Group, *values: int) -> list[int]:
    """Each rank's ``values``, I64, in rank order."""
    gathered = group.all_gather(ctx, ctx.from_numpy(list(values), ml.DType.I64))
    return [int(value) for value in gathered.to_numpy()]


def failed_elsewhere(op: str, values: Sequence[int]) -> Exception:
    """The error if the smallest of the ranks' ``values`` is NO_ROOM or FAILED."""
    rank, size = values.index(min(values)), len(values)
    if values[rank] != NO_ROOM:
        return ml.GroupError(f"{op}: rank {rank} of {size} failed before this; look for its own error")
    error = CacheFullError(0, 0, {}, op)
    error.args = (f"{op}: rank {rank} of {size} has no room for this; all ranks stop",)
    return error


def device_of_rank(devices: Sequence[str], local_rank: int, local_size: int) -> str | None:
    """The accelerator of this machine for one of its ranks; None: the default device. Raises GroupError if
    there are fewer than ranks, since NCCL does not allow two ranks on one.
    """
    own = [name for name in devices if name.startswith("cuda")]
    if not own:
        return None
    if len(own) < local_size:
        raise ml.GroupError(
            f"tensor parallelism: {local_size} ranks on a machine with {', '.join(own)}; start fewer, or use "
            "--device cpu"
        )
    return own[local_rank]


def _part(count: int, rank: int, size: int) -> range:
    """The rank's share of ``count``; the shares are consecutive, and differ by at most one."""
    return range(rank * count // size, (rank + 1) * count // size)


class _PartialWeights:
    """One rank's slices; other ranks' parts of a mapped file are not read."""

    def __init__(self, weights: Weights, share: Share, head_dim: int) -> None:
        self._weights = weights
        self.origin: Path | None = getattr(weights, "origin", None)
        self._first = share.group.rank == 0
        queries, keys = (_scaled(part, head_dim) for part in (share.heads, share.kv_heads))
        self._rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self._rows |= {"gate_proj": share.inner, "up_proj": share.inner}
        self._columns = {"o_proj": queries, "down_proj": share.inner}

    def __getitem__(self, name: str) -> np.ndarray:
        array, owner, kind = self._weights[name], *name.split(".")[-2:]
        if owner in self._rows:
            part = self._rows[owner]
            return array[part.start : part.stop]
        if owner in self._columns and kind == "bias":  # one rank adds a bias that is summed over ranks
            return array if self._first else np.zeros_like(array)
        if owner in self._columns:
            part = self._columns[owner]
            return array[:, part.start : part.stop]
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._weights


def _scaled(part: range, by: int) -> range:
    return range(part.start * by, part.stop * by)


def _digest(batch: Batch) -> int:
    """A 63-bit digest of a pass."""
    inputs: Any = batch.inputs
    digest = hashlib.blake2b(digest_size=8)
    for part in (batch.positions, batch.sequences, inputs, batch.outputs):
        host = part.to_numpy() if isinstance(part, ml.Tensor) else [] if part is None else part
        array = np.asarray(host, np.int64)
        digest.update(len(array).to_bytes(8, "little") + array.tobytes())
    digest.update(bytes([batch.outputs is None]))
    return int.from_bytes(digest.digest(), "little") >> 1
