"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_cpp.serve.bodies import BodyLimits
from h2o_cpp.serve.catalog import Catalog


class EngineCollector(Collector):
    """The counts of all Engines that are loaded, read when they are asked for."""

    def __init__(self, catalog: Catalog, limits: BodyLimits) -> None:
        self._catalog = catalog
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        """Counters begin when a model is loaded; gauges are of now."""
        services = self._catalog.loaded
        stats = [service.engine.stats() for service in services]
        for name, what, count in (
            ("h2o_prompt_tokens", "Prompt tokens read", [one.prompt_tokens for one in stats]),
            (
                "h2o_cached_tokens",
                "Prompt tokens not read again",
                [one.cached_tokens for one in stats],
            ),
            ("h2o_generated_tokens", "Tokens generated", [one.generated_tokens for one in stats]),
            (
                "h2o_evicted_tokens",
                "Tokens evicted, in the layer that keeps most",
                [one.evictions for one in stats],
            ),
        ):
            yield CounterMetricFamily(name, what, sum(count))
        for name, what, value in (
            (
                "h2o_requests_waiting",
                "Texts that wait for a sequence",
                [one.n_waiting for one in stats],
            ),
            ("h2o_sequences_active", "Texts that have one", [one.n_active for one in stats]),
            ("h2o_sequences", "Sequences", [one.n_sequences for one in stats]),
            (
                "h2o_cache_bytes",
                "Allocated for the caches of all sequences",
                [s.cache_bytes for s in services],
            ),
            (
                "h2o_full_cache_bytes",
                "What full caches would take",
                [s.full_cache_bytes for s in services],
            ),
            ("h2o_prefix_bytes", "Of the prefix caches", [one.prefix_bytes for one in stats]),
            ("h2o_body_bytes", "Sent by requests in progress", [self._limits.n_bytes]),
        ):
            yield GaugeMetricFamily(name, what, sum(value))


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
