"""The Group contract: argument checks and errors around a framework's communication between processes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ml.base.checks import foreign
from ml.dtypes import DType
from ml.errors import ClosedError, DTypeError, GroupError, ShapeError
from ml.strided import normalize_axis

if TYPE_CHECKING:
    from ml.base.backend import BaseBackend
    from ml.base.tensor import BaseTensor

SUMMED = (DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64)


class BaseGroup(ABC):
    """All checks; a backend implements the methods with an underscore.

    These receive non-empty tensors of the backend, and call ``broken`` for errors of the framework.
    """

    def __init__(self, backend: BaseBackend, rank: int, size: int, timeout: float) -> None:
        self._backend: weakref.ref[BaseBackend] = weakref.ref(backend)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._closed = False
        self._failure: str | None = None
        self._late = False

    # To be implemented by a backend.

    @abstractmethod
    def _all_reduce(self, ctx: Any, tensor: Any) -> BaseTensor:
        """The sum over all ranks of F32, F16, BF16 (in F32, rounded once), I32 or I64: new storage."""

    @abstractmethod
    def _all_gather(self, ctx: Any, tensor: Any, axis: int) -> BaseTensor:
        """All ranks' tensors in the order of ranks along ``axis``, counted from the front: new storage."""

    @abstractmethod
    def _barrier(self) -> None:
        """Return when every rank has arrived."""

    def _close(self) -> None:
        """Release the framework's group."""
        return

    def _abandon(self) -> None:
        """Make the operations that other ranks are waiting for fail immediately; ``_close`` may follow."""
        self._close()

    # The contract.

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def timeout(self) -> float:
        return self._timeout

    @property
    def closed(self) -> bool:
        return self._closed

    def all_reduce(self, ctx: Any, tensor: Any) -> BaseTensor:
        self._check("all_reduce", ctx, tensor)
        if tensor.dtype not in SUMMED:
            known = ", ".join(dtype.name for dtype in SUMMED)
            raise DTypeError(f"all_reduce: a tensor of {tensor.dtype!r}; sums support {known}; cast it")
        if 0 in tensor.shape:
            return self._copy(ctx, tensor)
        return self._all_reduce(ctx, tensor)

    def all_gather(self, ctx: Any, tensor: Any, axis: int = 0) -> BaseTensor:
        self._check("all_gather", ctx, tensor)
        if not tensor.shape:
            raise ShapeError("all_gather: a scalar has no axis to gather along; reshape it to (1,)")
        place = normalize_axis("all_gather", axis, len(tensor.shape))
        if 0 in tensor.shape:
            shape = [size * self._size if k == place else size for k, size in enumerate(tensor.shape)]
            made: BaseTensor = ctx.zeros(shape, tensor.dtype)
            return made
        return self._all_gather(ctx, tensor, place)

    def barrier(self) -> None:
        self._check_open("barrier")
        self._barrier()

    def abandon(self, op: str, error: BaseException) -> None:
        if self._size > 1 and self._failure is None and not self._closed:
            reason = str(error).strip().split("\n", 1)[0][:200]
            self._failure = (
                f"{op}: rank {self._rank} of {self._size} failed while the others rely on it; start all "
                f"ranks again ({type(error).__name__}: {reason})"
            )
            self._abandon()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()

    # For backends.

    def broken(self, op: str, reason: object, late: bool) -> GroupError:
        """The error for a wait that timed out (``late``) or failed; the group cannot be used afterwards."""
        if self._failure is None:
            self._failure, self._late = self._explain(op, str(reason).strip(), late), late
        return self._error(self._failure)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _explain(self, op: str, reason: str, late: bool) -> str:
        who = f"{op}: rank {self._rank} of {self._size}"
        if late:
            return (
                f"{who} has waited {self._timeout:g} s for the other ranks, the limit set by timeout=: one "
                "is stopped, stuck or too slow; start all ranks again, with a longer timeout if they only "
                "need more time"
            )
        cause = reason.split("\n", 1)[0][:200] or "no reason given"
        return (
            f"{who} lost another rank, before its timeout of {self._timeout:g} s: that one has ended; look "
            f"for its own error and start all ranks again ({cause})"
        )

    def _check(self, op: str, ctx: Any, tensor: Any) -> None:
        self._check_open(op)
        backend = self._backend()
        if backend is None or ctx.backend is not backend:
            raise ClosedError(f"{op}: the context and the group belong to different backends")
        ctx.check(op)
        if getattr(tensor, "backend", None) is not backend:
            raise foreign(op, tensor, backend)

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise ClosedError(f"{op}: the group is closed; join again with backend.distributed()")
        if self._failure is not None:
            raise self._error(self._failure)

    def _error(self, failure: str) -> GroupError:
        error = GroupError(failure)
        error.late = self._late
        return error

    @staticmethod
    def _copy(ctx: Any, tensor: Any) -> BaseTensor:
        made: BaseTensor = tensor.cast(ctx, tensor.dtype)
        return made

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else " (broken)" if self._failure else ""
        return f"<rank {self._rank} of {self._size}{state}>"


class SoloGroup(BaseGroup):
    """A single rank, used without a launcher. No framework is involved."""

    def __init__(self, backend: BaseBackend, timeout: float) -> None:
        super().__init__(backend, 0, 1, timeout)

    def _all_reduce(self, ctx: Any, tensor: Any) -> BaseTensor:
        return self._copy(ctx, tensor)

    def _all_gather(self, ctx: Any, tensor: Any, axis: int) -> BaseTensor:
        return self._copy(ctx, tensor)

    def _barrier(self) -> None:
        pass
