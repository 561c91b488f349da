"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ApiError"]


class ApiError(Exception):
    """An error response: ``status``, ``headers`` and the content of the body; ``param`` is the invalid
    field.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {429: "rate_limit_error", 404: "invalid_request_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
