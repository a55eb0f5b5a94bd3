"""A server on a free port of this machine, for as long as a test needs it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2 as httpx
import uvicorn

from greenroom.server.app import ServerConfig, Service, create_app
from greenroom.server.metrics import ServerMetrics
from greenroom.server.run import listen

MODEL = "test"
WAIT_S = 30


@dataclass
class Running:
    """A server that listens."""

    url: str
    engine: object
    service: Service
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, path: str, body: object = None, **knobs) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **{"headers": self.headers, "timeout": 60} | knobs)

    def get(self, path: str, **knobs) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **{"headers": self.headers} | knobs)

    def metrics(self) -> dict[tuple[str, tuple], float]:
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics").text)
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


@contextmanager
def running(engine, tokenizer, *, offload=None, expert_bytes=(), **knobs) -> Iterator[Running]:
    config = ServerConfig(MODEL, **knobs)
    service = Service(engine, tokenizer, config, ServerMetrics(engine, offload, expert_bytes))
    with listen("127.0.0.1", 0) as listener:
        settings = uvicorn.Config(create_app(service), log_level="error", timeout_graceful_shutdown=2)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        try:
            until(lambda: server.started)
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, service, headers)
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
