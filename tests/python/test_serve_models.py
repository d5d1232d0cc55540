"""Several models: listing, loading, unloading, and options per model."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from support.background import PATIENCE
from support.needs import programs

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra: serve)")

from h2o_cpp.options import GeneratorOptions
from h2o_cpp.serve.catalog import Catalog, Entry
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.model_list import read_models
from h2o_cpp.serve.options import Defaults, ServiceOptions
from h2o_cpp.serve.service import Service
from support.serving import Server, serving, serving_catalog, wait_until

OPTIONS = GeneratorOptions(n_ctx=64, threads=1, max_sequences=1)
SERVED = ServiceOptions()
BODY = {"prompt": "The old man", "max_tokens": 4, "seed": 1}


@pytest.fixture
def folder(tmp_path: Path, tiny_opt: Path) -> Path:
    for name in ("one", "two", "three"):
        shutil.copy(tiny_opt, tmp_path / f"{name}.gguf")
    return tmp_path


def loaded(server: Server) -> list[str]:
    return [model["name"] for model in server.ask("/api/ps").json()["models"]]


class TestReadModels:
    def test_directory(self, folder: Path) -> None:
        (folder / "notes.txt").touch()
        (folder / "mmproj-one.gguf").touch()
        assert [e.name for e in read_models(folder, OPTIONS, SERVED)] == ["one", "three", "two"]

    def test_toml_file(self, folder: Path) -> None:
        path = folder / "models.toml"
        one = '[a]\nmodel = "one.gguf"\nhh = 0.5\nmax_tokens = 5\n'
        path.write_text(one + '[b]\nmodel = "two.gguf"')
        a, b = read_models(path, OPTIONS, ServiceOptions(max_queue=7))
        assert (a.name, b.name) == ("a", "b")
        spec: Any = a.spec
        model, _, options, served = spec
        assert model == str(folder / "one.gguf")
        assert options == replace(OPTIONS, hh=0.5)
        assert served == ServiceOptions(max_queue=7, max_tokens=5)
        spec = b.spec
        assert spec[2] == OPTIONS

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a = ", "models.toml"),
            ("a = 1", "expected a table"),
            ("[a]\nhh = 1", "with model ="),
            ('[a]\nmodel = "x"\nhhh = 1', "no option 'hhh'; did you mean hh"),
            ("", "no models"),
            ('[a]\nmodel = "one.gguf"\nhh = "x"', "models.toml: a: hh='x', expected a fraction"),
            ('[a]\nmodel = "one.gguf"\nhh = 1.5', "a: hh=1.5, expected"),
            ('[a]\nmodel = "one.gguf"\nn_ctx = 99999', "a: n_ctx=99999, expected at most"),
            ('[a]\nmodel = "one.gguf"\nkv_dtype = "q9"', "a: .*q9"),
            ('[a]\nmodel = "one.gguf"\npolicy = "x"', "a: .*policy='x'"),
            ('[a]\nmodel = "one.gguf"\nthreads = -1', "a: threads=-1, expected"),
            ('[a]\nmodel = "one.gguf"\nmax_queue = "x"', "a: max_queue='x', expected an integer"),
            ('[a]\nmodel = "one.gguf"\ntool_parser = "x"', "a: tool_parser='x', expected one of"),
            ('[a]\nmodel = "one.gguf"\ntemplate = "x.jinja"', "a: template='x.jinja', expected"),
            ('[a]\nmodel = "one.gguf"\narchive_pages = 9', "a: archive_pages=9 needs archive"),
            ('[a]\nmodel = "one.gguf"\nprefix_cache_disk_bytes = 9', "a: .* needs prefix_cache_d"),
            ('[a]\nmodel = "bad.gguf"', "a: .*bad.gguf"),
        ],
    )
    def test_bad_files(self, folder: Path, text: str, message: str) -> None:
        (folder / "bad.gguf").write_bytes(b"GGUF")
        path = folder / "models.toml"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_models(path, OPTIONS, SERVED)

    def test_budgets_replace_those_of_the_command_line(self, folder: Path) -> None:
        path = folder / "models.toml"
        small = '[small]\nmodel = "one.gguf"\nhh = 0.05\n'
        path.write_text(small + '[share]\nmodel = "two.gguf"\ncache_memory = "30%"\n')
        budget: dict[str, Any] = {"hh": 0.2, "cache_memory": None, "recent": 0.1}
        for given in (budget, {**budget, "hh": None, "recent": None, "cache_memory": "10%"}):
            found: Any = [
                entry.spec for entry in read_models(path, replace(OPTIONS, **given), SERVED)
            ]
            budgets = [(spec[2].hh, spec[2].cache_memory) for spec in found]
            assert budgets == [(0.05, None), (None, "30%")]

    def test_policy_of_budgets_without_one(self, folder: Path) -> None:
        path = folder / "models.toml"
        tables = (
            "",
            "hh = 0.1",
            'cache_memory = "30%"',
            'policy = "sinks"',
            "hh = 0.5\nrecent = 0.2",
        )
        path.write_text("".join(f'[m{i}]\nmodel = "one.gguf"\n{t}\n' for i, t in enumerate(tables)))
        served = ServiceOptions(defaults=Defaults(policy="contribution"))
        found: Any = read_models(path, replace(OPTIONS, hh=0.2), served)
        policies = [entry.spec[2].policy for entry in found]
        assert policies == ["contribution", "contribution", None, "sinks", None]
        assert [entry.spec[3].defaults.policy for entry in found] == policies  # of requests

    def test_template_file_is_beside_the_list(self, folder: Path) -> None:
        path = folder / "models.toml"
        path.write_text('[a]\nmodel = "one.gguf"\ntemplate = "tool.jinja"\n')
        (folder / "tool.jinja").write_text("{{ messages[0].content }}!")
        catalog = Catalog(read_models(path, OPTIONS, SERVED))
        with serving_catalog(catalog) as server:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            assert server.ask("/apply-template", body).json() == {"prompt": "Hi!"}

    def test_no_models(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no models in this directory"):
            read_models(tmp_path, OPTIONS, SERVED)
        with pytest.raises(FileNotFoundError):
            read_models(tmp_path / "no.toml", OPTIONS, SERVED)


def test_models_are_loaded_on_demand(folder: Path, tiny_opt: Path) -> None:
    with Generator(tiny_opt, **vars(OPTIONS)) as generator:
        text = generator.generate("The old man", max_tokens=4, seed=1).text
    catalog = Catalog(read_models(folder, OPTIONS, SERVED), max_loaded=2)
    with serving_catalog(catalog) as server:
        names = [model["id"] for model in server.ask("/v1/models").json()["data"]]
        assert names == ["one", "three", "two"]
        assert loaded(server) == []
        for name, after in (("one", {"one"}), ("two", {"one", "two"}), ("three", {"two", "three"})):
            answer = server.ask("/v1/completions", {**BODY, "model": name})
            assert answer.json()["choices"][0]["text"] == text
            assert {*loaded(server)} == after
        server.ask("/v1/completions", {**BODY, "model": "two"})
        server.ask("/v1/completions", {**BODY, "model": "one"})
        assert {*loaded(server)} == {"two", "one"}  # the least recently used was unloaded
        assert server.ask("/health").status == 200
    assert all(service.engine.closed for service in catalog.loaded)


def test_aliases(folder: Path) -> None:
    """They are names in requests and lists; a model's own name comes first."""
    path = folder / "models.toml"
    one = '[one]\nmodel = "one.gguf"\naliases = ["gpt-4o", "two"]\n'
    path.write_text(one + '[two]\nmodel = "two.gguf"\n')
    with serving_catalog(Catalog(read_models(path, OPTIONS, SERVED))) as server:
        names = [model["id"] for model in server.ask("/v1/models").json()["data"]]
        assert names == ["one", "two", "gpt-4o"]
        assert server.ask("/v1/models/gpt-4o").json()["id"] == "gpt-4o"
        for name, expected in (("gpt-4o", "one"), ("gpt-4o:latest", "one"), ("two", "two")):
            answer = server.ask("/v1/completions", {**BODY, "model": name})
            assert answer.json()["model"] == expected
    path.write_text('[one]\nmodel = "one.gguf"\naliases = "gpt-4o"\n')
    with pytest.raises(ValueError, match="aliases='gpt-4o', expected a list of names"):
        read_models(path, OPTIONS, SERVED)


def test_aliases_of_an_only_model(tiny_opt: Path) -> None:
    with Generator(tiny_opt, **vars(OPTIONS)) as generator:
        service = Service(generator, name="own")
        with serving_catalog(Catalog.of(service, aliases=["gpt-4o"])) as server:
            statuses = [
                server.ask("/v1/completions", {**BODY, "model": name}).status
                for name in ("own", "gpt-4o", "gpt-5")
            ]
    assert statuses == [200, 200, 404]


def test_digests_are_of_the_file_and_the_template(folder: Path) -> None:
    """Equal files have equal ones, whatever their names are."""
    path = folder / "models.toml"
    text = "".join(f'[{name}]\nmodel = "{name}.gguf"\n' for name in ("one", "two", "three"))
    path.write_text(text + 'template = "chatml"\n')

    def digests() -> list[str]:
        with serving_catalog(Catalog(read_models(path, OPTIONS, SERVED))) as server:
            return [model["digest"] for model in server.ask("/api/tags").json()["models"]]

    one, two, three = digests()
    assert len(one) == 64
    assert one == two != three
    data = bytearray((folder / "two.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "two.gguf").write_bytes(data)
    assert digests()[0] == one
    assert digests()[1] not in (one, two)


def test_unloading_a_model_does_not_load_it(folder: Path) -> None:
    with serving_catalog(Catalog(read_models(folder, OPTIONS, SERVED))) as server:
        for path, field in (("/api/generate", "response"), ("/api/chat", "message")):
            answer = server.ask(path, {"model": "one", "keep_alive": 0})
            found = answer.json()
            assert (answer.status, found["done_reason"], found["model"]) == (200, "unload", "one")
            assert field in found
        assert loaded(server) == []
        assert server.ask("/api/generate", {"model": "four", "keep_alive": 0}).status == 404


def test_model_must_be_named(folder: Path) -> None:
    with serving_catalog(Catalog(read_models(folder, OPTIONS, SERVED))) as server:
        answer = server.ask("/v1/completions", BODY)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "model")
        assert server.ask("/v1/completions", {**BODY, "model": "four"}).status == 404
        assert server.ask("/props?model=two").json()["model_alias"] == "two"


def test_model_in_use_is_not_unloaded(folder: Path) -> None:
    long = {"model": "one", "prompt": "a", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    catalog = Catalog(read_models(folder, OPTIONS, SERVED), max_loaded=1)
    with serving_catalog(catalog) as server:
        assert server.ask("/v1/completions", long).status == 200
        catalog.entries["one"].n_users += 1  # like a response in progress
        answer = server.ask("/v1/completions", {**BODY, "model": "two"})
        assert answer.status == 503
        assert "in use" in answer.json()["error"]["message"]
        catalog.entries["one"].n_users -= 1
        assert server.ask("/v1/completions", {**BODY, "model": "two"}).status == 200


def test_concurrent_first_requests_do_not_exceed_max_models(folder: Path) -> None:
    async def check() -> None:
        catalog = Catalog(read_models(folder, OPTIONS, SERVED), max_loaded=1)
        with catalog.run():
            takes = (catalog.take(name) for name in ("one", "two", "three", "one"))
            found = await asyncio.gather(*takes, return_exceptions=True)
            [service] = catalog.loaded
            assert {service.name} == {one.name for one in found if isinstance(one, Service)}
            assert [one.status for one in found if isinstance(one, ApiError)] == [503, 503]

    asyncio.run(check())


def test_idle_models_are_unloaded(folder: Path) -> None:
    catalog = Catalog(read_models(folder, OPTIONS, SERVED), idle=0.01)
    with serving_catalog(catalog) as server:
        assert server.ask("/v1/completions", {**BODY, "model": "one"}).status == 200
        wait_until(lambda: loaded(server) == [])
        assert server.ask("/v1/completions", {**BODY, "model": "one"}).status == 200


def test_counters_include_unloaded_models(folder: Path) -> None:
    with serving_catalog(Catalog(read_models(folder, OPTIONS, SERVED))) as server:
        n = 0
        for name in ("one", "two", "one"):
            usage = server.ask("/v1/completions", {**BODY, "model": name}).json()["usage"]
            n += usage["prompt_tokens"]
            server.ask("/api/generate", {"model": name, "keep_alive": 0})
            assert loaded(server) == []
            assert server.metric("h2o_prompt_tokens_total") == n
        assert server.metric("h2o_generated_tokens_total") == 12


def test_clients_load_and_unload_models(folder: Path) -> None:
    with serving_catalog(Catalog(read_models(folder, OPTIONS, SERVED))) as server:
        one, two = {"model": "one"}, {"model": "two"}
        assert server.ask("/api/generate", one).json()["done_reason"] == "load"
        assert server.ask("/api/chat", two).json()["done_reason"] == "load"
        assert loaded(server) == ["one", "two"]
        assert server.ask("/api/chat", {**one, "keep_alive": 0}).json()["done_reason"] == "unload"
        assert loaded(server) == ["two"]
        assert "h2o" not in server.ask("/v1/models/one").json()
        assert server.ask("/v1/models/two").json()["h2o"]["n_ctx"] == 64


def test_model_that_cannot_be_loaded(folder: Path) -> None:
    (folder / "bad.gguf").write_bytes(b"GGUF")
    with serving_catalog(Catalog(read_models(folder, OPTIONS, SERVED))) as server:
        answer = server.ask("/v1/completions", {**BODY, "model": "bad"})
        assert answer.status == 500  # clients would try again after 503
        assert "'bad' cannot be loaded" in answer.json()["error"]["message"]
        assert str(folder) not in answer.body.decode()
        assert server.ask("/v1/completions", {**BODY, "model": "one"}).status == 200


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, 500), (FileNotFoundError, 500), (OSError, 503)]
)
def test_only_a_failure_that_may_pass_is_503(error: type[Exception], status: int) -> None:
    def load(_: ExitStack) -> Service:
        raise error

    async def check() -> None:
        catalog = Catalog([Entry("a", load)])
        with catalog.run(), pytest.raises(ApiError) as refused:
            await catalog.take("a")
        assert refused.value.status == status

    asyncio.run(check())


def test_replace_keeps_unchanged_models_loaded(folder: Path) -> None:
    """Changed and removed models are unloaded once they are not in use."""
    path = folder / "models.toml"
    path.write_text('[a]\nmodel = "one.gguf"\n[b]\nmodel = "two.gguf"')

    async def check() -> None:
        catalog = Catalog(read_models(path, OPTIONS, SERVED))
        with catalog.run():
            a, b = await catalog.take("a"), await catalog.take("b")
            catalog.give_back(a)
            path.write_text('[a]\nmodel = "one.gguf"\n[b]\nmodel = "two.gguf"\nhh = 0.5\n')
            await catalog.replace(read_models(path, OPTIONS, SERVED))
            assert not b.engine.closed  # it is in use
            new = await catalog.take("b")
            assert new is not b
            assert await catalog.take("a") is a
            catalog.give_back(b)
            await catalog._unloading
            assert b.engine.closed
            assert not new.engine.closed
        assert a.engine.closed
        assert new.engine.closed

    asyncio.run(check())


def test_model_that_is_removed_while_it_loads(folder: Path) -> None:
    """The request that loads it uses it; then it is unloaded."""

    async def check() -> None:
        catalog = Catalog(read_models(folder, OPTIONS, SERVED))
        with catalog.run():
            taking = asyncio.ensure_future(catalog.take("one"))
            await asyncio.sleep(0)  # it loads in a thread
            await catalog.replace([])
            service = await taking
            assert catalog.loaded == [service]
            catalog.give_back(service)
            await catalog._unloading
            assert service.engine.closed
            assert catalog.loaded == []

    asyncio.run(check())


class TestKeys:
    def test_max_requests_per_key(self, tiny_opt: Path) -> None:
        """Requests of another key do not count."""
        options: dict[str, Any] = {"api_key": ["one", "two"], "max_requests_per_key": 1}
        with (
            Generator(tiny_opt, **vars(OPTIONS)) as generator,
            serving(generator, **options) as server,
        ):
            guard: Any = server.app.middleware_stack
            while not hasattr(guard, "_n_requests"):
                guard = getattr(guard, "app", None) or guard._app
            one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
            guard._n_requests[b"one"] += 1
            answer = server.ask("/v1/models", **one)
            assert answer.status == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert server.ask("/v1/models", **two).status == 200
            guard._n_requests[b"one"] -= 1
            assert server.ask("/v1/models", **one).status == 200
            wait_until(lambda: not +guard._n_requests)


@programs("openssl")
def test_tls(tmp_path: Path, tiny_opt: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    listen = {"tls_cert": cert, "tls_key": key}
    with (
        Generator(tiny_opt, **vars(OPTIONS)) as generator,
        serving(generator, listen=listen) as server,
    ):
        context = ssl.create_default_context(cafile=cert)
        url = f"https://127.0.0.1:{server.port}/health"
        with urllib.request.urlopen(url, context=context, timeout=PATIENCE) as response:
            assert response.read() == b'{"status":"ok"}'


def test_bad_tls_files(tmp_path: Path, tiny_opt: Path) -> None:
    with Generator(tiny_opt, **vars(OPTIONS)) as generator:
        errors = {"tls_cert": FileNotFoundError, "tls_key": ValueError}
        for name, error in errors.items():
            listen = {name: str(tmp_path / "no.pem")}
            with (
                pytest.raises(error, match=r"tls_key is given|no\.pem"),
                serving(generator, listen=listen),
            ):
                pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", ".", "--name", "a"], "with --models, the list names each model"),
        (["--models", ".", "-m", "one.gguf"], "--models lists the models, expected no --model"),
        (["one.gguf", "--idle-timeout", "5"], "--idle-timeout 5 needs --models"),
        (["--max-models", "1"], "--max-models 1 needs --models"),
        (["--models", ".", "--max-models", "0"], "--max-models 0, expected an integer, 1 or more"),
        (["--models", ".", "--idle-timeout", "0"], "--idle-timeout 0, expected an integer, 1 or"),
        (["--models", ".", "--max-tokens", "0"], "--max-tokens 0, expected an integer, 1 or more"),
        (
            ["--models", ".", "--max-requests-per-key", "2"],
            "--max-requests-per-key is given without",
        ),
        (["--models", ".", "--cors-origin", "a.org"], "--cors-origin has 'a.org', expected an"),
        (["--models", ".", "--cors-origin", "https://a.org/"], "has 'https://a.org/', expected an"),
    ],
)
def test_options_of_one_model_or_of_several(
    folder: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(["serve", *options]) == (1 if message.startswith("one: ") else 2)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Linux")
def test_sighup_reloads_the_list(folder: Path) -> None:
    """An invalid list changes nothing."""
    import re
    import sys

    path = folder / "models.toml"
    path.write_text('[a]\nmodel = "one.gguf"\n')
    command = [sys.executable, "-m", "h2o_cpp", "serve", "--models", str(path), "--port", "0"]
    process = subprocess.Popen([*command, "-c", "64"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while (found := re.search(r":(\d+) \(Press", process.stderr.readline())) is None:
            assert process.poll() is None, "the server has exited"
        server = Server(None, int(found[1]))
        assert server.ask("/v1/completions", BODY).status == 200
        for text, names, message in (
            ('[a]\nmodel = "one.gguf"\n[b]\nmodel = "two.gguf"\n', ["a", "b"], "a, b"),
            ("[a", ["a", "b"], "the models stay as they were"),
        ):
            path.write_text(text)
            os.kill(process.pid, signal.SIGHUP)
            while message not in process.stderr.readline():
                assert process.poll() is None, "the server has exited"
            assert [m["id"] for m in server.ask("/v1/models").json()["data"]] == names
        assert server.ask("/v1/completions", {**BODY, "model": "b"}).status == 200
    finally:
        process.kill()
        process.communicate()
