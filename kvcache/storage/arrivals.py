"""Cells whose content is on its way from host memory, until somebody needs them."""

from __future__ import annotations

import numpy as np

import ml


class Arrivals:
    """The transfers into the cells of one table."""

    def __init__(self) -> None:
        self._under_way: list[tuple[np.ndarray, ml.PageTransfer]] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def add(self, cells: np.ndarray, transfer: ml.PageTransfer) -> None:
        """Copies into ``cells`` have begun."""
        self._under_way.append((cells, transfer))

    def join(self, wanted: np.ndarray) -> list[tuple[np.ndarray, ml.DeviceError]]:
        """Have what follows come after the copies into cells where ``wanted`` is true.

        Returns the cells of copies that failed. What has ended is forgotten, wanted or not.
        """
        waiting, self._under_way = self._under_way, []
        failed: list[tuple[np.ndarray, ml.DeviceError]] = []
        for cells, transfer in waiting:
            if not wanted[cells].any() and not transfer.done():
                self._under_way.append((cells, transfer))
                continue
            try:
                transfer.join()
            except ml.DeviceError as error:
                failed.append((cells, error))
        return failed
