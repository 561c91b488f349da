"""The error function, which NumPy lacks.

W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969):
within 1e-15 of erf in double precision where it is evaluated.
"""

from __future__ import annotations

import numpy as np

_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560,
     1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)  # fmt: skip
_LARGE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
     2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
     1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
_SPLIT = 0.46875
_ONE = 4.0  # 1 - erf(4) is 1.5e-8: below half a unit in the last place of float32


def erf(x: np.ndarray) -> np.ndarray:
    """erf of each element, computed in double precision, in the dtype of ``x``."""
    wide = np.asarray(x, dtype=np.float64)
    magnitude = np.minimum(np.abs(wide), _ONE)
    square = magnitude * magnitude
    near = wide * (np.polyval(_SMALL[0], square) / np.polyval(_SMALL[1], square))
    far = 1.0 - np.exp(-square) * (np.polyval(_LARGE[0], magnitude) / np.polyval(_LARGE[1], magnitude))
    result = np.where(magnitude <= _SPLIT, near, np.copysign(far, wide))
    return np.where(np.isnan(wide), wide, result).astype(x.dtype)
