"""Metrics by the names that operators know, ids of requests, the log, and OpenTelemetry."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.needs import packages
from support.serving import FOREVER, Server, serving, wait_until

pytest.importorskip("prometheus_client", reason="prometheus_client is missing (extra: serve)")

from prometheus_client.parser import text_string_to_metric_families

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
SHORT: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 5, "seed": 1, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"prompt": [5, 6], **FOREVER}
HISTOGRAMS = (
    "vllm:request_queue_time_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
)


@contextmanager
def small_server(**options: Any) -> Iterator[Server]:
    """A server with two sequences of 12 slots."""
    with (
        Generator(LLAMA, hh=12, n_batch=8, threads=1, max_sequences=2) as generator,
        serving(generator, max_tokens=10**9, **options) as server,
    ):
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    with small_server() as server:
        yield server


def samples(server: Server) -> dict[str, float]:
    """The samples of the model "tiny", by name."""
    text = server.ask("/metrics").body.decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model_name") == "tiny" and "le" not in sample.labels
    }


class TestMetrics:
    def test_gauges_of_the_gateway_protocol(self, server: Server) -> None:
        """Each sequence uses a constant share of the slots."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")

        def gauges() -> tuple[float, ...]:
            found = samples(server)
            return tuple(found[name] for name in (*names, "vllm:kv_cache_usage_perc"))

        assert gauges() == (0, 0, 0)
        connections = [server.begin(ENDLESS)]
        wait_until(lambda: gauges() == (1, 0, 0.5))
        connections += [server.begin(ENDLESS) for _ in range(3)]
        wait_until(lambda: gauges() == (2, 2, 1))
        for connection in connections:
            connection.close()
        wait_until(lambda: gauges() == (0, 0, 0))

    def test_blocks(self, server: Server) -> None:
        [config] = re.findall(r"vllm:cache_config_info\{(.*)\} 1.0", self.text(server))
        assert 'block_size="12"' in config
        assert 'num_gpu_blocks="2"' in config

    def text(self, server: Server) -> str:
        return server.ask("/metrics").body.decode()

    def test_histograms(self, server: Server) -> None:
        for stream in (False, True):
            assert server.ask("/v1/completions", {**SHORT, "n": 2, "stream": stream}).status == 200
        wait_until(lambda: samples(server).get("vllm:request_success_total") == 4)
        found = samples(server)
        assert [found[f"{name}_count"] for name in HISTOGRAMS] == [4] * 4
        queue, first, token, whole = (found[f"{name}_sum"] for name in HISTOGRAMS)
        assert 0 <= queue <= first <= whole
        assert 0 < token < whole
        assert found["vllm:prompt_tokens_total"] == 12
        assert found["vllm:generation_tokens_total"] == 20

    def test_waiting_is_measured(self, server: Server) -> None:
        """A request waits until the two sequences are free."""
        connections = [server.begin(ENDLESS) for _ in range(2)]
        wait_until(lambda: server.engine.stats().n_active == 2)
        waiting = server.begin(SHORT)
        wait_until(lambda: server.engine.stats().n_waiting == 1)
        threading.Event().wait(0.3)
        for connection in connections:
            connection.close()
        assert waiting.getresponse().status == 200
        waiting.close()
        wait_until(lambda: samples(server).get("vllm:request_success_total") == 1)
        found = samples(server)
        assert found["vllm:request_queue_time_seconds_sum"] >= 0.25
        assert found["vllm:time_to_first_token_seconds_sum"] >= 0.25


class TestRequestIds:
    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            ("/v1/completions", SHORT, 200),
            ("/v1/completions", {**SHORT, "stream": True}, 200),
            ("/v1/completions", {"x": 1}, 400),
            ("/v1/nothing", None, 404),
            ("/health", None, 200),
            ("/v1/completions", b"x" * 9 * 2**20, 413),
        ],
    )
    def test_every_response_has_one(
        self, server: Server, path: str, body: Any, status: int
    ) -> None:
        answers = [server.ask(path, body) for _ in range(2)]
        assert [answer.status for answer in answers] == [status] * 2
        ids = {answer.headers["X-Request-Id"] for answer in answers}
        assert len(ids) == 2
        assert all(re.fullmatch("req_[0-9a-f]{32}", id) for id in ids)

    def test_its_name_in_anthropics_api(self, server: Server) -> None:
        answer = server.ask("/v1/messages/count_tokens", {"messages": []})
        assert answer.headers["Request-Id"].startswith("req_")

    def test_unforeseen_errors_have_one(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("h2o_cpp.serve.service.Service.submit", None)
        answer = server.ask("/v1/completions", SHORT)
        assert answer.status == 500
        assert answer.headers["X-Request-Id"].startswith("req_")
        assert server.metric('h2o_responses_total{status="500"}') == 1

    @pytest.mark.parametrize(
        ("given", "kept"),
        [("a-1/b:2", True), ("x" * 129, False), ("a b", False), ('a"b', False)],
    )
    def test_the_clients_own(self, server: Server, given: str, kept: bool) -> None:
        answer = server.ask("/health", **{"X-Request-Id": given})
        assert (answer.headers["X-Request-Id"] == given) is kept


@pytest.mark.parametrize("kind", ["text", "json"])
def test_log_lines_have_the_id(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    with small_server(listen={"log_format": kind}) as server:
        server.ask("/v1/completions", SHORT, **{"X-Request-Id": "mine"})
    out, err = capsys.readouterr()
    if kind == "text":
        assert '"POST /v1/completions HTTP/1.1" 200 OK [mine]' in out
        assert "Uvicorn running on" in err
        return
    [line] = map(json.loads, out.splitlines())
    assert (line["request_id"], line["path"], line["status"]) == ("mine", "/v1/completions", 200)
    assert {"time", "level", "logger", "message"} <= line.keys()
    assert all(json.loads(other)["level"] == "info" for other in err.splitlines())


@pytest.fixture
def collector() -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    """The address of a collector of OpenTelemetry, and what it got, by path."""
    got: dict[str, list[bytes]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.setdefault(self.path, []).append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", got
        httpd.shutdown()
        thread.join()


@packages("opentelemetry.sdk", "opentelemetry.exporter")
def test_opentelemetry(
    collector: tuple[str, dict[str, list[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span in the client's trace, and the histograms of gen_ai.server."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    address, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ships")
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with small_server() as server:
        answer = server.ask("/v1/completions", SHORT, traceparent=f"00-{trace}-{parent}-01")
        assert answer.status == 200
        server.ask("/health")
    spans = [
        (resource.resource, span)
        for body in got["/v1/traces"]
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    [(resource, span)] = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert span.name == "text_completion tiny"
    attributes = {one.key: one.value for one in span.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 3
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["http.request.id"].string_value == answer.headers["X-Request-Id"]
    assert any(one.value.string_value == "ships" for one in resource.attributes)
    counts = {
        metric.name: metric.histogram.data_points[0].count
        for body in got["/v1/metrics"]
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    names = ("request.duration", "time_to_first_token", "time_per_output_token")
    assert counts == {f"gen_ai.server.{name}": 1 for name in names}


def test_nothing_is_sent_without_an_endpoint(server: Server) -> None:
    assert server.app.state.telemetry is None
