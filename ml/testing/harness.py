"""Shared by the whole suite: fixtures, tables of cases, declared absences, exact comparison."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import pytest

import ml
from ml.backend_spec import Features
from ml.dtypes import STORAGE_DTYPES, DType
from ml.protocols import Backend, Context, Tensor
from ml.testing import plugin, quick
from ml.testing.samples import exact

NAMED = 10
"""The number of cases that the first line of a failure names; the lines below it and ``--json`` list all."""

_Test = TypeVar("_Test", bound=Callable[..., None])
_NAMES = {dtype.name: dtype for dtype in DType} | {"np": np, "ml": ml, "inf": math.inf, "nan": math.nan}


class CasesFailedError(AssertionError):
    """Cases of a table failed; the message lists all of them and their errors."""


def each(**choices: Iterable[Any]) -> Callable[[_Test], _Test]:
    """Run a test with every combination of these arguments, as one pytest test that names all failing cases.

    A case is named by its arguments: by the keys of a mapping, whose values the test receives, or by the
    values themselves. Cases whose operations (``op``, and those that an expression calls) or dtypes the
    backend declares absent are left out; if none remains, the test is skipped. ``--ml-quick`` and
    ``case_stride`` run only some of the cases.
    """

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        def run(self: BackendCase, **fixtures: Any) -> None:
            failed: dict[str, str] = {}
            first: BaseException | None = None
            ran, absent = 0, ""
            for name, chosen in self.chosen_cases(test.__name__, choices):
                if missing := self.declared_absent(wanted(chosen)):
                    absent = missing
                    continue
                try:
                    test(self, **fixtures, **chosen)
                    ran += 1
                except pytest.skip.Exception as skipped:
                    absent = str(skipped)
                except (Exception, pytest.fail.Exception) as error:
                    first = first or error
                    failed[name] = f"{type(error).__name__}: {error}".strip()
            if failed:
                self._node.user_properties += [("ml_case", name) for name in failed]
                reasons = {*failed.values()}
                if not ran and len(reasons) == 1 < len(failed):
                    raise CasesFailedError(f"all {len(failed)} cases failed: {reasons.pop()}") from first
                lines = [f"    {name}: {reason}" for name, reason in failed.items()]
                few = "; ".join([*failed][:NAMED]) + ("; ..." if len(failed) > NAMED else "")
                counts = f"{len(failed)} of {ran + len(failed)} cases failed: {few}"
                raise CasesFailedError("\n".join([counts, *lines])) from first
            if absent and not ran:
                pytest.skip(absent)

        signature = inspect.signature(test)
        kept = [one for one in signature.parameters.values() if one.name not in choices]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return cast(_Test, run)

    return decorate


def wanted(arguments: Mapping[str, Any]) -> list[str | DType]:
    """The operations and dtypes that a case needs."""
    mentioned: list[str | DType] = [value for key, value in arguments.items() if key == "op"]
    for value in arguments.values():
        mentioned += _mentioned(value)
    return mentioned


def _mentioned(value: Any) -> list[str | DType]:
    if isinstance(value, DType):
        return [value] if value in STORAGE_DTYPES else []
    if isinstance(value, str):
        words = re.findall(r"\b[A-Z]+\d+\b", value)
        return [
            *re.findall(r"\.(\w+)\(", value),
            *(DType[word] for word in words if word in DType.__members__),
        ]
    return [one for item in value for one in _mentioned(item)] if isinstance(value, tuple) else []


def evaluate(expression: str, **names: Any) -> Any:
    """The value of a table's expression, which may name dtypes (``F32``), np, ml, inf and nan."""
    return eval(expression, {**_NAMES, **names})


def needs(*operations: str | DType) -> Callable[[_Test], _Test]:
    """Skip a test if the backend declares one of these operations or dtypes absent."""

    def mark(test: _Test) -> _Test:
        test.ml_needs = operations  # type: ignore[attr-defined]
        return test

    return mark


class BackendCase:
    """Fixtures of the suite. The backend comes from ``backend_name`` (a plugin's name, with
    ``backend_options`` for ``ml.open_backend``), from the command line, or from an override of the fixture
    ``backend`` or ``open_backend``.
    """

    backend_name: ClassVar[str | None] = None
    backend_options: ClassVar[Mapping[str, Any]] = {}
    features: ClassVar[Features | None] = None
    """Replaces ``BackendSpec.features`` unless None."""
    case_stride: ClassVar[int] = 1
    """Every how many cases of a table one is run."""

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
        """A context of another backend; of another instance if NumPy itself is under test."""
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
        self._node: pytest.Item = request.node
        self._quick = bool(request.config.getoption("--ml-quick", default=False))
        if getattr(request.function, "ml_checks_absence", False):
            return
        callspec = getattr(request.node, "callspec", None)
        parameters = wanted(callspec.params if callspec else {})
        if missing := self.declared_absent([*getattr(request.function, "ml_needs", ()), *parameters]):
            pytest.skip(missing)

    def declared_absent(self, needed: Iterable[str | DType]) -> str:
        """The first of these that the backend declares absent, as the reason for a skip; "" if it has all."""
        for want in needed:
            offered = want in self._declared.dtypes if isinstance(want, DType) else self._declared.has(want)
            if not offered:
                return f"declared absent: {want}"
        return ""

    def chosen_cases(
        self, test: str, choices: Mapping[str, Iterable[Any]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The name and the arguments of each case to run."""
        named = [
            choice.items()
            if isinstance(choice, Mapping)
            else [(_case_name(value), value) for value in choice]
            for choice in choices.values()
        ]
        for number, combination in enumerate(itertools.product(*named)):
            name = "-".join(part for part, _ in combination).replace("(ctx, ", "(").replace("(ctx)", "()")
            if number % self.case_stride == 0 and not (self._quick and not quick.has_case(test, name)):
                yield name, dict(zip(choices, (value for _, value in combination), strict=True))

    def offered(self, dtypes: Iterable[DType]) -> list[DType]:
        """The ``dtypes`` that the backend has, in order."""
        return [dtype for dtype in dtypes if dtype in self._declared.dtypes]

    @classmethod
    def _name(cls, request: pytest.FixtureRequest) -> str | None:
        return cls.backend_name or plugin.backend_name(request.config)


def _case_name(value: Any) -> str:
    """A short name: a dtype's name, or the expression of a table's row."""
    if isinstance(value, DType):
        return value.name
    if isinstance(value, tuple):
        parts = [part for part in value[:3] if not (callable(part) or isinstance(part, np.ndarray))]
        return ", ".join(_case_name(part) for part in parts)
    return getattr(value, "__name__", str(value))


def bits(array: np.ndarray) -> np.ndarray:
    """The elements' bits as unsigned integers; all NaNs become one."""
    flat = np.ascontiguousarray(array)
    raw = flat.reshape(-1).view(np.dtype(f"u{flat.itemsize}")).reshape(array.shape).copy()
    if DType.from_numpy(array.dtype).is_float:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            raw[np.isnan(array.astype(np.float64))] = np.iinfo(raw.dtype).max
    return raw


def assert_same(tensor: Tensor, expected: Any, dtype: DType | None = None) -> None:
    """Compare dtype, shape and every bit (any NaN equals any NaN); ``expected`` is converted to ``dtype``."""
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
    # For the narrow floats, one unit in the last place: they are computed in F32 and rounded once.
    DType.F32: (4e-6, 2e-6),
    DType.F16: (1e-3, 1e-6),
    DType.BF16: (8e-3, 1e-6),
}


def assert_close(
    tensor: Tensor, expected: np.ndarray, dtype: DType, slack: float = 1.0, absolute: float = 0.0
) -> None:
    """Check that the result is within ``slack`` times the tolerance of ``dtype``, or within ``absolute``, of
    a float64 reference.
    """
    actual = tensor.to_numpy()
    assert tensor.dtype is dtype
    assert tuple(tensor.shape) == actual.shape == expected.shape
    relative, least = _TOLERANCE[dtype]
    with np.errstate(all="ignore"):
        rounded = expected.astype(dtype.numpy).astype(np.float64)  # overflows to inf, like the result
    np.testing.assert_allclose(
        actual.astype(np.float64), rounded, rtol=relative * slack, atol=max(least * slack, absolute)
    )


def assert_rounded_once(tensor: Tensor, expected: np.ndarray, dtype: DType, slack: float) -> None:
    """Check that the result is some value within ``slack`` times F32's tolerance of a float64 reference,
    rounded once to ``dtype``.
    """
    actual = tensor.to_numpy()
    assert tensor.dtype is dtype
    assert tuple(tensor.shape) == actual.shape == expected.shape
    relative, least = _TOLERANCE[DType.F32]
    with np.errstate(all="ignore"):
        off = np.where(np.isfinite(expected), (relative * np.abs(expected) + least) * slack, 0)
        low, high = (exact((expected + by).astype(dtype.numpy)) for by in (-off, off))
        result = exact(actual)
        nearest = np.where(low <= result, np.where(result <= high, result, high), low)
    np.testing.assert_array_equal(result, nearest)


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
    """Check that each call raises ``error`` and leaves the tensors of ``keep`` unchanged."""
    for call in calls:
        with unchanged(*keep, error=error):
            call()
