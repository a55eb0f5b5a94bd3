"""ApiError, and how every failure becomes OpenAI's error object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from greenroom.errors import ConfigError, EngineError, GreenroomError, QueueFullError

RETRY_AFTER_S = "1"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """Answers a request with a status and OpenAI's error object.

    Attributes:
        param: the field that is wrong. code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code

    def to_dict(self) -> dict[str, Any]:
        """The body."""
        kind = "server_error" if self.status_code >= 500 else _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """Status 503: another server, or this one later, may answer."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": RETRY_AFTER_S})


def of_engine(error: GreenroomError) -> ApiError:
    """What the engine said, to a client."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": RETRY_AFTER_S})
    if isinstance(error, ConfigError):
        return bad_request(str(error))
    return ApiError(500, str(error), code="engine_error")


def of_submission(error: GreenroomError) -> ApiError:
    """The same for a request that was not taken: an engine that takes none is not this request's fault."""
    return unavailable(str(error)) if isinstance(error, EngineError) else of_engine(error)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """One sentence about the first thing that is wrong."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it is malformed")
        return bad_request(f"the body is not valid JSON: {reason}", code="invalid_json")
    message = first["msg"].removeprefix("Value error, ")
    if not where:
        missing = first["type"] in ("missing", "model_attributes_type", "dict_type", "model_type")
        return bad_request(
            "the body must be a JSON object, sent with Content-Type: application/json" if missing else message
        )
    return bad_request(f"{'.'.join(where)}: {message[:1].lower()}{message[1:]}", where[0])


def install(app: FastAPI) -> None:
    """Every error that leaves a route of ``app`` has OpenAI's shape."""

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return response(error if isinstance(error, ApiError) else _of_routing(request, error))

    async def validation(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response(of_validation(error.errors()))

    async def fault(_request: Request, error: Exception) -> JSONResponse:
        return response(ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error"))

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(Exception, fault)


def response(error: ApiError) -> JSONResponse:
    """An HTTP response."""
    return _AsciiResponse(error.to_dict(), error.status_code, headers=error.headers)


class _AsciiResponse(JSONResponse):
    """A message may quote anything that JSON can spell, half characters included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def _of_routing(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {where}; GET /openapi.json lists what there is", code="not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(
            405, f"{where} is not possible; use {allowed}", code="method_not_allowed", headers=error.headers
        )
    if error.status_code == 400:
        return bad_request("the body is not JSON that can be read", code="invalid_json")
    return ApiError(error.status_code, str(error.detail), headers=error.headers)
