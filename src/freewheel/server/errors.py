"""Errors as OpenAI's clients know them."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: for the user.
        param: the field that is wrong.
        headers: to send along.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


async def answer_unfit(request: Request, error: Exception) -> JSONResponse:
    """Of a body that is no JSON, or has fields of wrong names or types: the first is named."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}").response()
    # Types of a union follow the field, and stand in brackets or begin with a capital: they tell a user nothing.
    where = [part for part in first["loc"][1:] if isinstance(part, int) or (part.isidentifier() and part.islower())]
    param = ".".join(map(str, where)) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", param).response()
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing", param).response()
    reason = first["msg"][0].lower() + first["msg"][1:]
    return ApiError(400, f"{param or 'the body'}: {reason}", param).response()
