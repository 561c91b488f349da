"""Deliberate bugs in attention over codes, and in writing them, beside those of the other files."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ml.ragged import RaggedPlan
from ml.testing.quantized import QuantizedTests, decoded, encoded
from ml.testing.ragged import ragged_reference

from .attention_mutants import MUTANTS, one_further, to_the_end
from .backend_mutants import Mutant

Parts = tuple[np.ndarray, ...]
Change = Callable[[Parts, str], Parts]


def _same(parts: Parts, name: str) -> Parts:
    return parts


def attention_mutant(
    name: str, change: Change = _same, plan_change: Callable[[RaggedPlan], None] | None = None, **options: Any
) -> None:
    """Attention from its definition, over parts or by a plan that were changed."""

    def attend(
        self: Any, ctx: Any, query: Any, key: Any, value: Any, plan: Any, scale: float, sinks: Any,
        formats: Any,
    ) -> Any:  # fmt: skip
        parts = key, value
        mine = RaggedPlan(plan.tokens, plan.segments.copy(), plan.readers.copy(), plan.index)
        if plan_change is not None:
            plan_change(mine)
        formats = options.get("formats", lambda names: names)(formats)
        hosts = [
            decoded(change(tuple(x.to_numpy() for x in part), form), form)  # type: ignore[arg-type]
            for part, form in zip(parts, formats, strict=True)
        ]
        logits = options.get("sinks", None if sinks is None else sinks.to_numpy())
        with np.errstate(all="ignore"):
            out = ragged_reference(query.to_numpy(), *hosts, mine, scale, logits)
        return ctx.from_numpy(out.astype(query.dtype.numpy))

    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.ragged_attention = attend

    MUTANTS.append(Mutant(name, QuantizedTests, plant))


def _halves_exchanged(parts: Parts, name: str) -> Parts:
    return ((parts[0] << 4) | (parts[0] >> 4), parts[1]) if name == "Q4_0" else parts


def _unfinite_is_nothing(parts: Parts, name: str) -> Parts:
    return parts[0], np.where(np.isfinite(parts[1]), parts[1], 0)


attention_mutant("low_and_high_halves_are_exchanged", _halves_exchanged)
attention_mutant("nan_in_scales_counts_as_nothing", _unfinite_is_nothing)
attention_mutant("a_reader_of_codes_ends_with_its_segment", plan_change=to_the_end)
attention_mutant("a_row_of_codes_behind_the_last_is_read", plan_change=one_further)
attention_mutant("attention_over_codes_ignores_its_sinks", sinks=None)
attention_mutant("heads_are_read_in_the_other_order", lambda parts, _: tuple(x[:, ::-1] for x in parts))


def store_mutant(name: str, change: Callable[[int, Parts, str], tuple[int, Parts]]) -> None:
    """A store from the definition of the formats, which writes what was changed."""

    class Store:
        def __init__(self, backend: Any, whole: Any) -> None:
            self.backend, self.whole = backend, whole

        def write(self, ctx: Any, start: int, count: int, *given: Any) -> bool:
            kinds = [type(x) is type(self.whole[0][0][0]) and x.backend is self.backend for x in given]
            shapes = [(count, 2, parts[1].shape[2] * 32) for parts, _ in self.whole]
            if ctx.active_backend is not self.backend or not all(kinds) or not 0 <= start <= 12 - count:
                return False
            if count < 1 or [x.shape for x in given] != shapes or not given[0].dtype.is_float:
                return False
            for x, (parts, form) in zip(given, self.whole, strict=True):
                at, new = change(start, encoded(x.to_numpy().astype(np.float32), form), form)
                for part, host in zip(parts, new, strict=True):
                    part.native[at : at + count] = host
            return True

        def read(self, ctx: Any, start: int, count: int) -> None:
            return None

    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.kv_store = lambda self, key, value, formats: Store(
            self, list(zip((key, value), formats, strict=True))
        )

    MUTANTS.append(Mutant(name, QuantizedTests, plant))


def _one_less(start: int, parts: Parts, name: str) -> tuple[int, Parts]:
    return start, (parts[0] - (parts[0] == 127) if name == "Q8_0" else parts[0], parts[1])


store_mutant("the_largest_code_is_126", _one_less)
store_mutant("scales_lose_their_sign", lambda start, parts, _: (start, (parts[0], np.abs(parts[1]))))
store_mutant("codes_go_to_the_first_cells", lambda start, parts, _: (0, parts))
