"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss ships them, read as BF16.

``NAME_blocks`` U8 (experts, out, blocks, 16) has the codes of 32 values in each 16 bytes, value 2 i in the
low half of byte i and value 2 i + 1 in the high one; ``NAME_scales`` U8 (experts, out, blocks) their common
exponent plus 127. ``NAME`` is (experts, in, out), in = 32 * blocks, as an unquantised checkpoint has it. The
values, which BF16 holds exactly, are those of transformers' ``convert_moe_packed_tensors``
(transformers/integrations/mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from kvcache_engine.checkpoints.source import WeightSource
from kvcache_engine.errors import ModelError

__all__ = ["MXFP4Source", "decode"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of the 16 codes: a sign, two bits of exponent, one of mantissa."""
_BIAS = 127


class MXFP4Source(WeightSource):
    """Another source, with each pair of blocks and scales in it as one tensor."""

    def __init__(self, stored: WeightSource) -> None:
        self._stored, self.origin = stored, stored.origin
        self._packed = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        for name in self._packed:
            blocks, scales = stored.shape(name + _BLOCKS), stored.shape(name + _SCALES)
            if len(blocks) != 4 or blocks[3] != 16 or scales != blocks[:3]:
                raise ModelError(
                    f"{stored.origin}: {name}{_BLOCKS} {blocks} and {name}{_SCALES} {scales}; MXFP4 has "
                    "(experts, out, blocks, 16) and (experts, out, blocks)"
                )

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._packed:
            return self._stored[name]
        blocks, scales = self._stored[name + _BLOCKS], self._stored[name + _SCALES]
        found = np.empty(self.shape(name), ml_dtypes.bfloat16)
        for i in range(len(found)):  # an expert at a time: as F32 all would take eight times what is stored
            found[i] = decode(blocks[i], scales[i]).T
        return found

    def __iter__(self) -> Iterator[str]:
        halves = {name + part for name in self._packed for part in (_BLOCKS, _SCALES)}
        yield from (name for name in self._stored if name not in halves)
        yield from sorted(self._packed)

    def __len__(self) -> int:
        return len(self._stored) - len(self._packed)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._stored.shape(name)
        experts, out, count, _ = self._stored.shape(name + _BLOCKS)
        return experts, 32 * count, out

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """F32 (..., 32 * blocks) of codes U8 (..., blocks, 16) and scales U8 (..., blocks)."""
    values = np.stack([_E2M1[blocks & 15], _E2M1[blocks >> 4]], -1)
    exponents = scales.astype(np.int32) - _BIAS
    wide: np.ndarray = np.ldexp(values, exponents[..., None, None])
    return wide.reshape(*scales.shape[:-1], -1)
