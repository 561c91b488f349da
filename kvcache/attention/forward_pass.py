"""One forward pass: where its tokens are placed and stored, and which layers have them.

Its reads are planned in ``plan``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from threading import get_ident

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens, check_tensors
from kvcache.attention.fixed_shapes import GraphRows, check_graph
from kvcache.attention.plan import ReadPlan
from kvcache.cache import InvalidRangeError, NotSupportedError, OrderError, check_context
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.layer_shape import ExtraSpec, LayerShape, latent_dim

Extras = Mapping[str, ml.Tensor]

TOGETHER = 16
"""From this many sequences with one token each, placing them together is faster than one by one."""

_stamps = itertools.count(2, 2)


class ForwardPass:
    """One pass over a batch, between two ``start_forward`` calls."""

    __slots__ = (
        "_loaded", "_targets", "_whole", "cells", "groups", "layers", "reading", "reserve", "run",
        "scattered", "scattered_for", "stamp", "storable", "table", "thread", "tokens",
    )  # fmt: skip

    def __init__(
        self, reading: ReadPlan, cells: int | np.ndarray | None, *, reserve: bool = False,
        stamp: int | None = None,
    ) -> None:  # fmt: skip
        """``cells`` is where the batch is written, in batch order: the first cell of a run, or one cell per
        token.

        None if nothing is written.
        """
        self.reading, self.cells, self.reserve = reading, cells, reserve
        self.table, self.layers = reading.table, reading.layers
        self.groups, self.tokens = reading.groups, reading.tokens
        self.thread = get_ident()
        """The thread that the pass belongs to."""
        self.stamp = next(_stamps) if stamp is None else stamp
        """The even number that ``put`` stores in ``LayerBuffers.stamp``; layers with an earlier stamp are not
        read.
        """
        scattered = cells if isinstance(cells, np.ndarray) and reading.fixed is None else None
        self.run = cells if isinstance(cells, int) and reading.fixed is None else -1
        """The first cell of the run that the whole batch is written to; -1 if the cells are not a run."""
        self.storable = self.stamp if self.run >= 0 or scattered is not None else -1
        """``stamp`` if all layers store in the same cells; else -1, which is below the stamps of all layers.
        """
        self.scattered: ml.Tensor
        """All cells of the batch if they are scattered, for a ``put`` in the context ``scattered_for``."""
        self.scattered_for: ml.Context | None = None
        self._targets = None if scattered is None else reading.uploads.add(scattered)
        self._loaded = False
        """Whether the tensors of fixed shapes have been loaded with this pass."""
        self._whole = False

    def begin(self) -> None:
        self.table.placed = None
        if self.cells is not None and self.reading.fixed is None:
            self.table.placed = self.stamp, self.cells, self.tokens

    @property
    def read_only(self) -> bool:
        """Whether the batch consists of queries only and takes no cells."""
        return self.cells is None and not self.reserve

    # Which layers have the tokens.

    def note_put(self, buffers: LayerBuffers) -> None:
        """Record that a layer has the tokens of the pass."""
        buffers.stamp = self.stamp
        if buffers.absent is not None and self.cells is not None:
            buffers.absent[self._where()] = 0
            owned = np.flatnonzero(self.table.references)
            if buffers.lacks(self.table.taken, owned) is None:
                buffers.absent = None

    @property
    def whole(self) -> bool:
        """Whether all layers that store anything have its tokens; puts made by a graph are unknown."""
        if not self._whole:
            self._whole = self.cells is None or self.reading.fixed is not None or self._is_put()
        return self._whole

    def _is_put(self) -> bool:
        stamp = self.stamp
        for buffers in [*self.layers.values()]:  # at once: another thread may put a layer's first K and V
            if buffers.stamp < stamp:
                return False
        return bool(self.layers)

    @property
    def finished(self) -> bool:
        """Whether all layers that store anything have been put in this pass, and read since.

        True if that is unknown: a pass that stores nothing may read any layer, and a graph does not report
        what it does.
        """
        stamps = [buffers.stamp for buffers in [*self.layers.values()]]  # at once, as in _is_put
        if self.cells is None or (self.reading.fixed is not None and max(stamps, default=0) < self.stamp):
            return True
        return bool(stamps) and min(stamps) > self.stamp

    def check_replaceable(self, op: str, layer: int, buffers: LayerBuffers) -> None:
        """Raise OrderError for a second put of a layer that has already been put and read in this pass."""
        if self.stamp < buffers.stamp and not self.reserve:
            raise OrderError(
                f"{op}: layer {layer} was put in this pass and read, and would now be replaced; call "
                "set_layer before each layer, and start_forward before the next pass"
            )

    def end(self) -> None:
        """End the pass: record which layers lack its tokens."""
        self.table.placed = None
        if not self.whole:
            for buffers in self.layers.values():
                if buffers.stamp < self.stamp:
                    buffers.lack(self.table.taken, self._where())

    def resume(self) -> None:
        """Continue after ``end``: the missing layers may still be put."""
        for buffers in self.layers.values() if self.cells is not None else ():
            if buffers.stamp < self.stamp and buffers.absent is not None:
                buffers.absent[self._where()] = 0
        self.begin()

    def _where(self) -> slice | np.ndarray:
        """The cells of the batch, as an index; the batch must have cells."""
        cells = self.cells
        assert cells is not None
        return slice(cells, cells + self.tokens) if isinstance(cells, int) else cells

    def readable(self, op: str, layer: int) -> LayerBuffers:
        """The layer's buffers. Raises OrderError if the layer lacks tokens of the pass, or of its
        sequences.
        """
        buffers = self.layers.get(layer) or self._stored(op, layer)
        if buffers.stamp >= self.stamp:
            if buffers.absent is not None and not self.reserve:
                self._check_present(op, layer, buffers)
            return buffers
        if self.read_only:
            raise OrderError(
                f"{op}: layer {layer} was not put in the last pass that stored tokens, and lacks them; "
                "remove them, or evaluate them in all layers"
            )
        raise OrderError(
            f"{op}: layer {layer} was not put in this pass, and lacks its tokens; put them, set_layer "
            "to the layer whose K and V it shares, or start_forward(..., read_only=True) to read the past"
        )

    def _stored(self, op: str, layer: int) -> LayerBuffers:
        if layer not in self.layers:
            raise OrderError(f"{op}: layer {layer} stores nothing yet; call put first")
        return self.layers[layer]

    def _check_present(self, op: str, layer: int, buffers: LayerBuffers) -> None:
        for group in self.groups:
            row = self.table.rows[group.seq]
            lacking = buffers.lacks(self.table.taken, row.cells)
            if lacking is not None:
                first = int(row.positions[lacking][0])
                # The tokens from there on would lack what a window no longer stores.
                begin = first if self.reading.lower is None else f"resume_point({group.seq}, {first})"
                raise OrderError(
                    f"{op}: layer {layer} lacks position {first} of sequence {group.seq}, as it was not put "
                    f"in the pass that stored the token; call remove({group.seq}, {begin}), and evaluate the "
                    "tokens from there on in all layers"
                )

    # Fixed shapes.

    def load(self) -> None:
        """Prepare the tensors that ``fill`` uploads."""
        reading = self.reading
        assert reading.fixed is not None
        first, targets = self.cells, None
        if first is not None:
            targets = np.arange(first, first + self.tokens) if isinstance(first, int) else first
        reading.fixed.load(self, None if targets is None else reading.uploads.add(targets), *reading.tables())
        self._loaded = True

    def fill(self, ctx: ml.Context) -> None:
        """Upload the tensors of fixed shapes for this pass, unless that has been done."""
        fixed = self.reading.fixed
        if fixed is None:
            return
        if fixed.owner is not self or not self._loaded:
            self.load()
        if not fixed.brought:
            fixed.bring([ctx.input(), *map(ctx.layer, self.layers)])

    def lift(self, indices: frozenset[int]) -> None:
        """Let the tokens at ``indices`` see the tokens after them as well."""
        self.reading.lift(indices)
        self._loaded = False

    def graph_rows(self, ctx: ml.Context, layer: int) -> GraphRows:
        if self.read_only:
            raise OrderError("graph_rows: this pass is read-only, and a graph writes; read it by get")
        fixed = self.reading.fixed
        if fixed is None:
            raise NotSupportedError(
                "graph_rows: this pass has no fixed shapes; set_config with fixed_context, and start a pass "
                "without reserve"
            )
        buffers = self._stored("graph_rows", layer)
        check_graph(layer, buffers)
        self.fill(ctx)
        self.note_put(buffers)
        key, value = buffers.read_as_configured(ctx, 0, self.table.cells)
        targets, mask, cells = fixed.on(ctx.layer(layer))
        return GraphRows(key, value, targets, cells, mask)

    # Writing and reading.

    def write(self, ctx: ml.Context, buffers: LayerBuffers, new: Sequence[ml.Tensor]) -> None:
        """Store the tensors ``new`` of the batch in its cells, in the order of ``LayerBuffers.stored``.

        In the first layer, scattered cells are written run by run: their indices are uploaded together with
        the rest of the plan, for further layers.
        """
        reading = self.reading
        if (
            self.run >= 0
            or reading.fixed is not None
            or reading.expected is not None
            or not reading.uploads.pending(ctx)
        ):
            buffers.write(ctx, self.targets(ctx), new)
        else:
            cells = self.cells
            assert isinstance(cells, np.ndarray)
            cuts = np.flatnonzero(np.diff(cells) != 1) + 1
            for begin, end in itertools.pairwise([0, *cuts.tolist(), self.tokens]):
                buffers.write(ctx, int(cells[begin]), [one.slice(ctx, 0, begin, end) for one in new])

    def targets(self, ctx: ml.Context) -> int | ml.Tensor:
        """The first cell of the run to write, or all cells as an I32 tensor."""
        if self.reading.fixed is not None:
            self.fill(ctx)
            return self.reading.fixed.on(ctx)[0]
        if self.run >= 0:
            return self.run
        assert self._targets is not None
        self.scattered, self.scattered_for = self._targets.on(ctx), ctx
        return self.scattered

    def reserved_mask(self, ctx: ml.Context) -> ml.Tensor:
        """A mask over all cells that hides none of them."""
        reading = self.reading
        return ctx.input().zeros((reading.padded_tokens, self.table.cells), reading.config.mask_dtype)

    def read_extra(self, ctx: ml.Context, layer: int, name: str) -> ml.Tensor:
        buffers, here = self.readable("get_extra", layer), ctx.layer(layer)
        if name not in buffers.extra:
            raise InvalidRangeError(
                f"get_extra: {name!r:.40} of layer {layer}; it stores {sorted(buffers.extra) or 'none'}"
            )
        if self.reserve:
            return buffers.read_extra(here, name, 0, self.table.cells)
        self.fill(ctx)
        history = self.reading.rows(ctx)
        extra = buffers.read_extra(here, name, history.cells(here), history.length)
        buffers.note_read()
        return extra


def place(table: CellTable, groups: Sequence[SequenceTokens], tokens: int) -> int | np.ndarray:
    """Take a cell for each of ``tokens`` tokens: the first cell of a run, or one per token.

    In batch order. The table must have enough free cells, and no sequence of ``groups`` may hold the
    positions.
    """
    if len(groups) == 1 and isinstance(groups[0].batch_indices, slice):
        return _place_group(table, groups[0])
    cells = np.empty(tokens, dtype=np.int64)
    if len(groups) == tokens >= TOGETHER:
        groups = _place_behind(table, groups, cells)
    for group in groups:
        chosen = _place_group(table, group)
        cells[group.batch_indices] = chosen if len(group) == 1 else group.spread(chosen)
    first = int(cells[0])
    return first if bool((cells == np.arange(first, first + tokens)).all()) else cells


def _place_behind(
    table: CellTable, groups: Sequence[SequenceTokens], cells: np.ndarray
) -> Sequence[SequenceTokens]:
    """Place tokens, one per group, directly after their sequences; returns the groups whose next cell is
    taken.
    """
    positions = np.concatenate([group.positions for group in groups])
    chosen = table.append_each([group.seq for group in groups], positions)
    cells[[group.first_token for group in groups]] = chosen
    return [groups[number] for number in np.flatnonzero(chosen < 0).tolist()]


def _place_group(table: CellTable, group: SequenceTokens) -> int | np.ndarray:
    """Take cells for a group's positions, in ascending order of the positions."""
    count = group.positions.size
    if count == 1 and (cell := table.append(group.seq, group.lowest)) is not None:
        return cell
    chosen = table.choose(group.seq, count)
    if isinstance(chosen, int):
        if group.is_run() and group.lowest > table.rows[group.seq].last:
            table.take_run(group.seq, group.lowest, chosen, count)
        else:
            table.take(group.seq, group.positions, np.arange(chosen, chosen + count))
    else:
        table.take(group.seq, group.positions, chosen)
    return chosen


def put_layer(
    ctx: ml.Context,
    forward: ForwardPass,
    storage: CellStorage,
    layer: int,
    key: ml.Tensor,
    value: ml.Tensor | None,
    v_dim: int | None,
    extra: Extras | None,
) -> None:
    """``CausalCache.put`` without a store of the backend's own."""
    buffers = fresh = storage.buffers.get(layer)
    check_tensors("put", storage.backend, key=key, **({} if value is None else {"value": value}))
    check_context("put", ctx, storage.backend)
    if not (key.dtype.is_float and (value is None or value.dtype.is_float)):
        dtypes = key.dtype.name if value is None else f"{key.dtype.name} and {value.dtype.name}"
        raise ml.DTypeError(f"put: keys and values in {dtypes}; they must be of float dtypes")
    fits = False
    if buffers is not None and value is not None and v_dim is None and not extra:
        fits = buffers.fits(forward.tokens, key.shape, value.shape)
    if buffers is None or not fits:
        shape = _checked(forward.tokens, key, value, v_dim, extra)
        buffers = buffers or storage.allocate(ctx, layer, shape, key.dtype)
        buffers.check(layer, shape, forward.tokens)
    forward.check_replaceable("put", layer, buffers)
    if not forward.reserve:
        new = buffers.apart(ctx, (key,) if value is None else (key, value))
        if extra:
            new += _flat(ctx, buffers.shape, extra)
        forward.write(ctx, buffers, new)
        forward.note_put(buffers)
    elif fresh is None:
        buffers.touch(ctx.layer(layer))
    storage.buffers[layer] = buffers  # last, so that a failed write does not fix shapes


def put_stored_layer(
    ctx: ml.Context,
    forward: ForwardPass,
    storage: CellStorage,
    layer: int,
    parts: Sequence[ml.Tensor],
    activations: ml.DType,
    v_dim: int | None,
) -> None:
    check_context("put_stored", ctx, storage.backend)
    kinds = [(part.shape, part.dtype) for part in parts]
    if any(shape[:1] != (forward.tokens,) for shape, _ in kinds):
        raise InvalidRangeError(
            f"put_stored: parts {[shape for shape, _ in kinds]}; each must be ({forward.tokens}, kv_heads, "
            "width)"
        )
    shape = LayerShape.of_parts(storage.dtype, activations, kinds, v_dim)
    buffers = storage.buffers.get(layer) or storage.allocate(ctx, layer, shape, activations)
    buffers.check(layer, shape, forward.tokens)
    forward.check_replaceable("put_stored", layer, buffers)
    buffers.write_stored(ctx, forward.targets(ctx), tuple(parts))
    forward.note_put(buffers)
    storage.buffers[layer] = buffers


def _checked(
    tokens: int, key: ml.Tensor, value: ml.Tensor | None, v_dim: int | None, extra: Extras | None
) -> LayerShape:
    """The shape that a layer stores for such tensors. Raises InvalidRangeError if they do not fit a batch of
    ``tokens``.
    """
    shapes = {"key": key.shape} if value is None else {"key": key.shape, "value": value.shape}
    heads = key.shape[1] if len(key.shape) > 1 else 0
    if any(len(shape) != 3 or shape[:2] != (tokens, heads) for shape in shapes.values()):
        listed = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidRangeError(
            f"put: {listed} for a batch of {tokens}; they must be (tokens, kv_heads, head_dim) and "
            "(tokens, kv_heads, v_dim)"
        )
    own = tuple(_extra(tokens, name, extra[name]) for name in sorted(extra, key=str)) if extra else ()
    dim = key.shape[2]
    if value is None:
        return LayerShape((heads, dim), (heads, latent_dim(dim, v_dim)), True, own)
    if v_dim is not None:
        raise InvalidRangeError(
            f"put: v_dim={v_dim} beside values; it must be None, or the values must be left out"
        )
    return LayerShape((heads, dim), (heads, value.shape[2]), False, own)


def _flat(ctx: ml.Context, shape: LayerShape, extra: Extras) -> list[ml.Tensor]:
    """Extras in their stored shape, (tokens, 1, numbers) each."""
    whole = [extra[one.name].contiguous(ctx) for one in shape.extra]
    return [x.reshape(ctx, x.shape[0], 1, one.size) for x, one in zip(whole, shape.extra, strict=True)]


def _extra(tokens: int, name: object, tensor: ml.Tensor) -> ExtraSpec:
    if not (isinstance(name, str) and name):
        raise InvalidRangeError(
            f"put: extra {name!r:.40}; its name must be a string of at least one character"
        )
    check_tensors("put", None, **{f"extra {name}": tensor})
    shape = tensor.shape
    if shape[:1] != (tokens,) or not math.prod(shape[1:]):
        raise InvalidRangeError(
            f"put: extra {name} {shape} for a batch of {tokens}; it must be (tokens, ...), with at least one "
            "number per token"
        )
    return ExtraSpec(name, tuple(shape[1:]), tensor.dtype)
