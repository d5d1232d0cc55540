"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from h2o_cpp.serve.bodies import BodyLimits
from h2o_cpp.serve.catalog import Catalog
from h2o_cpp.serve.openai_responses import ModelLimits
from h2o_cpp.serve.outputs import Output

# Name, description and the summed attribute of EngineStats.
_COUNTS = (
    ("h2o_prompt_tokens", "Prompt tokens read", "prompt_tokens"),
    ("h2o_cached_tokens", "Prompt tokens reused", "cached_tokens"),
    ("h2o_generated_tokens", "Tokens generated", "generated_tokens"),
    ("h2o_drafted_tokens", "Tokens proposed as drafts", "drafted_tokens"),
    ("h2o_accepted_tokens", "Drafts that were generated", "accepted_tokens"),
    ("h2o_evicted_tokens", "Tokens evicted, in the layer that keeps most", "evictions"),
    # llama.cpp's names:
    ("llamacpp:prompt_tokens", "Prompt tokens read", "prompt_tokens"),
    ("llamacpp:prompt_tokens_cached", "Prompt tokens reused", "cached_tokens"),
    ("llamacpp:tokens_predicted", "Tokens generated", "generated_tokens"),
)
_STATES = (
    ("h2o_requests_waiting", "Prompts in the queue", "n_waiting"),
    ("h2o_sequences_active", "Sequences in use", "n_active"),
    ("h2o_sequences", "Sequences", "n_sequences"),
    ("h2o_prefix_bytes", "Stored for prompts that begin alike", "prefix_bytes"),
    ("h2o_draft_bytes", "Allocated for the caches that propose drafts", "draft_bytes"),
    ("llamacpp:requests_processing", "Sequences in use", "n_active"),
    ("llamacpp:requests_deferred", "Prompts in the queue", "n_waiting"),
)
# The summed attribute of ModelLimits, of each sequence whose cache is allocated.
_MEMORY = (
    ("h2o_cache_bytes", "Allocated for the caches of all sequences", "cache_bytes"),
    ("h2o_full_cache_bytes", "What full caches would take", "full_cache_bytes"),
)


# vLLM's names of gauges and counters by model, which the Gateway API inference extension reads.
_GAUGES = (
    ("vllm:num_requests_running", "Requests with a sequence", "n_active"),
    ("vllm:num_requests_waiting", "Requests in the queue", "n_waiting"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens read", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated", "generated_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens reused", "cached_tokens"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens proposed as drafts", "drafted_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts that were generated", "accepted_tokens"),
)
_MODEL = "model_name"

BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)


class Times(NamedTuple):
    """How long the parts of a request took, in seconds; None: there was no such part."""

    queue: float
    first_token: float | None
    per_token: float | None
    whole: float

    @staticmethod
    def of(output: Output) -> Times:
        """The times of a finished output."""
        ended, n_tokens = output.ended, output.ended.completion_tokens
        first = output.first_at - output.submitted_at
        return Times(
            queue=max(first - ended.prompt_seconds, 0.0),
            first_token=first if n_tokens > 0 else None,
            per_token=ended.decode_seconds / (n_tokens - 1) if n_tokens > 1 else None,
            whole=output.ended_at - output.submitted_at,
        )


class RequestMetrics:
    """Histograms of finished outputs by model, with vLLM's names.

    Attributes: `responses`, a counter by status; 499: the client disconnected.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.responses = Counter(
            "h2o_responses", "Responses by HTTP status", ["status"], registry=registry
        )

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"vllm:{name}", what, [_MODEL], buckets=BUCKETS, registry=registry)

        self._histograms = (
            histogram("request_queue_time_seconds", "From a request to its sequence"),
            histogram("time_to_first_token_seconds", "From a request to its first token"),
            histogram("time_per_output_token_seconds", "From one token to the next, on average"),
            histogram("e2e_request_latency_seconds", "From a request to its end"),
        )
        self._of_models: dict[str, list[Histogram]] = {}
        self._ends = Counter(
            "vllm:request_success",
            "Finished requests",
            [_MODEL, "finished_reason"],
            registry=registry,
        )

    def observe(self, model: str, output: Output, times: Times) -> None:
        """Add a finished output."""
        if model not in self._of_models:
            self._of_models[model] = [one.labels(model) for one in self._histograms]
        for histogram, seconds in zip(self._of_models[model], times, strict=True):
            if seconds is not None:
                histogram.observe(seconds)
        self._ends.labels(model, output.finish_reason).inc()


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
        yield from self._of_models()
        yield GaugeMetricFamily(
            "h2o_body_bytes", "Bytes of the requests in progress", self._limits.n_bytes
        )

    def _of_models(self) -> Iterator[Metric]:
        loaded = [(one, one.engine.stats()) for one in self._catalog.loaded]
        for name, what, field in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=[_MODEL])
            for service, stats in loaded:
                gauge.add_metric([service.name], getattr(stats, field))
            yield gauge
        for name, what, field in _COUNTERS:
            counter = CounterMetricFamily(name, what, labels=[_MODEL])
            for service, stats in loaded:
                counter.add_metric([service.name], getattr(stats, field))
            yield counter
        # A block is a sequence's cache: each has all of its slots, however long it is.
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Slots of the cache in use, from 0 to 1", labels=[_MODEL]
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Slots of a sequence, and sequences",
            labels=[_MODEL, "block_size", "num_gpu_blocks"],
        )
        for service, stats in loaded:
            usage.add_metric([service.name], stats.n_active / stats.n_sequences)
            size, n_blocks = _n_slots(service.limits), stats.n_sequences
            config.add_metric([service.name, str(size), str(n_blocks)], 1)
        yield from (usage, config)


def _n_slots(limits: ModelLimits) -> int:
    """The tokens that the cache keeps of a sequence."""
    policy = limits.policy
    if policy.recent is None:
        return limits.n_ctx
    return min(policy.sinks + policy.heavy + policy.recent, limits.n_ctx)
