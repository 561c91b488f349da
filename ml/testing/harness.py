"""What every part of the suite stands on: the fixtures, declared absences, and exact comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

import ml
from ml.capabilities import Features
from ml.dtypes import STORAGE_DTYPES, DType
from ml.protocols import Backend, Context, Tensor
from ml.testing import plugin

__all__ = ["BackendCase", "assert_close", "assert_same", "bits", "needs", "refused", "unchanged"]

_Test = TypeVar("_Test", bound=Callable[..., None])


def needs(*wanted: str | DType) -> Callable[[_Test], _Test]:
    """Skip a test where the backend declares one of these operations or dtypes absent."""

    def mark(test: _Test) -> _Test:
        test.ml_needs = wanted  # type: ignore[attr-defined]
        return test

    return mark


def _is_storage(value: object) -> bool:
    return isinstance(value, DType) and value in STORAGE_DTYPES


class BackendCase:
    """Fixtures of the suite. A subclass says which backend, in one of three ways:

    ``backend_name`` (a plugin's name, with ``backend_options`` for ``ml.open_backend``), the
    command line, or an override of the fixture ``backend`` or ``open_backend``.
    """

    backend_name: ClassVar[str | None] = None
    backend_options: ClassVar[Mapping[str, Any]] = {}
    features: ClassVar[Features | None] = None
    """In place of ``BackendSpec.features``."""

    @pytest.fixture
    def open_backend(self, request: pytest.FixtureRequest) -> Iterator[Callable[[], Backend]]:
        """A function that opens one more instance; all are closed after the test."""
        name = self._name(request)
        options = self.backend_options if self.backend_name else plugin.backend_options(request.config)
        opened: list[Backend] = []

        def open_one() -> Backend:
            if name is None:
                pytest.skip("needs another instance: set backend_name or override open_backend")
            opened.append(ml.open_backend(name, **options))
            return opened[-1]

        yield open_one
        for backend in opened:
            backend.close()

    @pytest.fixture
    def backend(self, open_backend: Callable[[], Backend]) -> Backend:
        return open_backend()

    @pytest.fixture
    def ctx(self, backend: Backend) -> Iterator[Context]:
        with backend.new_context() as ctx:
            yield ctx

    @pytest.fixture
    def foreign(self) -> Iterator[Context]:
        """A context of another backend; where NumPy itself is tested, of another instance."""
        with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
            yield ctx

    @pytest.fixture
    def declared(self, request: pytest.FixtureRequest) -> Features:
        if self.features is not None:
            return self.features
        name = self._name(request)
        spec = ml.plugins.registry().specs().get(name) if name else None
        return spec.features if spec else Features()

    @pytest.fixture(autouse=True)
    def _skip_declared_absences(self, request: pytest.FixtureRequest, declared: Features) -> None:
        self._declared = declared
        if getattr(request.function, "ml_checks_absence", False):
            return
        wanted: list[Any] = list(getattr(request.function, "ml_needs", ()))
        callspec = getattr(request.node, "callspec", None)
        for key, value in (callspec.params if callspec else {}).items():
            wanted += value if key == "dtypes" else [value] if key == "op" or _is_storage(value) else []
        for want in wanted:
            offered = want in declared.dtypes if isinstance(want, DType) else declared.has(want)
            if not offered:
                pytest.skip(f"declared absent: {want}")

    def offered(self, dtypes: Iterable[DType]) -> list[DType]:
        """Those of ``dtypes`` that the backend does not declare absent, in order."""
        return [dtype for dtype in dtypes if dtype in self._declared.dtypes]

    @classmethod
    def _name(cls, request: pytest.FixtureRequest) -> str | None:
        return cls.backend_name or plugin.backend_name(request.config)


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, all NaNs as one."""
    flat = np.ascontiguousarray(array)
    raw = flat.reshape(-1).view(np.dtype(f"u{flat.itemsize}")).reshape(array.shape).copy()
    if DType.from_numpy(array.dtype).is_float:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            raw[np.isnan(array.astype(np.float64))] = np.iinfo(raw.dtype).max
    return raw


def assert_same(tensor: Tensor, expected: Any, dtype: DType | None = None) -> None:
    """Dtype, shape and every bit (any NaN equals any NaN); ``expected`` is taken as ``dtype``."""
    wanted = np.asarray(expected, dtype=None if dtype is None else dtype.numpy)
    actual = tensor.to_numpy()
    assert isinstance(actual, np.ndarray)
    assert tensor.dtype is DType.from_numpy(wanted.dtype)
    assert actual.dtype == wanted.dtype
    assert tuple(tensor.shape) == actual.shape == wanted.shape
    if not np.array_equal(bits(actual), bits(wanted)):
        np.testing.assert_array_equal(actual, wanted)
        raise AssertionError(f"the sign of a zero differs: {actual} is not {wanted}")


_TOLERANCE = {
    # One unit in the last place of the narrow floats: computed in F32 and rounded once.
    DType.F32: (4e-6, 2e-6),
    DType.F16: (1e-3, 1e-6),
    DType.BF16: (8e-3, 1e-6),
}


def assert_close(tensor: Tensor, expected: np.ndarray, dtype: DType, slack: float = 1.0) -> None:
    """Within ``slack`` times the tolerance of ``dtype`` of a float64 reference."""
    actual = tensor.to_numpy()
    assert tensor.dtype is dtype
    assert tuple(tensor.shape) == actual.shape == expected.shape
    relative, absolute = _TOLERANCE[dtype]
    with np.errstate(all="ignore"):
        rounded = expected.astype(dtype.numpy).astype(np.float64)  # overflows to inf as the result does
    np.testing.assert_allclose(
        actual.astype(np.float64), rounded, rtol=relative * slack, atol=absolute * slack
    )


class unchanged:  # noqa: N801
    """``with unchanged(tensor): ...`` checks that the block raises an ml error and writes nothing."""

    def __init__(self, *tensors: Tensor, error: type[Exception] = ml.MLError) -> None:
        self.tensors = tensors
        self.error = error

    def __enter__(self) -> None:
        self.before = [bits(tensor.to_numpy()) for tensor in self.tensors]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None and not isinstance(error, self.error):
            return False
        assert error is not None, f"nothing was raised; expected {self.error.__name__}"
        assert isinstance(error, ml.MLError)
        assert len(str(error)) > 10, "a refusal names the operation, the values and the limit"
        for tensor, before in zip(self.tensors, self.before, strict=True):
            np.testing.assert_array_equal(bits(tensor.to_numpy()), before, "a refusal wrote something")
        return True


def refused(
    *calls: Callable[[], object], error: type[Exception] = ml.MLError, keep: Sequence[Tensor] = ()
) -> None:
    """Each call raises that ml error and leaves the tensors of ``keep`` as they were."""
    for call in calls:
        with unchanged(*keep, error=error):
            call()
