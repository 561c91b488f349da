"""Each planted bug is noticed by the test that ``plants`` names beside it. Run by ``make mutation``."""

from __future__ import annotations

import pytest

from kvcache.testing import traces
from kvcache.testing.suites import properties

from .planting import UNUSED, Planter
from .plants import BUGS


@pytest.mark.parametrize("file", BUGS)
def test_each_planted_bug_is_noticed(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ML_UNSHRUNK", "1")  # that a test fails is enough
    monkeypatch.setattr(properties, "SHOWN", 1)
    monkeypatch.setattr(traces, "_shrink", lambda backend, trace, ops, error: (ops, error))
    planter = Planter(BUGS[file])
    pytest.main([file, "-q", "--tb=no", *UNUSED], plugins=[planter])
    assert not planter.unnoticed, "\n".join(planter.unnoticed)
    if planter.skipped:
        why = "; ".join(dict.fromkeys(planter.skipped.values()))
        pytest.skip(f"{len(planter.skipped)} of {len(planter.bugs)} bugs are left out: {why}")
