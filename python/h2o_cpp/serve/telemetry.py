"""OpenTelemetry: traces and metrics, sent by OTLP over HTTP with the extra `otel`.

The standard variables configure it, such as OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and
OTEL_TRACES_SAMPLER. Without an endpoint, nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope

from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.serve.metrics import BUCKETS, Times
from h2o_cpp.serve.outputs import Output

_ENDPOINTS = [f"OTEL_EXPORTER_OTLP{signal}ENDPOINT" for signal in ("_", "_TRACES_", "_METRICS_")]

_log = visible_log("uvicorn.error")  # the server's log


class Telemetry:
    """Sends a span for each POST request, and the histograms of gen_ai.server."""

    def __init__(self) -> None:
        """Raises ImportError without the extra."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "h2o-cpp")
        resource = Resource.create({"service.name": name})
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._spans = TracerProvider(resource=resource)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._spans.get_tracer("h2o_cpp")
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._metrics = MeterProvider([reader], resource=resource)
        meter = self._metrics.get_meter("h2o_cpp")
        self._duration, self._first_token, self._per_token = (
            meter.create_histogram(
                f"gen_ai.server.{name}",
                "s",
                what,
                explicit_bucket_boundaries_advisory=[*BUCKETS],
            )
            for name, what in (
                ("request.duration", "From a request to its end"),
                ("time_to_first_token", "From a request to its first token"),
                ("time_per_output_token", "From one token to the next, on average"),
            )
        )

    @contextmanager
    def span(self, scope: Scope, id: str) -> Iterator[None]:
        """The span of a request, in the client's trace if it has a traceparent."""
        carrier = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        path = scope["path"]
        with self._tracer.start_as_current_span(
            f"{scope['method']} {path}",
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            {"http.request.method": scope["method"], "url.path": path, "http.request.id": id},
        ):
            yield

    def answered(self, status: int) -> None:
        """Note the status of the current request's response."""
        self._trace.get_current_span().set_attribute("http.response.status_code", status)

    def observe(self, model: str, path: str, output: Output, times: Times) -> None:
        """Note a finished output of the current request."""
        kind = _operation(path)
        about: dict[str, Any] = {
            "gen_ai.operation.name": kind,
            "gen_ai.provider.name": "h2o_cpp",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        self._duration.record(times.whole, about)
        if times.first_token is not None:
            self._first_token.record(times.first_token, about)
        if times.per_token is not None:
            self._per_token.record(times.per_token, about)
        span = self._trace.get_current_span()
        span.update_name(f"{kind} {model}")
        span.set_attributes(
            {
                **about,
                "gen_ai.usage.input_tokens": len(output.prompt),
                "gen_ai.usage.output_tokens": output.ended.completion_tokens,
                "gen_ai.response.finish_reasons": [str(output.finish_reason)],
                "gen_ai.server.queue_seconds": times.queue,
            }
        )

    def close(self) -> None:
        """Send what was not sent yet."""
        self._spans.shutdown()
        self._metrics.shutdown()


def make_telemetry() -> Telemetry | None:
    """The telemetry that the environment asks for; None: none."""
    asked = any(os.environ.get(name) for name in _ENDPOINTS)
    if not asked or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Telemetry()
    except ImportError as error:
        _log.warning("%s; no telemetry is sent: pip install 'h2o-cpp[otel]'", error)
        return None


def _operation(path: str) -> str:
    """The operation's name in OpenTelemetry's conventions."""
    if "embed" in path:
        return "embeddings"
    chats = ("/chat", "/chat/completions", "/messages", "/responses")
    return "chat" if path.endswith(chats) else "text_completion"
