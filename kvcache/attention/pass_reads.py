"""What a pass reads, for runtimes that have masks of their own: to compare, to replace, or to draw."""

from __future__ import annotations

import copy

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.history import History, find_history, narrowed
from kvcache.attention.layer_cells import HasPasses
from kvcache.cache import InvalidRangeError, Mask, OrderError, check_thread, check_whole
from kvcache.storage.cell_table import Row

__all__ = ["PassReads"]


class PassReads:
    """What the queries of a cache's current pass see, as ``CausalCache.pass_reads`` returns it.

    Known from ``start_forward`` on, before the first ``put``. After the pass, calls raise OrderError.
    """

    def __init__(self, cache: HasPasses, forward: ForwardPass) -> None:
        self._cache, self._begun = cache, forward

    def _current(self, op: str) -> ForwardPass:
        if self._cache.pass_under_way() is not self._begun:
            raise OrderError(
                f"PassReads.{op}: its pass has ended; call pass_reads() after each start_forward"
            )
        return self._begun

    def mask(self, ctx: ml.Context, window: int | None = None) -> Mask | np.ndarray:
        """The mask over the rows that ``get`` returns in this pass.

        None if every query sees all of them, ``ml.CAUSAL`` if that is equivalent, else BOOL (tokens, history)
        on the host, True where a query sees a row. ``window`` further limits each query to itself and that
        many positions before it. Raises OrderError in another thread than the pass's.
        """
        if window is not None:
            window = check_whole("PassReads.mask", "window", window)
        forward, history = self._shared("mask", ctx)
        lower, lifted = narrowed(forward.reading.lower, window), forward.reading.lifted
        elided = history.elided(lower, lifted)
        if not isinstance(elided, bool):
            return elided
        seen: np.ndarray = history.mask(forward.tokens, lower, lifted, 1) == 0
        return seen

    def positions(self, ctx: ml.Context) -> np.ndarray:
        """I64 (history,): the position of each row that ``get`` returns in a pass over one sequence.

        -1 for the cells of other sequences, which are masked. Raises OrderError as ``mask``.
        """
        _, history = self._shared("positions", ctx)
        positions = np.full(history.length, -1)
        for row, columns in zip(history.rows, history.columns, strict=True):
            where = np.arange(columns, columns + len(row)) if isinstance(columns, int) else columns
            positions[where] = row.positions
        return positions

    def _shared(self, op: str, ctx: ml.Context) -> tuple[ForwardPass, History]:
        """The pass, and what ``get`` reads in it."""
        forward = self._current(op)
        check_thread(f"PassReads.{op}", forward.thread)
        forward.fill(ctx)
        return forward, forward.reading.shared(ctx)[0]

    def seen(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which query sees which cell: (seen, queries, cells), on the host and without any tensor, in any
        thread.

        ``seen`` BOOL (tokens, history); ``queries`` I64 (tokens, 2), the sequence and the position of each
        token of the batch; ``cells`` I64 (history,), the cell of each column. Raises OrderError for a pass
        that only reserves memory.
        """
        forward = self._current("seen")
        plan = forward.reading
        if forward.reserve:
            raise OrderError(
                "PassReads.seen: the current pass reserves memory and stores nothing; it has no mask yet"
            )
        history = find_history(plan.table, plan.groups, plan.config.cache_padding)
        seen = history.mask(plan.tokens, plan.lower, plan.lifted, 1) == 0
        queries = np.zeros((forward.tokens, 2), np.int64)
        for group in forward.groups:
            queries[group.batch_indices, 0], queries[group.batch_indices, 1] = group.seq, group.positions
        cells = np.arange(history.start, history.start + history.length)
        return seen, queries, cells if history.index is None else history.index.copy()

    def show_only(
        self, shown: np.ndarray | None, blind: np.ndarray | None = None, *, continues: bool = False
    ) -> None:
        """Leave out tokens that the runtime's own mask hides, such as padding, before anything is read.

        The pass has rows of adjacent tokens, one for each sequence and all of one length. ``shown`` BOOL
        (rows, positions) marks what every query of a row may see of its sequence; None: everything. ``blind``
        BOOL (rows, new tokens) marks queries that see nothing; their results are unspecified, but finite.
        Hidden tokens are not read. ``continues``: the pass reads what the previous one read, and then its own
        tokens, so that its plan can be extended instead of made anew. Raises InvalidRangeError for other
        shapes, OrderError in another thread than the pass's.
        """
        forward = self._current("show_only")
        check_thread("PassReads.show_only", forward.thread)
        rows, last = len(forward.groups), max(int(group.positions[-1]) for group in forward.groups)
        _check_marks("shown", shown, (rows, last + 1))
        _check_marks("blind", blind, (rows, forward.tokens // rows))
        if not continues:
            forward.reading.start_anew()
        if shown is None:
            return
        table, groups, unseeing = copy.copy(forward.table), [], []
        table.rows = [*table.rows]
        for group in forward.groups:
            i, row = group.first_token // len(group), table.rows[group.seq]
            visible = shown[i][row.positions]
            if not visible.all():
                rest = table.rows[group.seq] = Row()
                rest.assign(row.positions[visible], row.cells[visible])
            if blind is not None and blind[i].any():
                seeing, tokens = ~blind[i], group.indices()
                unseeing.append(tokens[blind[i]])
                if not seeing.any():
                    continue
                positions = group.positions[seeing]
                group = SequenceTokens(group.seq, positions, tokens[seeing], int(positions[0]))
            groups.append(group)
        if unseeing:  # every query must read a cell: an arbitrary one
            queries, one = np.concatenate(unseeing), Row()
            cell = forward.table.rows[forward.groups[0].seq].last_cell
            one.assign(np.zeros(1, np.int64), np.array([cell]))
            groups.append(SequenceTokens(len(table.rows), np.zeros(queries.size, np.int64), queries, 0))
            table.rows.append(one)
        forward.reading.hide(table, groups)


def _check_marks(name: str, marks: np.ndarray | None, least: tuple[int, int]) -> None:
    if marks is None:
        return
    shape, kind = np.shape(marks), str(getattr(marks, "dtype", type(marks).__name__))
    if kind != "bool" or len(shape) != 2 or shape[0] != least[0] or shape[1] < least[1]:
        raise InvalidRangeError(
            f"PassReads.show_only: {name} {kind} {shape}; it must be bool ({least[0]}, {least[1]} or more)"
        )
