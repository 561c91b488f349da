"""A hypothesis state machine over a cache and its model: it shrinks what fails to a readable program."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import ml
from kvcache.testing.model import Setup
from kvcache.testing.rig import Rig
from ml import DType, Layout

__all__ = ["CacheMachine", "machine_on", "setups"]

small = st.integers(0, 7)
Data = st.DataObject


def setups(floats: list[DType]) -> st.SearchStrategy[Setup]:
    config = st.builds(
        ml.CacheConfig,
        cache_padding=st.sampled_from([1, 4]),
        mask_batch_padding=st.sampled_from([1, 3]),
        mask_dtype=st.sampled_from(floats),
        permuted_v=st.booleans(),
        layout=st.sampled_from(list(Layout)),
        elide_mask=st.booleans(),
    )
    common: dict[str, Any] = {
        "max_sequences": st.integers(1, 3),
        "capacity": st.integers(2, 10),
        "max_batch": st.integers(1, 5),
        "dtype": st.sampled_from(floats),
        "config": config,
        "layers": st.integers(1, 2),
        "can_shift": st.booleans(),
    }
    window = st.integers(0, 4)
    return st.one_of(
        st.builds(Setup, **common),
        st.builds(Setup, window=window, **common),
        window.flatmap(lambda w: st.builds(Setup, window=st.just(w), memory=st.integers(w, w + 5), **common)),
        st.builds(Setup, chunk=st.integers(1, 4), **common),
    )


class CacheMachine(RuleBasedStateMachine):
    """Its subclasses say on which backend."""

    backend: ClassVar[ml.Backend]
    floats: ClassVar[list[DType]]
    computes: ClassVar[bool]

    rig: Rig

    @initialize(data=st.data())
    def make(self, data: Data) -> None:
        setup = data.draw(setups(self.floats), label="setup")
        self.ctx = self.backend.new_context()
        self.rig = Rig(setup, self.backend, self.ctx)

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.ctx.close()

    def sequence(self, data: Data) -> int:
        return data.draw(st.integers(0, self.rig.setup.max_sequences - 1), label="sequence")

    def forward(self, pairs: list[tuple[int, int]], lifted: list[int], read_only: bool = False) -> None:
        r = self.rig
        if not (r.read if read_only else r.start)([p for p, _ in pairs], [s for _, s in pairs]):
            return
        if not read_only:
            r.put()
        if lifted:
            r.cache.set_causal(r.ctx, except_=lifted)
        r.check_seen(lifted)
        if self.computes:
            r.check_attend(len(pairs), lifted)

    @rule(data=st.data(), count=st.integers(1, 4))
    def extend(self, data: Data, count: int) -> None:
        seq = self.sequence(data)
        first = self.rig.model.last(seq) + 1
        self.forward([(first + i, seq) for i in range(count)], [])

    @rule(data=st.data(), read_only=st.booleans())
    def forward_anything(self, data: Data, read_only: bool) -> None:
        """Any pairs at all: gaps, repeats, what is stored already, in any order."""
        last = self.rig.setup.max_sequences - 1
        pair = st.tuples(st.integers(0, 11), st.integers(0, last))
        pairs = data.draw(st.lists(pair, min_size=1, max_size=5), label="(position, sequence)")
        index = st.integers(0, len(pairs) - 1)
        self.forward(pairs, data.draw(st.lists(index, max_size=2), label="lifted"), read_only)

    @precondition(lambda self: self.rig.setup.max_sequences > 1)
    @rule(data=st.data(), length=small)
    def copy_prefix(self, data: Data, length: int) -> None:
        src = self.sequence(data)
        dst = (src + 1 + data.draw(st.integers(0, self.rig.setup.max_sequences - 2))) % (
            self.rig.setup.max_sequences
        )
        self.rig.copy_prefix(src, dst, length)

    @rule(data=st.data(), begin=small)
    def remove_to_the_end(self, data: Data, begin: int) -> None:
        self.rig.remove(self.sequence(data), begin)

    @rule(data=st.data(), begin=small, count=st.integers(0, 4))
    def remove_from_the_middle(self, data: Data, begin: int, count: int) -> None:
        self.rig.remove(self.sequence(data), begin, begin + count)

    @rule()
    def defrag(self) -> None:
        self.rig.defrag()

    @rule(tokens=st.integers(1, 4))
    def reserve(self, tokens: int) -> None:
        self.rig.reserve(tokens)


def machine_on(backend: ml.Backend, floats: list[DType], computes: bool) -> type[CacheMachine]:
    """The machine's class, bound to an open backend."""
    return type(
        "CacheMachineOn", (CacheMachine,), {"backend": backend, "floats": floats, "computes": computes}
    )
