"""Answer: one HTTP response made of outputs, which ends when its client goes or its time is over."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from greenroom.server.errors import ApiError
from greenroom.server.outputs import Outputs
from greenroom.server.writers import Writer
from greenroom.serving.requests import Finished, Piece

OUTCOME = "greenroom.outcome"
"""Where a request's scope says how it ended, if the status does not."""

_LAST_WORDS_S = 5
"""To send what came before the deadline, and the error that it has passed."""


@dataclass(frozen=True)
class Answer:
    """A request under way. limit_s: that it may take, of which ``deadline`` is the end on the event loop's clock."""

    outputs: Outputs
    writer: Writer
    include_usage: bool
    deadline: float
    limit_s: float

    async def whole(self, request: Request) -> Response:
        """
        Raises:
            ApiError: an output failed, or time is over.
        """
        making = asyncio.create_task(self._collect())
        done = await until_gone(making, request.receive)
        if not done:
            request.scope[OUTCOME] = "disconnected"
            return Response(status_code=499)
        return making.result()

    async def _collect(self) -> Response:
        try:
            async for index, event in self.outputs.events(self.deadline):
                self._write(index, event)
        except TimeoutError:
            raise too_slow(self.limit_s) from None
        finally:
            self.outputs.cancel()
        return JSONResponse(self.writer.whole(self.outputs.usage()))

    async def chunks(self, set_outcome: Callable[[str], None]) -> AsyncIterator[str]:
        """Data of server-sent events. An error is one of them: the status has been sent."""
        try:
            for chunk in self.writer.begin():
                yield _dump(chunk)
            async for index, event in self.outputs.events(self.deadline):
                for chunk in self._write(index, event):
                    yield _dump(chunk)
            if self.include_usage:
                yield _dump(self.writer.usage(self.outputs.usage()))
            yield "[DONE]"
        except (ApiError, TimeoutError) as error:
            shown = error if isinstance(error, ApiError) else too_slow(self.limit_s)
            set_outcome(outcome_of(shown.status_code))
            yield _dump(shown.to_dict())
        finally:
            self.outputs.cancel()

    def _write(self, index: int, event: Piece | Finished) -> list[dict[str, Any]]:
        return self.writer.piece(index, event) if isinstance(event, Piece) else self.writer.finished(index, event)


class EventStream(Response):
    """Server-sent events, until there are no more or the client goes."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Starlette."""

        def set_outcome(outcome: str) -> None:
            scope[OUTCOME] = outcome

        try:
            sending = asyncio.create_task(self._send(send, set_outcome))
            if await until_gone(sending, receive):
                sending.result()
            else:
                set_outcome("disconnected")
        except TimeoutError:
            set_outcome("timeout")  # of a client that does not read
        except OSError:
            set_outcome("disconnected")
        finally:
            self._answer.outputs.cancel()

    async def _send(self, send: Send, set_outcome: Callable[[str], None]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._answer.chunks(set_outcome):
            body = f"data: {data}\n\n".encode()
            async with asyncio.timeout_at(self._answer.deadline + _LAST_WORDS_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(task: "asyncio.Task[Any]", receive: Receive) -> bool:
    """Whether ``task`` ended before the client went; it has ended in either case."""
    gone = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        for waited in (gone, task):
            if not waited.done():
                waited.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def outcome_of(status: int) -> str:
    """A word for the metrics."""
    words = {200: "success", 429: "queue_full", 499: "disconnected", 503: "unavailable", 504: "timeout"}
    return words.get(status, "success" if status < 400 else "rejected" if status < 500 else "error")


def too_slow(limit_s: float) -> ApiError:
    """The request's time is over."""
    return ApiError(504, f"the request took more than {limit_s:g} s and was cancelled", code="timeout")


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
