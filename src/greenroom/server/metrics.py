"""Prometheus metrics: what the server observes itself, and what engine and offload have counted at a scrape."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from greenroom.engine.dbo import DboChoice
from greenroom.experts.counters import OffloadStats
from greenroom.serving.requests import Engine, Finished

_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_FIRST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_WHOLE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(
        self,
        engine: Engine,
        offload: Callable[[], OffloadStats] | None = None,
        expert_bytes: Sequence[int] = (),
        dbo: Callable[[], Sequence[DboChoice]] | None = None,
    ) -> None:
        """
        Args:
            offload: what expert offload has counted; called from any thread.
            expert_bytes: of one expert, an entry a layer.
            dbo: which decode batches run as two halves; called from any thread.
        """
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "greenroom_http_requests",
            "HTTP requests to the API that ended, by path and outcome.",
            ["path", "outcome"],
            registry=self._registry,
        )
        self._first = Histogram(
            "greenroom_time_to_first_token_seconds",
            "From submission to an output's first token.",
            registry=self._registry,
            buckets=_FIRST_SECONDS,
        )
        self._next = Histogram(
            "greenroom_inter_token_seconds",
            "Between an output's tokens.",
            registry=self._registry,
            buckets=_TOKEN_SECONDS,
        )
        self._whole = Histogram(
            "greenroom_request_seconds",
            "From submission to an output's end.",
            ["reason"],
            registry=self._registry,
            buckets=_WHOLE_SECONDS,
        )
        self._registry.register(_EngineCollector(engine))
        if offload is not None:
            self._registry.register(_OffloadCollector(offload, expert_bytes))
        if dbo is not None:
            self._registry.register(_DboCollector(dbo))

    def request(self, path: str, outcome: str) -> None:
        """An HTTP request has ended."""
        self._requests.labels(path, outcome).inc()

    def first_token(self, seconds: float) -> None:
        """An output's first token has come."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """More tokens have come, ``seconds`` after the last."""
        for _ in range(count):
            self._next.observe(seconds / count)

    def finished(self, seconds: float, event: Finished) -> None:
        """An output has ended."""
        self._whole.labels(event.reason.value).observe(seconds)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of the engine before somebody scrapes

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("running_requests", "Outputs being made.", stats.running),
            ("waiting_requests", "Outputs that wait for room.", stats.waiting),
            ("kv_blocks", "Blocks of the KV cache on the device.", stats.kv_blocks),
            ("kv_blocks_used", "Of them, used by running outputs.", stats.kv_blocks_used),
        ):
            yield GaugeMetricFamily(f"greenroom_{name}", text, value)
        for name, text, count in (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("completion_tokens", "Tokens chosen.", stats.completion_tokens),
            ("prefix_cached_tokens", "Of prompts, found in the KV cache.", stats.cached_tokens),
            ("kv_loaded_tokens", "Of those, brought back from host memory.", stats.loaded_tokens),
            ("preemptions", "Outputs that gave up their blocks for a while.", stats.preemptions),
            ("steps", "Forward passes.", stats.steps),
            ("step_seconds", "Time of forward passes.", stats.step_seconds),
        ):
            yield CounterMetricFamily(f"greenroom_{name}", text, count)
        finished = CounterMetricFamily("greenroom_outputs", "Outputs that ended, by reason.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished


class _OffloadCollector(Collector):
    def __init__(self, offload: Callable[[], OffloadStats], expert_bytes: Sequence[int]) -> None:
        self._offload = offload
        self._expert_bytes = expert_bytes

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._offload()
        for name, text in (
            ("hits", "Experts used from a cache slot."),
            ("misses", "Experts used without having a slot."),
            ("copies", "Experts copied to the device, for one use or into a slot."),
            ("cpu", "Experts run by the CPU."),
            ("evictions", "Experts removed from a slot."),
            ("landed", "Experts streamed straight into a slot."),
        ):
            metric = CounterMetricFamily(f"greenroom_expert_{name}", text, labels=["layer"])
            for index, layer in enumerate(stats.layers):
                metric.add_metric([str(index)], getattr(layer, name))
            yield metric
        routes = dict.fromkeys(("cache", "streamed", "cpu", "admitted"), 0)
        for layer, size in zip(stats.layers, self._expert_bytes, strict=False):
            routes["cache"] += layer.hits * size
            routes["streamed"] += layer.streamed * size
            routes["cpu"] += layer.cpu * size
            routes["admitted"] += layer.admissions * size
        metric = CounterMetricFamily(
            "greenroom_expert_bytes",
            "Expert weights by route: read from a cache slot, streamed to the device for one use, read by the CPU, "
            "copied into a slot.",
            labels=["route"],
        )
        for route, count in routes.items():
            metric.add_metric([route], count)
        yield metric
        yield GaugeMetricFamily("greenroom_expert_slots", "Cache slots a layer.", stats.cache_expert_num)
        yield GaugeMetricFamily("greenroom_expert_host_bytes", "Experts in host memory.", stats.host_bytes)
        yield GaugeMetricFamily("greenroom_expert_device_bytes", "Cache slots and miss buffers.", stats.device_bytes)


class _DboCollector(Collector):
    def __init__(self, choices: Callable[[], Sequence[DboChoice]]) -> None:
        self._choices = choices

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        chosen = GaugeMetricFamily(
            "greenroom_dbo_halves", "1: decode batches of up to so many rows run as two halves.", labels=["rows"]
        )
        seconds = GaugeMetricFamily(
            "greenroom_dbo_step_seconds", "Of a decode step, as measured for that choice.", labels=["rows", "way"]
        )
        for choice in self._choices():
            if choice.halves is not None:
                chosen.add_metric([str(choice.rows)], choice.halves)
            for way, measured in (("whole", choice.whole_ms), ("halves", choice.halves_ms)):
                if measured is not None:
                    seconds.add_metric([str(choice.rows), way], measured / 1e3)
        yield chosen
        yield seconds
