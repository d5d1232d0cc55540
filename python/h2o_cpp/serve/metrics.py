"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_cpp.serve.bodies import BodyLimits
from h2o_cpp.serve.catalog import Catalog

# Name, description and the summed attribute of EngineStats.
_COUNTS = (
    ("h2o_prompt_tokens", "Prompt tokens read", "prompt_tokens"),
    ("h2o_cached_tokens", "Prompt tokens reused", "cached_tokens"),
    ("h2o_generated_tokens", "Tokens generated", "generated_tokens"),
    ("h2o_evicted_tokens", "Tokens evicted, in the layer that keeps most", "evictions"),
)
_STATES = (
    ("h2o_requests_waiting", "Prompts in the queue", "n_waiting"),
    ("h2o_sequences_active", "Sequences in use", "n_active"),
    ("h2o_sequences", "Sequences", "n_sequences"),
    ("h2o_prefix_bytes", "Stored for prompts that begin alike", "prefix_bytes"),
)
# The summed attribute of ModelLimits, of each sequence whose cache is allocated.
_MEMORY = (
    ("h2o_cache_bytes", "Allocated for the caches of all sequences", "cache_bytes"),
    ("h2o_full_cache_bytes", "What full caches would take", "full_cache_bytes"),
)


class EngineCollector(Collector):
    """Statistics of all models, collected at each scrape."""

    def __init__(self, catalog: Catalog, limits: BodyLimits) -> None:
        self._catalog = catalog
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        """Counters include models that were unloaded."""
        services = self._catalog.loaded
        stats = [service.engine.stats() for service in services]
        for name, what, field in _COUNTS:
            total = self._catalog.unloaded[field] + sum(getattr(one, field) for one in stats)
            yield CounterMetricFamily(name, what, total)
        for name, what, field in _STATES:
            yield GaugeMetricFamily(name, what, sum(getattr(one, field) for one in stats))
        for name, what, field in _MEMORY:
            each = [getattr(service.limits, field) for service in services]
            n_bytes = sum(one.n_allocated * size for one, size in zip(stats, each, strict=True))
            yield GaugeMetricFamily(name, what, n_bytes)
        yield GaugeMetricFamily(
            "h2o_body_bytes", "Bytes of the requests in progress", self._limits.n_bytes
        )


class CountResponses:
    """ASGI middleware that counts responses by status; 499: the client disconnected."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._counter = Counter(
            "h2o_responses", "Responses by HTTP status", ["status"], registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._counter.labels(str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:  # an outer handler answers it
            if not begun:
                self._counter.labels("500").inc()
            raise
