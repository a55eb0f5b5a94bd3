"""What stands before all routes: the key, the size of bodies, draining, and counting how requests end."""

import asyncio
import contextlib
import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from greenroom.server import errors
from greenroom.server.answer import OUTCOME, outcome_of
from greenroom.server.errors import ApiError
from greenroom.server.metrics import ServerMetrics

_OPEN_PATHS = frozenset({"/health"})
_COUNTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models"})


_DISCARD_S = 2.0
"""For the rest of a body that is refused."""


class Gate:
    """An ASGI application before another."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics, api_key: str | None, max_body: int) -> None:
        self._app = app
        self._metrics = metrics
        self._key = None if api_key is None else _digest(api_key.encode())
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check(scope)
            except ApiError as error:
                # Whoever waits for "100 Continue" has sent nothing yet; asking for it is what reading would do.
                if all(name != b"expect" for name, _ in scope["headers"]):
                    await _discard(receive)
                await errors.response(error)(scope, receive, noting)
            else:
                await self._app(scope, self._limited(receive), noting)
        finally:
            if scope["path"] in _COUNTED:
                self._metrics.request(scope["path"], scope.get(OUTCOME) or outcome_of(status))

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in _OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            # Digests have one length, so that the comparison tells nothing about the key's.
            if scheme.lower() != b"bearer" or not hmac.compare_digest(_digest(given.strip()), self._key):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """Bodies without a length are counted as they come."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                if message.get("more_body", False):
                    await _discard(receive)
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_body} bytes; send less",
            code="body_too_large",
            headers={"Connection": "close"},
        )


async def _discard(receive: Receive) -> None:
    """Reads on for a while: a connection closed on unread bytes is reset, and the reset may overtake the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
