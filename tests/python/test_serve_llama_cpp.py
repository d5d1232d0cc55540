"""llama.cpp's forms of requests and answers, and the defaults of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.options import GeneratorOptions
from h2o_cpp.serve.model_list import read_models
from h2o_cpp.serve.options import Defaults, ServiceOptions
from support.scripted_chat import user
from support.serving import Server, events, serving

TEXT = "The sea</s>was"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "n_predict": 6}
MESSAGES = user("The sea")
TEMPLATE = "{{ tone }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, n_ctx=64, max_sequences=2, threads=1) as generator:
        yield generator


@pytest.fixture(scope="module")
def server(generator: Generator) -> Iterator[Server]:
    defaults = Defaults({"min_p": 0.25}, {"tone": "kind"})
    with serving(generator, template=TEMPLATE, defaults=defaults) as server:
        yield server


@pytest.fixture(scope="module")
def expected(generator: Generator) -> list[int]:
    """The tokens after TEXT."""
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    stream = generator.stream(TEXT, parse_special=True, **options)
    for _ in stream:
        pass
    return [*stream.tokens]


def complete(server: Server, **body: Any) -> Any:
    answer = server.ask("/completion", {"prompt": TEXT, **GREEDY, **body})
    assert answer.status == 200, answer.body
    return answer.json()


def test_fields_of_a_completion(server: Server, generator: Generator, expected: list[int]) -> None:
    answer = complete(server, return_tokens=True, top_k=3, stop=["never"], seed=7)
    assert answer["tokens"] == expected
    assert answer["prompt"] == "</s>" + TEXT
    assert answer["has_new_line"] == ("\n" in answer["content"])
    assert not answer["truncated"]
    settings = answer["generation_settings"]
    assert (settings["top_k"], settings["min_p"], settings["top_p"]) == (3, 0.25, 0.95)
    assert (settings["n_predict"], settings["seed"], settings["stop"]) == (6, 7, ["never"])
    ends = sorted(generator.tokenizer.end_tokens)
    assert settings["logit_bias"] == [{"token": token, "bias": None} for token in ends]
    assert complete(server)["tokens"] == []
    assert complete(server, n_predict=100)["truncated"]
    assert server.ask("/completions", {"prompt": TEXT, **GREEDY}).json()["stop"]


def test_only_the_requested_fields(server: Server) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing/of/it"]
    answer = complete(server, response_fields=fields)
    assert answer == {
        "content": complete(server)["content"],
        "generation_settings/n_predict": 6,
    }


def test_forms_of_prompts(server: Server, generator: Generator) -> None:
    """Special tokens in text are parsed; tokens and texts may be mixed."""
    tokens = generator.tokenizer.encode(TEXT, parse_special=True)
    begin, *rest = tokens
    head = "The sea"
    n = len(generator.tokenizer.encode(head))
    one = [tokens, TEXT, {"prompt_string": TEXT}, [head, *tokens[n:]], [begin, head, *tokens[n:]]]
    assert rest
    for prompt in one:
        answer = complete(server, prompt=prompt)
        assert (answer["prompt"], answer["tokens_evaluated"]) == ("</s>" + TEXT, len(tokens))
    answers = complete(server, prompt=one)
    assert len({answer["content"] for answer in answers}) == 1
    assert [answer["index"] for answer in answers] == [*range(len(one))]
    image = {"prompt_string": TEXT, "multimodal_data": ["aGk="]}
    assert server.ask("/completion", {"prompt": image}).status == 400
    long = server.ask("/completion", {"prompt": [7, "The sea " * 100]})
    assert (long.status, long.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities(
    server: Server, generator: Generator, expected: list[int], stream: bool
) -> None:
    body = {"prompt": TEXT, **GREEDY, "n_probs": 3, "stream": stream}
    sent = server.ask("/completion", body)
    chunks = events(sent.body) if stream else [sent.json()]
    found = [one for chunk in chunks for one in chunk["completion_probabilities"]]
    prompt = generator.tokenizer.encode(TEXT, parse_special=True)
    logits = np.float64(generator.logits([*prompt, *expected[:-1]])[len(prompt) - 1 :])
    rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for token, row, one in zip(expected, rows, found, strict=True):
        assert (one["id"], one["logprob"]) == (token, pytest.approx(row[token], abs=1e-3))
        best = np.argsort(-row)[:3]
        assert [top["id"] for top in one["top_logprobs"]] == best.tolist()
        assert bytes(one["bytes"]) == generator.tokenizer.token_bytes(token)
    if stream:
        assert [token for chunk in chunks for token in chunk["tokens"]] == expected


def test_biases_by_text_and_as_pairs(
    server: Server, generator: Generator, expected: list[int]
) -> None:
    """False bans a token; a text names all of its tokens."""
    first = expected[0]
    text = generator.tokenizer.spell([first])
    [*named] = generator.tokenizer.encode(text, add_special=False)
    assert first in named
    for bias in ([[first, False]], {str(first): -100}, [[text, -100]], {text: False}):
        assert first not in complete(server, logit_bias=bias, return_tokens=True)["tokens"]
    assert server.ask("/completion", {"prompt": TEXT, "logit_bias": [[1, 2, 3]]}).status == 400


def test_chunks_of_a_chat(server: Server) -> None:
    """The first one has the role, the last one the reason of the end and the times."""
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    first, *rest, last, _ = events(answer.body)
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    for chunk in rest:
        assert chunk["choices"][0]["delta"].keys() == {"content"}
        assert chunk["choices"][0]["finish_reason"] is None
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert last["timings"]["predicted_n"] == 4
    body["stream_options"] = {"include_usage": True}
    *_, ended, usage, _ = events(server.ask("/v1/chat/completions", body).body)
    assert "timings" not in ended
    assert usage["timings"]["predicted_n"] == usage["usage"]["completion_tokens"] == 4


def test_times_of_one_token(server: Server) -> None:
    """It comes with the prompt: no time, and no rate, is its own."""
    times = complete(server, n_predict=1)["timings"]
    assert (times["predicted_per_second"], times["predicted_per_token_ms"]) == (0, 0)
    times = complete(server)["timings"]
    assert times["predicted_per_second"] == pytest.approx(5e3 / times["predicted_ms"])
    assert times["prompt_per_second"] == pytest.approx(1e3 / times["prompt_per_token_ms"])


def test_counting_tokens_of_a_chat(server: Server) -> None:
    answer = server.ask("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json()
    n_prompt = answer["usage"]["prompt_tokens"]
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert server.ask(path, {"messages": MESSAGES}).json()["input_tokens"] == n_prompt
    counted = server.ask("/responses/input_tokens", {"input": "The sea"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": n_prompt}


def test_counting_tokens_of_a_chat_that_does_not_fit(server: Server) -> None:
    body = {"messages": user("The sea " * 200), "max_tokens": 1}
    assert server.ask("/v1/chat/completions", body).status == 400
    for path in ("/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"):
        assert server.ask(path, body).json()["input_tokens"] > 200


def test_paths_and_metrics(server: Server, tiny_opt: Path) -> None:
    assert server.ask("/v1/health").json() == {"status": "ok"}
    before = server.metric("llamacpp:tokens_predicted_total")
    complete(server)
    assert server.metric("llamacpp:tokens_predicted_total") == before + 6
    with Generator(tiny_opt, threads=1) as other, serving(other, api_key="key") as guarded:
        assert guarded.ask("/v1/health").status == 200
        error = guarded.ask("/completion", {"prompt": TEXT}).json()["error"]
        assert error["type"] == "authentication_error"


def test_defaults_of_requests(tiny_opt: Path) -> None:
    """A request overrides each by itself."""
    defaults = Defaults({"temperature": 0, "seed": 5}, {"tone": "kind"})
    chat = {"messages": MESSAGES}
    with (
        Generator(tiny_opt, n_ctx=64, threads=1) as generator,
        serving(generator, template=TEMPLATE, defaults=defaults) as server,
    ):
        default = server.ask("/props").json()["default_generation_settings"]["params"]
        assert (default["temperature"], default["seed"]) == (0, 5)
        greedy = complete(server)
        sampled = {"prompt": TEXT, "ignore_eos": True, "n_predict": 6}
        assert server.ask("/completion", sampled).json()["content"] == greedy["content"]
        warm = [server.ask("/completion", {**sampled, "temperature": 5}).json() for _ in range(2)]
        assert warm[0]["content"] == warm[1]["content"] != greedy["content"]
        for given, prompt in (({}, "kindThe sea"), ({"tone": "curt"}, "curtThe sea")):
            body = {**chat, "chat_template_kwargs": given}
            assert server.ask("/apply-template", body).json()["prompt"].endswith(prompt)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sampling = {temperatur = 0}", "did you mean temperature"),
        ("sampling = {temperature = -1}", "temperature"),
        ("chat_template_kwargs = 3", "expected a table"),
    ],
)
def test_defaults_of_a_list_of_models(
    tiny_opt: Path, tmp_path: Path, line: str, message: str
) -> None:
    table = f'[tiny]\nmodel = "{tiny_opt}"\n'
    path = tmp_path / "models.toml"
    path.write_text(f"{table}{line}\n")
    with pytest.raises(ValueError, match=message):
        read_models(path, GeneratorOptions(), ServiceOptions())
    path.write_text(f"{table}sampling = {{top_k = 3}}\nchat_template_kwargs = {{tone = 1}}\n")
    [entry] = read_models(path, GeneratorOptions(), ServiceOptions())
    spec: Any = entry.spec
    assert spec[3].defaults == Defaults({"top_k": 3}, {"tone": 1})
