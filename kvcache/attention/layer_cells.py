"""Direct access to the cells of a layer, for runtimes that copy K and V there themselves."""

from __future__ import annotations

from threading import get_ident
from typing import Protocol

from kvcache.attention.forward_pass import ForwardPass
from kvcache.cache import ClosedError, OrderError
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["LayerCells"]


class HasPasses(Protocol):
    @property
    def storage(self) -> CellStorage: ...
    def pass_under_way(self) -> ForwardPass | None: ...


class LayerCells:
    """K and V of one layer at all cells, as ``CausalCache.layer_cells`` returns them.

    For runtimes in which a call of ``put`` would cost more than the copy. ``key`` (cells, kv_heads, head_dim)
    and ``value`` (cells, kv_heads, v_dim) alias the cache; their strides tell its layout. In each pass, ask
    ``writable``, write all tokens of the batch to their cells (for rows of a ``DenseBatch``, the last of each
    run: see ``DenseBatch.even``), and call ``note_written``, which counts as the layer's ``put`` and ``get``.
    """

    __slots__ = ("_buffers", "_cache", "_forward", "_layer", "key", "value")

    def __init__(self, cache: HasPasses, layer: int, buffers: LayerBuffers) -> None:
        self._cache, self._layer, self._buffers = cache, layer, buffers
        (self.key,), (self.value,) = buffers.whole
        self._forward: ForwardPass | None = None
        """The pass in which ``writable`` was True, and ``note_written`` is to be called."""

    @property
    def current(self) -> bool:
        """Whether the cache still stores the layer in these tensors: not after ``close``, for example."""
        try:
            return self._cache.storage.buffers.get(self._layer) is self._buffers
        except ClosedError:
            return False

    def writable(self) -> bool:
        """Whether the layer's tokens of the current pass may be written here, bypassing ``put``.

        False if ``put`` has more to do or would refuse: outside a pass, in another thread, in a pass that is
        read-only or has fixed shapes, after a read in this pass, or if the tensors are no longer ``current``.
        """
        forward, buffers = self._cache.pass_under_way(), self._buffers
        straight = (
            forward is not None
            and forward.layers.get(self._layer) is buffers
            and buffers.stamp <= forward.storable
            and buffers.absent is None
            and forward.thread == get_ident()
        )
        self._forward = forward if straight else None
        return straight

    def note_written(self) -> None:
        """Record that the layer's tokens of the pass are written and read.

        Raises OrderError unless ``writable`` was True last, in the current pass.
        """
        forward = self._forward
        if forward is None or forward is not self._cache.pass_under_way():
            raise OrderError(
                f"note_written: layer {self._layer} may not be written directly now; ask writable in each "
                "pass, and where it is False, call put"
            )
        self._forward = None
        self._buffers.stamp = forward.stamp | 1  # put and read
