"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_cpp.serve.bodies import BodyLimits
from h2o_cpp.serve.service import Service


class EngineCollector(Collector):
    """The counts of an Engine, read when they are asked for."""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        """Counters begin with the server; gauges are of now."""
        service = self._service
        stats = service.engine.stats()
        for name, what, count in (
            ("h2o_prompt_tokens", "Prompt tokens read", stats.prompt_tokens),
            ("h2o_cached_tokens", "Prompt tokens not read again", stats.cached_tokens),
            ("h2o_generated_tokens", "Tokens generated", stats.generated_tokens),
            ("h2o_evicted_tokens", "Tokens evicted, in the layer that keeps most", stats.evictions),
        ):
            yield CounterMetricFamily(name, what, count)
        for name, what, value in (
            ("h2o_requests_waiting", "Texts that wait for a sequence", stats.n_waiting),
            ("h2o_sequences_active", "Texts that have one", stats.n_active),
            ("h2o_sequences", "Sequences", stats.n_sequences),
            ("h2o_cache_bytes", "Allocated for the caches of all sequences", service.cache_bytes),
            ("h2o_full_cache_bytes", "What full caches would take", service.full_cache_bytes),
            ("h2o_prefix_bytes", "Of the prefix cache", stats.prefix_bytes),
            ("h2o_body_bytes", "Sent by requests in progress", self._limits.n_bytes),
        ):
            yield GaugeMetricFamily(name, what, value)


class CountResponses:
    """ASGI middleware that counts responses by status; 499: the client has left."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._counter = Counter(
            "h2o_responses", "Responses by HTTP status", ["status"], registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._counter.labels(str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:  # which is answered further out
            if not begun:
                self._counter.labels("500").inc()
            raise
