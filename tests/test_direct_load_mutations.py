"""The tests of pages put straight into a cache are themselves tested: every bug planted here is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache.offload import direct_load as arriving
from kvcache.snapshots import layer_shapes as layering
from kvcache.snapshots.reservation import CellReservation
from kvcache.storage.cell_table import CellTable, Pin
from kvcache.stores import MemoryStore
from kvcache.stores.reading import FileReader

from . import test_layer_shapes as narrow
from .prefix import test_direct_load as cases

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__] = plant
    return plant


@bug
def a_digest_that_is_not_checked(patch: Patch) -> None:
    patch.setattr(FileReader, "_check", lambda self: None)


@bug
def damaged_bytes_left_in_free_cells(patch: Patch) -> None:
    patch.setattr(CellReservation, "_clear", lambda self, start: setattr(self, "_places", {}))


@bug
def cells_that_are_not_held_while_they_are_filled(patch: Patch) -> None:
    patch.setattr(CellTable, "hold", lambda self, cells: Pin(cells))


@bug
def cells_that_are_held_and_counted_as_free(patch: Patch) -> None:
    patch.setattr(CellTable, "hold", CellTable.pin)


@bug
def cells_that_are_held_for_good(patch: Patch) -> None:
    patch.setattr(arriving._Approach, "discard", lambda self: self.tracks.clear())


@bug
def heads_in_the_wrong_order(patch: Patch) -> None:
    original = arriving._Track.runs
    patch.setattr(arriving._Track, "runs", lambda self, *cells: original(self, *cells)[::-1])


@bug
def pages_in_each_others_places(patch: Patch) -> None:
    original = arriving._Approach._tracks_of
    patch.setattr(arriving._Approach, "_tracks_of", lambda self, i: original(self, 0))


@bug
def a_page_too_many_kept(patch: Patch) -> None:
    original = arriving._Approach.take
    patch.setattr(arriving._Approach, "take", lambda self, n: original(self, min(n + 1, len(self.entries))))


@bug
def a_failing_page_counted_as_good(patch: Patch) -> None:
    def run(jobs: Any) -> int:
        for job in jobs:
            try:
                job()
            except Exception:
                continue
        return len(jobs)

    patch.setattr(arriving, "_run_together", run)


@bug
def layers_that_nobody_compares(patch: Patch) -> None:
    patch.setattr(layering, "layers_of_serialized", lambda page: {})


@pytest.fixture
def backend() -> Iterator[ml.Backend]:
    with ml.open_backend("numpy") as backend:
        yield backend


def run_all(backend: ml.Backend, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def get(name: str) -> ml.Backend:
        return backend

    cases.test_a_stored_conversation_has_the_bits_of_a_fresh_prefill(
        get, "numpy", ml.DType.F32, "runs", MemoryStore()
    )
    for page in (0, 2):
        (folder / str(page)).mkdir()
        cases.test_damage_costs_the_pages_from_there_on_and_leaves_nothing_behind(
            get, folder / str(page), "numpy", page, "runs", caplog
        )
    cases.test_an_interrupted_restore_leaves_the_cache_as_it_was(get, "numpy", "runs")
    narrow.test_a_page_of_other_layers_is_dropped_and_computed_again(
        backend, folder / "layers", "causal", False, narrow.lacking, caplog
    )


def test_without_a_bug_nothing_is_noticed(
    backend: ml.Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(arriving, "RUN", 1)
    run_all(backend, tmp_path, caplog)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(
    backend: ml.Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch, name: str
) -> None:
    monkeypatch.setattr(arriving, "RUN", 1)
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, ValueError)), np.errstate(all="ignore"):
        run_all(backend, tmp_path, caplog)
