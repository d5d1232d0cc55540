"""The files in examples/deploy: valid, and about what the server has."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from support.needs import packages, programs
from support.serving import Server, serving, wait_until

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra: serve-test)")

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
COMPOSE = DEPLOY / "compose"


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))]


def by_kind(name: str) -> dict[str, Any]:
    return {one["kind"]: one for one in documents(name)}


def check(resource: dict[str, Any]) -> None:
    """Raises ValidationError."""
    import kubernetes_validate

    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@packages("kubernetes_validate")
def test_manifests_are_valid() -> None:
    """By Kubernetes's own schemas, without unknown fields."""
    resources = documents("kubernetes/server.yaml")
    for resource in resources:
        check(resource)
    deployment = by_kind("kubernetes/server.yaml")["Deployment"]
    for group in [
        by_kind("kubernetes/ray.yaml")["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"],
        *by_kind("kubernetes/ray.yaml")["RayService"]["spec"]["rayClusterConfig"][
            "workerGroupSpecs"
        ],
    ]:
        labels = deployment["spec"]["template"]["metadata"]
        template = {"metadata": labels, **group["template"]}
        check({**deployment, "spec": {**deployment["spec"], "template": template}})


def test_probes_and_times_fit_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    spec = by_kind("kubernetes/server.yaml")["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    options = dict(arg.removeprefix("--").split("=") for arg in container["args"])
    needed = int(options["drain"]) + int(options["grace"]) + 5
    assert needed < spec["terminationGracePeriodSeconds"]
    probe = container["readinessProbe"]
    assert probe["httpGet"]["path"] == "/ready"
    assert probe["periodSeconds"] * probe["failureThreshold"] < int(options["drain"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert main(["serve", *container["args"]]) == 1  # not 2: only the model is missing
    assert "/models/model.gguf" in capsys.readouterr().err


def test_autoscaler_follows_waiting_requests() -> None:
    [metric] = by_kind("kubernetes/server.yaml")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "vllm:num_requests_waiting".replace(":", "_")


def test_ray_service_is_that_of_the_package() -> None:
    spec = by_kind("kubernetes/ray.yaml")["RayService"]["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    folder = Path(__file__).parents[2] / "python" / module.replace(".", "/")
    source = (folder / "serving.py").read_text(encoding="utf-8")
    assert f"def {name}(" in source
    arguments = re.findall(r"^    (\w+): ", source, re.M)
    assert application["args"].keys() - {"hh", "memory"} <= {*arguments}  # of Generator


def test_compose_mounts_files_that_exist() -> None:
    services = documents("compose/compose.yaml")[0]["services"]
    mounts = [
        one.split(":")[0] for service in services.values() for one in service.get("volumes", ())
    ]
    files = [COMPOSE / one for one in mounts if one.startswith("./")]
    assert len(files) == 3
    assert all(file.is_file() for file in files)
    build = services["h2o-cpp"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()
    [scrape] = documents("compose/prometheus.yaml")[0]["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["h2o-cpp:8000"]}]


def expressions() -> list[str]:
    """The queries of the dashboard's panels."""
    dashboard = json.loads((COMPOSE / "dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture
def server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, hh=40, n_batch=32, threads=1, prefix_cache="1MiB") as generator,
        serving(generator) as server,
    ):
        yield server


def test_dashboard_shows_metrics_that_the_server_has(server: Server) -> None:
    assert server.ask("/v1/completions", {"prompt": "The sea", "max_tokens": 5}).status == 200
    wait_until(lambda: b"vllm:request_success_total{" in server.ask("/metrics").body)
    names = {
        line.split("{")[0].split(" ")[0]
        for line in server.ask("/metrics").body.decode().splitlines()
    }
    used = {name for one in expressions() for name in re.findall(r"\b(?:vllm:|h2o_)\w+", one)}
    assert len(used) > 10
    assert used <= names


@programs("prometheus")
def test_prometheus_has_data_for_every_panel(server: Server, tmp_path: Path) -> None:
    """The metrics after two requests; the second waits for the first."""
    config = {
        "scrape_configs": [
            {
                "job_name": "h2o-cpp",
                "scrape_interval": "200ms",
                "scrape_timeout": "200ms",
                "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}],
            }
        ]
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = shutil.which("prometheus")
    assert program is not None
    command = [
        program,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}",
    ]
    with subprocess.Popen(
        [*command, f"--web.listen-address={address}", "--log.level=error"]
    ) as process:

        def has_data(expression: str) -> bool:
            server.ask("/v1/completions", {"prompt": "The sea", "max_tokens": 50})
            query = expression.replace("$__rate_interval", "10s").replace("$model", ".*")
            url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            try:
                with urllib.request.urlopen(url) as answer:
                    found = json.load(answer)["data"]["result"]
            except urllib.error.HTTPError as error:
                if error.code != 503:  # it is not ready yet
                    raise
                return False
            except OSError:  # it does not listen yet
                return False
            return bool(found) and "NaN" not in [one["value"][1] for one in found]

        try:
            for expression in expressions():
                wait_until(lambda one=expression: has_data(one))  # type: ignore[misc]
        finally:
            process.terminate()
