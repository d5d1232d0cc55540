"""Completions with OpenAI's official client: outputs equal those of Generator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from support.background import PATIENCE
from support.scripted_chat import PLAIN

pytest.importorskip("openai", reason="OpenAI's client is not installed (openai)")

import openai

from support.openai_client import CACHE, MESSAGES, SAMPLED, client_of, tiny_server
from support.serving import Server

PROMPT = "It was a bright morning, and the old man went down to the sea with"
LONG = PROMPT * 6  # more tokens than the cache keeps


@pytest.fixture(scope="module")
def alone(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, **CACHE) as generator:
        yield generator


@pytest.fixture(scope="module")
def server(tiny_opt: Path) -> Iterator[Server]:
    with tiny_server(tiny_opt) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def log_softmax(logits: Any) -> Any:
    """Over the last axis, in float64."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def approx(values: Any) -> Any:
    """Tolerance for float64 sums of the same numbers in another order."""
    return pytest.approx([float(value) for value in values], rel=0, abs=1e-12)


def test_models(client: Any) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert model.h2o["n_ctx"] == 512
    assert model.h2o["chat"] is True
    assert model.h2o["policy"] == {"sinks": 0, "heavy": 30, "recent": 30}
    assert model.h2o["cache_bytes"] < model.h2o["full_cache_bytes"]


class TestCompletions:
    def test_response(self, client: Any, alone: Generator) -> None:
        answer = client.completions.create(model="tiny", prompt=LONG, **SAMPLED)
        expected = alone.generate(LONG, **SAMPLED)
        [choice] = answer.choices
        assert choice.text == expected.text
        assert choice.finish_reason == expected.finish_reason == "length"
        assert choice.logprobs is None
        assert answer.object == "text_completion"
        assert answer.usage.prompt_tokens == len(alone.tokenize(LONG))
        assert answer.usage.completion_tokens == 20
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20

    def test_stream(self, client: Any, alone: Generator) -> None:
        chunks = [*client.completions.create(model="tiny", prompt=LONG, stream=True, **SAMPLED)]
        texts = [chunk.choices[0].text for chunk in chunks]
        assert "".join(texts) == alone.generate(LONG, **SAMPLED).text
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert not any("usage" in chunk.model_fields_set for chunk in chunks)

    def test_pieces_are_streamed_as_they_are_generated(
        self, client: Any, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each token after the first three waits until the client has received another piece."""
        received = threading.Semaphore(3)

        def wait(_: Any, allowed: Any) -> None:
            assert received.acquire(timeout=PATIENCE), "no piece arrived"
            allowed[:] = 0xFFFFFFFF

        monkeypatch.setattr(server.engine, "submit", partial(server.engine.submit, constraint=wait))
        n_pieces = 0
        for _ in client.completions.create(model="tiny", prompt=PROMPT, stream=True, **SAMPLED):
            n_pieces += 1
            received.release()
        assert n_pieces >= 20 / 3

    def test_stream_with_usage(self, client: Any, alone: Generator) -> None:
        *chunks, last = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            **SAMPLED,
        )
        assert not any("usage" in chunk.model_fields_set for chunk in chunks)  # not even as null
        assert last.choices == []
        assert last.usage.prompt_tokens == len(alone.tokenize(PROMPT))
        assert last.usage.completion_tokens == 40

    @pytest.mark.parametrize("stream", [False, True])
    def test_several_prompts_with_n_outputs_each(
        self, client: Any, alone: Generator, stream: bool
    ) -> None:
        """More outputs than sequences; each has its own seed."""
        prompts = [alone.tokenize(PROMPT), alone.tokenize("The king"), alone.tokenize("A boy")]
        answer = client.completions.create(
            model="tiny", prompt=prompts, n=2, stream=stream, **SAMPLED
        )
        texts = [""] * 6
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        expected = [
            alone.generate(prompt, **{**SAMPLED, "seed": seed}).text
            for prompt in prompts
            for seed in (7, 8)
        ]
        assert texts == expected
        assert len({*texts}) == 6

    def test_stop(self, client: Any, alone: Generator) -> None:
        greedy: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
        expected = alone.generate(PROMPT, **greedy).text
        stop = expected.split()[4]
        answer = client.completions.create(model="tiny", prompt=PROMPT, stop=stop, **greedy)
        assert answer.choices[0].text == expected[: expected.index(stop)]
        assert answer.choices[0].finish_reason == "stop"

    def test_h2o_sampling_options(self, client: Any, alone: Generator) -> None:
        extra: dict[str, Any] = {
            "top_k": 5,
            "min_p": 0.0,
            "repeat_penalty": 1.3,
            "ignore_eos": True,
        }
        answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **SAMPLED)
        assert answer.choices[0].text == alone.generate(PROMPT, **extra, **SAMPLED).text

    def test_hh_of_a_request(self, client: Any, tiny_opt: Path) -> None:
        with Generator(tiny_opt, **{**CACHE, "hh": 20}) as small:
            expected = small.generate(LONG, **SAMPLED).text
        answer = client.completions.create(
            model="tiny", prompt=LONG, extra_body={"hh": 20}, **SAMPLED
        )
        assert answer.choices[0].text == expected
        with pytest.raises(openai.BadRequestError, match="slots"):
            client.completions.create(model="tiny", prompt=LONG, extra_body={"hh": 0.5})

    def test_kept_shares(self, client: Any, alone: Generator) -> None:
        chunks = client.completions.create(
            model="tiny", prompt=LONG, stream=True, extra_body={"kept_every": 6}, **SAMPLED
        )
        found = [chunk.choices[0].kept for chunk in chunks if hasattr(chunk.choices[0], "kept")]
        stream = alone.stream(LONG, **SAMPLED)
        text = "".join(stream)
        n_prompt = len(alone.tokenize(LONG))
        assert found[0]["begin"] == 0  # its length depends on timing
        pieces: list[str] = []
        for kept in found:
            assert kept["begin"] == len(pieces)
            pieces += kept["pieces"]
            assert kept["tokens_seen"] == len(pieces) == len(kept["shares"])
            assert kept["policy"] == {"sinks": 0, "heavy": 30, "recent": 30}
        # The last token of an output is not processed.
        assert text.startswith("".join(pieces[n_prompt:]))
        assert len(pieces) == n_prompt + 19
        assert found[-1]["tokens_kept"] == 60
        # The mean over heads of all that is kept: 60 tokens, each share rounded to 0.001.
        assert sum(found[-1]["shares"]) == pytest.approx(60, abs=0.0005 * len(pieces))


class TestLogprobs:
    def test_echo(self, client: Any, alone: Generator) -> None:
        """PROMPT and its continuation fit in the cache, so logits() of the whole text apply."""
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, echo=True, logprobs=3, **SAMPLED
        )
        [choice] = answer.choices
        stream = alone.stream(PROMPT, **SAMPLED)
        assert choice.text == PROMPT + "".join(stream)
        tokens = [*alone.tokenize(PROMPT), *stream.tokens]
        logits = alone.logits(tokens[:-1])
        expected = log_softmax(logits)
        found = choice.logprobs
        assert found.token_logprobs[0] is None
        chosen = [row[token] for token, row in zip(tokens[1:], expected, strict=True)]
        assert found.token_logprobs[1:] == approx(chosen)
        assert found.top_logprobs[0] is None
        for token, row, top in zip(tokens[1:], expected, found.top_logprobs[1:], strict=True):
            most_likely = {*np.argsort(-row)[:3], token}
            assert sorted(top.values()) == approx(sorted(row[[*most_likely]]))
        assert found.tokens[0] == "</s>"
        assert "".join(found.tokens[1:]) == choice.text
        for token, offset in zip(found.tokens[1:], found.text_offset[1:], strict=True):
            assert choice.text[offset:].startswith(token)

    @pytest.mark.parametrize("echo", [False, True])
    def test_stream_logprobs(self, client: Any, echo: bool) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": LONG, "echo": echo, "logprobs": 1}
        expected = client.completions.create(**body, **SAMPLED).choices[0]
        chunks = [*client.completions.create(**body, stream=True, **SAMPLED)]
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in parts for value in getattr(part, name)]
            assert joined == getattr(expected.logprobs, name)
        if not echo:
            for chunk in chunks:
                assert "".join(chunk.choices[0].logprobs.tokens) == chunk.choices[0].text

    @pytest.mark.parametrize("echo", [False, True])
    def test_only_tokens_of_the_text_before_a_stop_string(
        self, client: Any, alone: Generator, echo: bool
    ) -> None:
        """Whether it begins within a token or between two."""
        body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "logprobs": 0}
        whole = alone.generate(PROMPT, temperature=0, max_tokens=40).text
        within = set()
        for begin in range(4, 20):
            options = {**body, "stop": whole[begin : begin + 6], "max_tokens": 40, "echo": echo}
            [choice] = client.completions.create(**options).choices
            found = choice.logprobs
            assert choice.finish_reason == "stop"
            tokens = "".join(found.tokens[1:] if echo else found.tokens)
            assert tokens.startswith(choice.text)
            assert all(at < len(choice.text) for at in found.text_offset)
            within.add(tokens != choice.text)
            parts = [
                chunk.choices[0].logprobs
                for chunk in client.completions.create(**options, stream=True)
            ]
            assert [token for part in parts for token in part.tokens] == found.tokens
            assert [at for part in parts for at in part.text_offset] == found.text_offset
        assert within == {False, True}

    def test_no_tokens_of_a_stop_string_in_chats(self, client: Any, alone: Generator) -> None:
        body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "logprobs": True}
        whole = "".join(alone.chat(MESSAGES, template=PLAIN, **SAMPLED))
        stop = whole[6:16]
        [choice] = client.chat.completions.create(**body, stop=stop, **SAMPLED).choices
        tokens = [entry.token for entry in choice.logprobs.content]
        assert choice.message.content == whole[: whole.index(stop)]
        assert len("".join(tokens[:-1])) < len(choice.message.content) <= len("".join(tokens))
        chunks = client.chat.completions.create(**body, stop=stop, stream=True, **SAMPLED)
        streamed = [entry.token for c in chunks for entry in c.choices[0].logprobs.content]
        assert streamed == tokens

    def test_characters_split_into_tokens(self, client: Any) -> None:
        answer = client.completions.create(
            model="tiny", prompt="文 é", echo=True, logprobs=0, max_tokens=1, temperature=0
        )
        found = answer.choices[0].logprobs
        data = b""
        for token in found.tokens[1:-1]:
            if token.startswith("bytes:"):
                data += bytes.fromhex(token[6:].replace("\\x", ""))
            else:
                data += token.encode()
        assert data.decode() == "文 é"
        assert any(token.startswith("bytes:") for token in found.tokens)
        assert found.top_logprobs[1:] == [{}] * (len(found.tokens) - 1)

    def test_chat(self, client: Any, alone: Generator) -> None:
        body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "logprobs": True}
        answer = client.chat.completions.create(**body, top_logprobs=2, **SAMPLED)
        content = answer.choices[0].logprobs.content
        prompt = alone.chat_template(PLAIN).tokens(MESSAGES)
        stream = alone.stream(prompt, **SAMPLED)
        text = "".join(stream)
        data = b"".join(bytes(entry.bytes) for entry in content)
        assert data.decode() == text == answer.choices[0].message.content
        logits = alone.logits([*prompt, *stream.tokens[:-1]])[len(prompt) - 1 :]
        for token, row, found in zip(stream.tokens, log_softmax(logits), content, strict=True):
            assert [found.logprob] == approx([row[token]])
            assert [top.logprob for top in found.top_logprobs] == approx(np.sort(row)[:-3:-1])
        chunks = [*client.chat.completions.create(**body, stream=True, **SAMPLED)]
        streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
        assert [entry.logprob for entry in streamed] == [entry.logprob for entry in content]


def test_concurrent_requests(server: Server, alone: Generator) -> None:
    prompts = [PROMPT[: 8 + 2 * i] for i in range(20)]
    expected = [alone.generate(prompt, **SAMPLED).text for prompt in prompts]

    async def entry(client: Any, prompt: str, stream: bool) -> str:
        answer = await client.completions.create(
            model="tiny", prompt=prompt, stream=stream, **SAMPLED
        )
        if not stream:
            return str(answer.choices[0].text)
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def gather() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            tasks = [entry(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)]
            return await asyncio.gather(*tasks)

    assert asyncio.run(gather()) == expected


COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "The"}
# LiteLLM compares these words.
TOO_LONG = r"This model's maximum context length is 512 tokens.* has more than 512 tokens"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "the sea " * 600}, TOO_LONG),
        ({"prompt": [10**6]}, "not in the vocabulary"),
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 21}, "at most 20 outputs"),
        ({"prompt": ["a"] * 11, "n": 2}, "at most 20 outputs"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"extra_body": {"mirostat": 3}}, "mirostat"),
        ({"extra_body": {"samplers": ["best"]}}, "there is no sampler"),
        ({"extra_body": {"hh": 1}}, "hh=1 is one token"),
        ({"extra_body": {"hh": 20, "policy": "best"}}, "policy='best', expected one of"),
        ({"extra_body": {"policy": "window"}}, "needs hh"),
        ({"extra_body": {"max_token": 5}}, "max_token"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_completions(
    client: Any, change: dict[str, Any], message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as found:
        client.completions.create(**{**COMPLETION, "stream": stream, **change})
    expected = "context_length_exceeded" if message == TOO_LONG else None
    assert found.value.code == expected


def test_unknown_model(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4'") as found:
        client.completions.create(model="gpt-4", prompt="The")
    assert found.value.code == "model_not_found"
