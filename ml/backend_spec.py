"""A plugin's description of its backend: whether it can run, and what the conformance suite requires of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ml.dtypes import STORAGE_DTYPES, DType
from ml.errors import PluginError
from ml.records import (
    CALLABLE,
    INTEGER,
    NAME,
    OPTIONAL_TEXT,
    TEXT,
    TEXTS,
    TRUTH,
    check,
    instance,
    members,
)  # fmt: skip

if TYPE_CHECKING:
    from ml.protocols import Backend

__all__ = ["Availability", "BackendInfo", "BackendSpec", "Features"]


@dataclass(frozen=True, slots=True)
class Availability:
    """The result of a plugin's ``probe`` on this machine; ``reason`` says why the backend cannot run.

    Like the other plugin records, raises PluginError for a field of the wrong type.
    """

    ok: bool
    reason: str = ""
    version: str | None = None
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self, ok=TRUTH, reason=TEXT, version=OPTIONAL_TEXT, devices=TEXTS)


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a backend. Everything that is not declared absent is required.

    ``dtypes`` lists the dtypes that its tensors may have: at least F32, I32, I64 and BOOL. ``absent`` names
    methods of Tensor, or ``"compute"`` for all compute methods. Calling an absent method must raise
    NotSupportedError, which the conformance suite checks.
    """

    dtypes: frozenset[DType] = STORAGE_DTYPES
    absent: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        dtypes = members("a set of ml.DType", DType, frozenset)
        check(self, dtypes=dtypes, absent=members("a set of names", str, frozenset))
        missing, strange = REQUIRED_DTYPES - self.dtypes, self.dtypes - STORAGE_DTYPES
        if missing or strange:
            raise PluginError(
                f"Features: dtypes={_names(self.dtypes)}; "
                + (f"no tensor has {_names(strange)}" if strange else f"{_names(missing)} must be among them")
            )

    def has(self, operation: str) -> bool:
        """Whether the Tensor or Context method of this name is supported."""
        if operation in self.absent:
            return False
        return "compute" not in self.absent or operation not in COMPUTE_OPERATIONS


def _names(dtypes: Container[DType]) -> str:
    return ", ".join(dtype.name for dtype in DType if dtype in dtypes)


REQUIRED_DTYPES: Final = frozenset({DType.F32, DType.I32, DType.I64, DType.BOOL})
UNARY_OPERATIONS: Final = (
    "neg", "exp", "log", "sqrt", "sin", "cos", "tanh", "sigmoid", "silu", "relu", "abs", "round",
)  # fmt: skip
BINARY_OPERATIONS: Final = ("add", "sub", "mul", "div")
COMPUTE_OPERATIONS: Final = frozenset(
    (*UNARY_OPERATIONS, *BINARY_OPERATIONS, "scale", "gelu", "clamp", "matmul", "softmax", "sum", "mean",
     "max", "argmax", "argsort", "top_k", "rms_norm", "compare", "where")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A plugin's record. Making one imports no framework; ``probe`` and ``open`` may.

    ``requires`` names the packages; ``install_hint`` is the command that installs them. ``features`` is what
    the conformance suite tests. ``launcher(size)`` is the command that starts ``size`` ranks on this machine,
    each of which runs the command appended to it; None if the backend cannot join processes.
    """

    name: str
    priority: int
    requires: tuple[str, ...]
    install_hint: str
    probe: Callable[[], Availability]
    open: Callable[..., Backend]
    features: Features = field(default_factory=Features)
    launcher: Callable[[int], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        check(self, name=NAME, priority=INTEGER, requires=TEXTS, install_hint=TEXT)
        check(self, probe=CALLABLE, open=CALLABLE, features=instance("an ml.Features", Features))
        if self.launcher is not None:
            check(self, launcher=CALLABLE)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One row of ``available_backends()``: a discovered backend, whether or not it can run."""

    name: str
    available: bool
    reason: str
    version: str | None
    devices: tuple[str, ...]
    priority: int
    install_hint: str
