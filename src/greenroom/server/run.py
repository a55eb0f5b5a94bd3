"""run_server: uvicorn with an end that lets running requests finish."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from greenroom.errors import ConfigError
from greenroom.server.app import Service

_FLUSH_S = 5
"""For what is left to send once all outputs have ended."""


def run_server(
    app: FastAPI,
    service: Service,
    listener: socket.socket,
    *,
    drain_timeout: float,
    on_ready: Callable[[str], None],
    on_drain: Callable[[int], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then takes no more requests and waits for those there are; closes the engine.

    A second signal ends the process at once, as if nobody handled it.

    Args:
        listener: from ``listen``; closed in the end.
        drain_timeout: seconds; what still runs then is cancelled.
        on_ready: gets the address. on_drain: gets the number of requests under way.
    """
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_FLUSH_S)
    server = _Server(config, lambda: on_ready(f"http://{shown}:{port}"))
    with listener:
        try:
            asyncio.run(_serve(server, service, listener, drain_timeout, on_drain))
        finally:
            service.engine.close()
            service.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket for ``run_server``. Made before a model is loaded, so that a taken port shows at once.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from error


async def _serve(
    server: "_Server",
    service: Service,
    listener: socket.socket,
    drain_timeout: float,
    on_drain: Callable[[int], None],
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def signalled(number: int) -> None:
        if stop.is_set():
            # Whoever asks twice does not want to wait for threads.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        service.draining = True  # new requests get 503, so the socket stays open
        stats = service.engine.stats()
        on_drain(stats.running + stats.waiting)
        await asyncio.to_thread(service.engine.drain, drain_timeout)
        await asyncio.to_thread(service.engine.close)  # cancels what is left
        server.should_exit = True
    stopping.cancel()
    await serving


class _Server(uvicorn.Server):
    """Signals are ours, and somebody is told when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._on_ready()
