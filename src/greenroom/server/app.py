"""create_app: the routes."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from greenroom import __version__
from greenroom.server import errors
from greenroom.server.answer import Answer, EventStream, too_slow
from greenroom.server.errors import ApiError, unavailable
from greenroom.server.metrics import ServerMetrics
from greenroom.server.middleware import Gate
from greenroom.server.outputs import Outputs
from greenroom.server.prepare import Preparation, Prepared
from greenroom.server.schema import ChatRequest, CompletionRequest
from greenroom.server.writers import ChatWriter, CompletionWriter, Writer
from greenroom.serving.requests import Engine, SamplingParams


@dataclass(frozen=True)
class ServerConfig:
    """
    Attributes:
        model: the name that clients give.
        api_key: that they have to send; None for no key.
        max_body: bytes of a request's body.
        request_timeout: seconds that a request may take.
        sampling: how tokens are chosen where a request says nothing; the rest of it is not looked at.
    """

    model: str
    api_key: str | None = None
    max_body: int = 4 << 20
    request_timeout: float = 600.0
    sampling: SamplingParams = field(default_factory=SamplingParams)


class Service:
    """What the routes share. The event loop's own, but for ``preparation``, which one worker uses."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, config: ServerConfig, metrics: ServerMetrics
    ) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.draining = False
        self.failed = False  # the engine takes no more requests
        self.started = int(time.time())
        self._preparation = Preparation(tokenizer, engine.vocabulary, config.sampling)
        # One: tokenizers are not made for several threads at once, and long prompts must not take all cores.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="greenroom-prepare")

    def close(self) -> None:
        """Ends the worker."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """One chat completion."""

        def writer(prepared: Prepared) -> Writer:
            return ChatWriter(
                self.config.model,
                len(prepared.jobs),
                self._preparation.token_text,
                stream=bool(body.stream),
                include_usage=body.include_usage,
                tools=bool(body.usable_tools),
            )

        return await self._answer(body, request, lambda: self._preparation.chat(body), writer)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """One completion."""

        def writer(prepared: Prepared) -> Writer:
            echo = [prepared.echo[job.prompt] if prepared.echo else "" for job in prepared.jobs]
            return CompletionWriter(
                self.config.model,
                echo,
                self._preparation.token_text,
                include_usage=body.include_usage,
                logprobs=body.logprobs is not None,
            )

        return await self._answer(body, request, lambda: self._preparation.completion(body), writer)

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        request: Request,
        prepare: Callable[[], Prepared],
        writer: Callable[[Prepared], Writer],
    ) -> Response:
        if self.draining:
            raise unavailable("the server is shutting down")
        self.check_model(body.model)
        loop, limit = asyncio.get_running_loop(), self.config.request_timeout
        deadline = loop.time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                prepared = await loop.run_in_executor(self._worker, prepare)
        except TimeoutError:
            raise too_slow(limit) from None
        try:
            outputs = Outputs(self.engine, self.metrics, prepared.jobs)
        except ApiError as error:
            self.failed |= error.status_code == 503
            raise
        answer = Answer(outputs, writer(prepared), body.include_usage, deadline, limit)
        return EventStream(answer) if body.stream else await answer.whole(request)

    def check_model(self, name: str) -> None:
        """
        Raises:
            ApiError: another model is served.
        """
        if name != self.config.model:
            raise ApiError(
                404,
                f"there is no model '{name[:128]}' here; this server has '{self.config.model}'",
                param="model",
                code="model_not_found",
            )

    def describe_model(self) -> dict[str, Any]:
        """OpenAI's model object."""
        return {
            "id": self.config.model,
            "object": "model",
            "created": self.started,
            "owned_by": "greenroom",
            "max_model_len": self.engine.context_length,
        }


def create_app(service: Service) -> FastAPI:
    """The application that serves ``service``."""
    app = FastAPI(title="greenroom", version=__version__, redoc_url=None)
    app.add_middleware(Gate, metrics=service.metrics, api_key=service.config.api_key, max_body=service.config.max_body)
    errors.install(app)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.completion(body, request)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.describe_model()]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(service.describe_model())

    @app.get("/health", responses=_ERRORS)
    async def health() -> JSONResponse:
        if service.draining:
            raise unavailable("the server is shutting down")
        if service.failed:
            raise unavailable("the engine has failed; start the server anew")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {
                        "error": {
                            "type": "object",
                            "required": ["message", "type", "param", "code"],
                            "properties": {
                                "message": {"type": "string"},
                                "type": {"type": "string"},
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "null"]},
                            },
                        }
                    },
                }
            }
        },
    }
    for status, text in {
        400: "The request is wrong, or asks for what is not supported",
        401: "The API key is missing or wrong",
        404: "There is no such model",
        413: "The body is too large",
        429: "Too many requests wait",
        500: "The server failed",
        503: "The server is shutting down",
        504: "The request took too long",
    }.items()
}
