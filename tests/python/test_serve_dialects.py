"""The common behaviour of the Anthropic, OpenAI Responses and Ollama endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.chat_messages import IMAGE_NOTE
from support.dialects import MESSAGES, N_PROMPT, POSTS, ask, read_events
from support.scripted_chat import CHATML, user
from support.serving import events, serving, wait_until
from support.tool_talk import THINKS, WEATHER, talking


def test_oldest_turns_are_left_out(tmp_path: Path) -> None:
    """The system's message stays, and a quarter of n_ctx is left for the output."""
    turns = [*user("abcde"), {"role": "assistant", "content": "abcde"}] * 10
    system = {"role": "system", "content": "Be"}
    n_system, n_turn = len("sBe;"), len("uabcde;aabcde;")
    n_last = len("uHi;")
    expected = n_system + 4 * n_turn + n_last
    assert expected <= 75 < expected + n_turn
    with (
        Generator(talking(tmp_path, {expected: "Yes."}), n_ctx=100) as generator,
        serving(generator, max_prompt=1000) as server,  # n_ctx limits more
    ):
        messages = [system, *turns, *user("Hi")]
        body = {"input": messages, "temperature": 0}
        found = server.ask("/v1/responses", {**body, "truncation": "auto"}).json()
        assert found["output"][0]["content"][0]["text"] == "Yes."
        assert (found["truncation"], found["usage"]["input_tokens"]) == ("auto", expected)
        assert server.ask("/v1/responses", body).status == 400
        chat = {"messages": messages, "options": {"temperature": 0}, "stream": False}
        assert server.ask("/api/chat", chat).status == 400
        chat["truncate"] = True
        answer = server.ask("/api/chat", chat).json()
        assert (answer["message"]["content"], answer["prompt_eval_count"]) == ("Yes.", expected)
        begun = [*messages, {"role": "assistant", "content": "a"}]
        answer = server.ask("/api/chat", {**chat, "messages": begun}).json()
        assert answer["prompt_eval_count"] == expected + len("aa")
        assert server.ask("/api/chat", {**chat, "truncate": False}).status == 400
        openai = {"messages": messages, "temperature": 0, "truncation": "auto"}
        answer = server.ask("/v1/chat/completions", openai).json()
        assert answer["usage"]["prompt_tokens"] == expected
        anthropic = {"messages": messages[1:], "system": "Be", "max_tokens": 4, "temperature": 0}
        assert server.ask("/v1/messages", anthropic).status == 400
        answer = server.ask("/v1/messages", {**anthropic, "truncation": "auto"}).json()
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
        for text, status in (("a" * 98, 200), ("a" * 99, 400)):  # "u", text and ";"
            body = {"input": [*turns, *user(text)], "truncation": "auto"}
            assert server.ask("/v1/responses", body).status == status
        for message in (system, turns[1]):
            body = {"input": [{**message, "content": "a" * 120}], "truncation": "auto"}
            assert server.ask("/v1/responses", body).status == 400


def test_larger_limits_than_the_servers(tmp_path: Path) -> None:
    """The output ends at the server's limit: clients ask for more than the context has."""
    model = talking(tmp_path, {len("Hi"): "a" * 20})
    with Generator(model) as generator, serving(generator, max_tokens=5) as server:
        body: dict[str, Any] = {"messages": user("Hi"), "temperature": 0, "max_tokens": 8192}
        answer = server.ask("/v1/messages", body).json()
        assert answer["content"] == [{"type": "text", "text": "a" * 5}]
        assert answer["stop_reason"] == "max_tokens"
        options = {"num_predict": 8192, "temperature": 0}
        ollama = {"messages": user("Hi"), "stream": False, "options": options}
        answer = server.ask("/api/chat", ollama).json()
        assert (answer["message"]["content"], answer["done_reason"]) == ("a" * 5, "length")
        for raw in (False, True):
            ollama = {"prompt": "Hi", "raw": raw, "stream": False, "options": options}
            answer = server.ask("/api/generate", ollama).json()
            assert (answer["response"], answer["done_reason"]) == ("a" * 5, "length")
        for limit in ("max_tokens", "max_completion_tokens", "n_predict"):
            large = {"messages": user("Hi"), "temperature": 0, limit: 10**12}
            [choice] = server.ask("/v1/chat/completions", large).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("a" * 5, "length")
        large = {"prompt": "Hi", "temperature": 0, "max_tokens": 6}
        [choice] = server.ask("/v1/completions", large).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a" * 5, "length")
        large = {"input": "Hi", "temperature": 0, "max_output_tokens": 6}
        answer = server.ask("/v1/responses", large).json()
        assert answer["output"][0]["content"][0]["text"] == "a" * 5
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert server.ask("/v1/responses/input_tokens", large).json()["input_tokens"] == 4
        count = server.ask("/v1/messages/count_tokens", body).json()
        assert count == {"input_tokens": 4}


IMAGES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [
                                {"type": "text", "text": "4"},
                                {"type": "image", "source": {"type": "base64", "data": "AA=="}},
                            ],
                        }
                    ],
                }
            ],
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "tool",
                    "tool_call_id": "a",
                    "content": [
                        {"type": "text", "text": "4"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    ],
                }
            ]
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [
                        {"type": "input_text", "text": "4"},
                        {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                    ],
                }
            ]
        },
    ),
    ("/api/chat", {"messages": [{"role": "tool", "content": "4", "images": ["AA=="]}]}),
]


@pytest.mark.parametrize(("path", "body"), IMAGES)
def test_a_note_replaces_images_of_tools(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """Otherwise every later turn of the conversation would be refused."""
    with Generator(talking(tmp_path, {})) as generator, serving(generator) as server:
        noted = server.ask(path, {**body, "stream": False})
        assert noted.status == 200
        prompt = server.ask(
            "/apply-template", {"messages": [{"role": "tool", "content": f"4\n{IMAGE_NOTE}"}]}
        )
        n_tokens = len(
            server.ask("/tokenize", {"content": prompt.json()["prompt"]}).json()["tokens"]
        )
    usage = noted.json().get("usage", {})
    counts = [usage.get(name) for name in ("prompt_tokens", "input_tokens")]
    found = next((n for n in counts if n is not None), noted.json().get("prompt_eval_count"))
    assert n_tokens - 1 <= found <= n_tokens  # some APIs join the parts of a text by lines


def test_requests_to_change_the_models_are_refused_in_words(tmp_path: Path) -> None:
    with Generator(talking(tmp_path, {})) as generator, serving(generator) as server:
        for path in ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"):
            method = "DELETE" if path == "/api/delete" else "POST"
            answer = server.ask(path, {"model": "x"}, method=method)
            assert answer.status == 501
            assert f"{path} is not supported: the models are those" in answer.json()["error"]


GREEDY: dict[str, Any] = {"stream": True, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "uHi;", **GREEDY}),
        ("/v1/chat/completions", {"messages": user("Hi"), **GREEDY}),
        ("/v1/responses", {"input": "Hi", **GREEDY}),
        ("/v1/messages", {"messages": user("Hi"), "max_tokens": 50, **GREEDY}),
        ("/api/chat", {"messages": user("Hi"), "options": {"temperature": 0}}),
        ("/api/generate", {"prompt": "Hi", "options": {"temperature": 0}}),
    ],
)
def test_line_separators_are_escaped_in_streams(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Some clients split lines at any of Unicode's line ends."""
    ends = "\x85\u2028\u2029"
    model = talking(tmp_path, {len("uHi;"): f"a{ends}b"})
    with Generator(model) as generator, serving(generator) as server:
        answer = server.ask(path, body)
    assert answer.status == 200
    stream = answer.body.decode()
    assert not any(end in stream for end in ends)
    for escape in ("\\u0085", "\\u2028", "\\u2029"):
        assert escape in stream


def test_cached_tokens_are_reported(tmp_path: Path) -> None:
    """In the field of each API; Anthropic's input_tokens do not include them."""
    messages = user("Hi" * 50)
    n_prompt = len(f"u{messages[0]['content']};")
    with (
        Generator(talking(tmp_path, {}, THINKS), n_batch=32, prefix_cache="16MiB") as generator,
        serving(generator) as server,
    ):
        change = {"messages": messages, "tools": None, "max_tokens": 4}
        first, second = (ask(server, "/v1/messages", **change)["usage"] for _ in range(2))
        assert (first["input_tokens"], first["cache_read_input_tokens"]) == (n_prompt, 0)
        assert (second["input_tokens"], second["cache_read_input_tokens"]) == (1, n_prompt - 1)
        found = read_events(server.ask("/v1/messages", {**MESSAGES, **change, "stream": True}).body)
        assert found[0]["message"]["usage"] == {**second, "output_tokens": 0}
        assert found[-2]["usage"] == second
        chat = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 4}).json()
        assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": n_prompt - 1}
        change = {"input": messages, "tools": None, "max_output_tokens": 4}
        answer = ask(server, "/v1/responses", **change)
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] == n_prompt - 1


BEGUN = [*user("Hi"), {"role": "assistant", "content": "Let me"}]
CONTINUED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": BEGUN, "temperature": 0},
    "/v1/messages": {"messages": BEGUN, "temperature": 0, "max_tokens": 900},
    "/api/chat": {"messages": BEGUN, "options": {"temperature": 0}},
}


@pytest.mark.parametrize("stream", [False, True])
def test_final_message_of_the_assistant_is_continued(tmp_path: Path, stream: bool) -> None:
    """Only the rest is sent. The Responses API has a new reply."""
    model = talking(tmp_path, {len("uHi;aLet me"): " see. "})
    with Generator(model) as generator, serving(generator) as server:
        bodies = [
            server.ask(path, {**body, "stream": stream}).body for path, body in CONTINUED.items()
        ]
        counted = server.ask("/v1/messages/count_tokens", {"messages": BEGUN}).json()
        answer = server.ask("/v1/responses", {"input": BEGUN, "temperature": 0}).json()
    if stream:
        *chunks, _ = events(bodies[0])
        found = [
            "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks),
            "".join(event.get("delta", {}).get("text", "") for event in read_events(bodies[1])),
            "".join(json.loads(line)["message"]["content"] for line in bodies[2].splitlines()),
        ]
    else:
        answers = [json.loads(body) for body in bodies]
        found = [
            answers[0]["choices"][0]["message"]["content"],
            answers[1]["content"][0]["text"],
            answers[2]["message"]["content"],
        ]
    assert found == [" see. "] * 3
    assert counted == {"input_tokens": len("uHi;aLet me")}
    assert answer["usage"]["input_tokens"] == len("uHi;aLet me;")


@pytest.mark.parametrize("path", CONTINUED)
def test_final_messages_that_cannot_be_continued(tmp_path: Path, path: str) -> None:
    """An empty one has no effect; Anthropic's API joins consecutive ones."""
    if path == "/v1/messages":
        refused = [(["Let\n"], "ends in white space")]
        accepted = [[""], ["Let", "me"]]
    else:
        cause = "messages[2] cannot be continued: the message before it is also"
        refused = [(["Let", "me"], cause)]
        accepted = [[""], ["Let\n"]]

    def ask(contents: list[Any], **fields: Any) -> Any:
        replies = [{"role": "assistant", "content": content, **fields} for content in contents]
        return server.ask(path, {**CONTINUED[path], "messages": [*user("Hi"), *replies]})

    with Generator(talking(tmp_path, {}), n_ctx=32) as generator, serving(generator) as server:
        for contents, message in refused:
            answer = ask(contents)
            assert answer.status == 400
            assert message in answer.body.decode()
        for contents in accepted:
            assert ask(contents).status == 200
        if path == "/v1/messages":
            answer = ask([[{"type": "tool_use", "id": "a", "name": "f", "input": {}}]])
        else:
            function = {"name": "f", "arguments": {} if path == "/api/chat" else "{}"}
            call = {"id": "a", "type": "function", "function": function}
            answer = ask(["Let"], tool_calls=[call])
        assert answer.status == 400
        assert "messages[1] cannot be continued: it has tool calls" in answer.body.decode()


@pytest.mark.parametrize(
    ("fields", "continues"),
    [
        ({}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": True}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": True, "continue_final_message": False}, False),
    ],
)
def test_clients_of_llama_cpp_and_vllm_continue(
    tmp_path: Path, fields: dict[str, bool], continues: bool
) -> None:
    """The former without a field, the latter with two."""
    begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nLet me"
    new = f"{begun}<|im_end|>\n<|im_start|>assistant\n"
    with Generator(talking(tmp_path, {}, CHATML)) as generator, serving(generator) as server:
        answer = server.ask("/apply-template", {"messages": BEGUN, **fields}).json()
        assert answer == {"prompt": begun if continues else new}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": user("Hi")}, "messages[0] cannot be continued: its role is 'user'"),
        ({"add_generation_prompt": True}, "give either continue_final_message or add_generation"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "a required tool call cannot continue"),
    ],
)
def test_requests_that_cannot_continue(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    body = {"messages": BEGUN, "continue_final_message": True, **fields}
    with Generator(talking(tmp_path, {})) as generator, serving(generator) as server:
        answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", POSTS)
def test_limits_and_api_keys_apply_to_every_endpoint(tmp_path: Path, path: str) -> None:
    with (
        Generator(talking(tmp_path, {}, THINKS)) as generator,
        serving(generator, max_body_bytes=2000, api_key=["one", "two"]) as server,
    ):
        body = json.dumps(POSTS[path]).encode()
        assert server.ask(path, body).status == 401
        assert server.ask(path, body, **{"x-api-key": "three"}).status == 401
        assert server.ask(path, body, **{"x-api-key": "two"}).status == 200
        key = {"Authorization": "Bearer one"}
        assert server.ask(path, b"x" * 2001, **key).status == 413
        assert server.ask(path, b"x", **key).status == 400
        assert server.ask(path, b'{"model": 1}', **key).status == 400
        assert server.metric("h2o_body_bytes") == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
def test_disconnected_client_frees_its_sequence(tmp_path: Path, path: str) -> None:
    body = {**POSTS[path], "stream": True}
    with (
        Generator(talking(tmp_path, {N_PROMPT: "a" * 900}, THINKS)) as generator,
        serving(generator) as server,
    ):
        connection = server.begin(body, path)
        connection.close()
        wait_until(lambda: server.metric("h2o_sequences_active") == 0)
        assert server.ask(path, {**body, "stream": False}).status == 200
