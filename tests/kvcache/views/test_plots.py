"""Plots with matplotlib: what is in them, and that nothing global is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ml
from kvcache import CausalCache, HostTier, InvalidRangeError
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.views import Occupancy, plots

from .views_rig import bound, store, talk

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[3]


def test_occupancy_is_stacked_up_to_all_used_cells(numpy_backend: ml.Backend, tmp_path: Path) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=8)
    occupancy = Occupancy(cache)
    for position in range(4):
        store(cache, numpy_backend, 0, [position])
        occupancy.sample()
    cache.copy_prefix(0, 1, 2)
    occupancy.sample()
    axes = plots.occupancy(occupancy.samples)
    assert axes.get_legend_handles_labels()[1] == ["sequence 0", "shared", "kept by snapshots"]
    areas = [collection.get_paths()[0].vertices for collection in axes.collections]
    assert [float(area[:, 1].max()) for area in areas] == [4, 4, 4]
    assert [float(area[area[:, 0] == 4][:, 1].max()) for area in areas] == [2, 4, 4], "two of four are shared"
    assert axes.get_lines()[0].get_ydata()[0] == 16, "the capacity"
    axes.figure.savefig(tmp_path / "occupancy.svg")
    assert (tmp_path / "occupancy.svg").stat().st_size > 1000


def test_tiers_are_lines_of_bytes(numpy_backend: ml.Backend) -> None:
    with PrefixCache(bound(CausalCache(), numpy_backend), tiers=[HostTier()]) as prefix:
        occupancy = Occupancy(prefix)
        occupancy.sample()
        talk(prefix, numpy_backend, [1, 2, 3, 4]).close()
        occupancy.sample()
        prefix.evict()
        occupancy.sample()
    device, leaving, host = plots.tiers(occupancy.samples).get_lines()
    assert (device.get_ydata() * 2**20).tolist() == [0, 128, 0]
    assert leaving.get_ydata().tolist() == [0, 0, 0], "evict waits until it is there"
    # K, V and the positions
    assert (host.get_ydata() * 2**20).tolist() == [0, 0, 128 + 4 * 8]


def test_axes_of_ones_own_are_used() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plots.tiers([], axes) is axes


def test_what_cannot_be_plotted_is_refused(numpy_backend: ml.Backend) -> None:
    with pytest.raises(InvalidRangeError, match="0 samples"):
        plots.occupancy([])
    cache = bound(CausalCache(), numpy_backend)
    occupancy = Occupancy(cache)
    occupancy.sample()
    with pytest.raises(InvalidRangeError, match="index=1"):
        plots.occupancy(occupancy.samples, index=1)


def test_pictures_need_neither_rich_nor_matplotlib() -> None:
    code = (
        "import sys\nsys.modules['matplotlib'] = sys.modules['rich'] = None\n"
        "import ml, kvcache\n"
        "assert not [name for name in sys.modules if name.startswith('kvcache.views')]\n"
        "cache = kvcache.CausalCache()\ncache.init(ml.open_backend('numpy'), ml.DType.F32, 1, 8, 8)\n"
        "from kvcache.views import plots, render\n"
        "print(render(cache).text(), render(cache).html())\n"
        "try: plots.tiers([])\n"
        "except ml.NotSupportedError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "plots need matplotlib: pip install 'ml-kvcache[plots]'" in done.stdout
