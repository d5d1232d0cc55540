"""OpenAI's /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from pydantic import ConfigDict, create_model

from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.responses_request import ResponsesRequest
from h2o_cpp.serve.stored_responses import StoredResponses
from support.dialects import N_PROMPT, N_TOKENS, OUTPUT, RESPONSES, ask, read_events, talking_server
from support.needs import packages
from support.scripted_chat import user
from support.serving import Server, serving
from support.tool_talk import THINKS, spell, talking


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with talking_server(tmp_path_factory.mktemp("talk")) as server:
        yield server


class TestStoredResponses:
    """A later request refers to an earlier response, of the same key."""

    def n_tokens(self, server: Server, **body: Any) -> int:
        counted = {"tools": RESPONSES["tools"], **body}
        answer = server.ask("/v1/responses/input_tokens", counted)
        assert answer.status == 200, answer.body
        n: int = answer.json()["input_tokens"]
        return n

    @pytest.mark.parametrize("stream", [False, True])
    def test_conversation_continues(self, server: Server, stream: bool) -> None:
        """By previous_response_id, or by references to items; the prompt is the whole one."""
        answer = server.ask("/v1/responses", {**RESPONSES, "stream": stream})
        first = read_events(answer.body)[-1]["response"] if stream else answer.json()
        assert first["store"] is True
        whole = [*user("Hi"), *first["output"], *user("And now?")]
        expected = self.n_tokens(server, input=whole)
        assert expected > N_PROMPT + len("Let me see.")
        after = {"previous_response_id": first["id"], "input": "And now?"}
        assert self.n_tokens(server, **after) == expected
        references: list[dict[str, Any]] = [
            {"type": "item_reference", "id": item["id"]} for item in first["output"]
        ]
        del references[0]["type"]
        referring = [*user("Hi"), *references, *user("And now?")]
        assert self.n_tokens(server, input=referring) == expected
        second = ask(server, "/v1/responses", **after, max_output_tokens=1)
        assert second["previous_response_id"] == first["id"]
        third = {"previous_response_id": second["id"], "input": "Bye"}
        longer = [*whole, *second["output"], *user("Bye")]
        assert self.n_tokens(server, **third) == self.n_tokens(server, input=longer)

    def test_references_in_stored_input_stay(self, server: Server) -> None:
        first = ask(server, "/v1/responses")
        item = first["output"][1]
        second = ask(server, "/v1/responses", input=[{"id": item["id"]}, *user("Hi")])
        whole = [item, *user("Hi"), *second["output"], *user("Hi")]
        after = {"previous_response_id": second["id"], "input": "Hi"}
        assert self.n_tokens(server, **after) == self.n_tokens(server, input=whole)

    def test_what_is_not_stored_is_named(self, server: Server) -> None:
        first = ask(server, "/v1/responses", store=False)
        assert first["store"] is False
        answer = server.ask("/v1/responses", {"previous_response_id": first["id"], "input": "a"})
        assert answer.status == 400
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        answer = server.ask("/v1/responses", {"input": [reference]})
        assert answer.status == 404
        assert "store: false" in answer.json()["error"]["message"]

    def test_other_keys_have_other_responses(self, tmp_path: Path) -> None:
        model = talking(tmp_path, {len("uHi;"): "Yes."})
        keys = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        with Generator(model) as generator, serving(generator, api_key=["a", "b"]) as server:
            first = server.ask("/v1/responses", {"input": "Hi", "temperature": 0}, **keys[0])
            body = {"previous_response_id": first.json()["id"], "input": "a"}
            assert [server.ask("/v1/responses", body, **key).status for key in keys] == [200, 400]

    @packages("openai")
    @pytest.mark.parametrize("stream", [False, True])
    def test_openai_client_reads_and_deletes_them(self, server: Server, stream: bool) -> None:
        from openai import NotFoundError, OpenAI

        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        sent = server.ask("/v1/responses", {**RESPONSES, "stream": stream})
        first = read_events(sent.body)[-1]["response"] if stream else sent.json()
        assert client.responses.retrieve(first["id"]).model_dump(exclude_unset=True) == first
        after = {"previous_response_id": first["id"], "input": "And now?", "max_output_tokens": 1}
        second = ask(server, "/v1/responses", **after)
        listed = client.responses.input_items.list(second["id"], order="asc", limit=2)
        assert len(listed.data) == 2
        assert listed.has_more
        items = [*listed]  # of all pages
        texts = [item.content[0].text for item in items if item.type == "message"]
        assert [texts[0], texts[-1]] == ["Hi", "And now?"]
        assert [item.id for item in items[1:-1]] == [item["id"] for item in first["output"]]
        newest, *_ = client.responses.input_items.list(second["id"])
        assert newest.content[0].text == "And now?"
        client.responses.delete(first["id"])
        for use in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(NotFoundError, match="Only the last responses are kept"):
                use(first["id"])
        assert server.ask("/v1/responses", after).status == 400
        assert client.responses.retrieve(second["id"]).id == second["id"]

    def test_their_memory_is_bounded(self) -> None:
        """The response that was not used for longest leaves first."""
        response = '{"output": [12]}'
        stored = StoredResponses(max_bytes=3 * len(f'["a"]{response}'))
        for name in "abc":
            stored.add(name, None, f'["{name}"]', response)
        stored.conversation("a")
        stored.add("d", "a", '["d"]', response)
        assert stored.conversation("d") == ['["a"]', "[12]", '["d"]', "[12]"]
        with pytest.raises(ApiError, match="'b' not found"):
            stored.conversation("b")
        stored.add("e", None, "[" + "1" * 99 + "]", response)
        with pytest.raises(ApiError, match="'e' not found"):
            stored.conversation("e")


class TestResponses:
    def test_response(self, server: Server) -> None:
        found = ask(server, "/v1/responses")
        reasoning, message, call = found["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm.")}
        assert message["content"][0]["text"] == "Let me see."
        assert (call["type"], call["name"]) == ("function_call", "weather")
        assert json.loads(call["arguments"]) == {"city": "Łódź"}
        assert found["status"] == "completed"
        assert found["usage"]["total_tokens"] == N_PROMPT + N_TOKENS

    def test_stream(self, server: Server) -> None:
        found = read_events(server.ask("/v1/responses", {**RESPONSES, "stream": True}).body)
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        ids = [event["item"]["id"].partition("_")[0] for event in found if "item" in event]
        assert ids == ["rs", "rs", "msg", "msg", "fc", "fc"]
        assert found[0]["type"] == "response.created"
        assert found[0]["response"]["status"] == "in_progress"
        last = found[-1]["response"]
        assert found[-1]["type"] == "response.completed"
        texts = ["", "", ""]
        for event in found:
            if event["type"].endswith(".delta"):
                texts[event["output_index"]] += event["delta"]
        assert texts == ["Hm.", "Let me see.", '{"city": "Łódź"}']
        done = [event["item"] for event in found if event["type"].endswith("item.done")]
        assert done == last["output"]

    def test_count_input_tokens(self, server: Server) -> None:
        body = {"model": "tiny", "input": "Hi", "tools": RESPONSES["tools"]}
        found = server.ask("/v1/responses/input_tokens", body).json()
        assert found == {"object": "response.input_tokens", "input_tokens": N_PROMPT}

    def test_truncated_call(self, server: Server) -> None:
        body = {**RESPONSES, "stream": True, "max_output_tokens": N_TOKENS - 4}
        last = read_events(server.ask("/v1/responses", body).body)[-1]["response"]
        assert last["status"] == "incomplete"
        assert [item["status"] for item in last["output"]] == ["completed"] * 2 + ["incomplete"]
        assert last["output"][2]["arguments"].startswith('{"city": "')
        items = ask(server, "/v1/responses", max_output_tokens=N_TOKENS - 4)["output"]
        assert [(item["type"], item["status"]) for item in items] == [
            ("reasoning", "completed"),
            ("message", "incomplete"),
        ]

    def test_paths_of_llama_cpp(self, server: Server) -> None:
        assert server.ask("/responses", RESPONSES).json()["status"] == "completed"
        assert server.ask("/models").json()["data"][0]["id"] == "tiny"

    @pytest.mark.parametrize("cut", ["Hm", "Let me"])
    def test_incomplete(self, server: Server, cut: str) -> None:
        """An item that is cut has the status of the response."""
        n_tokens = len(spell(OUTPUT[: OUTPUT.index(cut) + len(cut)]))
        found = ask(server, "/v1/responses", max_output_tokens=n_tokens)
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        *before, last = found["output"]
        assert last["content"][0]["text"] == cut
        assert [item["status"] for item in (*before, last)] == [
            *("completed" for _ in before),
            "incomplete",
        ]
        body = {**RESPONSES, "stream": True, "max_output_tokens": n_tokens}
        events = read_events(server.ask("/v1/responses", body).body)
        done = [event["item"] for event in events if event["type"].endswith("item.done")]
        assert [item["status"] for item in done] == [item["status"] for item in found["output"]]
        assert done == events[-1]["response"]["output"]

    def test_conversation(self, tmp_path: Path) -> None:
        prompt = '1sBe;uHi;aI look<tool_call>{"name": "weather", "arguments": {"x": 1}};t4;'
        called = {
            "type": "function_call",
            "call_id": "a",
            "name": "weather",
            "arguments": '{"x":1}',
        }
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "content": "I look"},
            called,
            {"type": "function_call_output", "call_id": "a", "output": "4"},
        ]
        path = talking(tmp_path, {len(spell(prompt)): "Four."}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/responses", input=items, instructions="Be")
        assert found["output"][0]["content"][0]["text"] == "Four."

    @pytest.mark.parametrize(
        ("instructions", "first"), [("Be", []), (None, [{"role": "system", "content": "Be"}])]
    )
    def test_first_messages_for_the_system_are_one(
        self, instructions: str | None, first: list[dict[str, str]]
    ) -> None:
        items = [
            *first,
            {"role": "developer", "content": "kind"},
            *user("Hi"),
            {"role": "developer", "content": "Now"},
        ]
        request = ResponsesRequest.model_validate({"input": items, "instructions": instructions})
        assert request.chat().conversation()["messages"] == [
            {"role": "system", "content": "Be\n\nkind"},
            *user("Hi"),
            {"role": "system", "content": "Now"},
        ]

    def test_reasoning_is_part_of_what_follows(self) -> None:
        def thought(text: str) -> dict[str, Any]:
            return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "a", "output": "4"}
        said = {"type": "message", "role": "assistant", "content": "So"}
        items = [
            *user("Hi"),
            thought("1"),
            call,
            output,
            thought("2"),
            said,
            thought("3"),
            *user("?"),
        ]
        request = ResponsesRequest.model_validate({"input": [*items, thought("4")]})
        messages = request.chat().conversation()["messages"]
        assert [
            (message["role"], message.get("reasoning_content"), len(message.get("tool_calls", ())))
            for message in messages
        ] == [
            *(("user", None, 0), ("assistant", "1", 1), ("tool", None, 0)),
            *(("assistant", "2", 0), ("user", None, 0)),
        ]
        assert messages[3]["content"] == "So"

    def test_other_tools_are_left_out(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The model sees one tool, as in the other tests; the log names the others' types."""
        hosted = [
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "size": "auto"},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "of_next_year"},
        ]
        tools = [*RESPONSES["tools"], *hosted]
        found = ask(server, "/v1/responses", tools=tools, access_programs={}, top_logprobs=0)
        assert "tools of type 'of_next_year' are left out" in caplog.text
        assert found["output"][2]["name"] == "weather"
        assert [tool["type"] for tool in found["tools"]] == [
            *("function", "web_search", "image_generation", "custom", "of_next_year"),
        ]

    def test_namespaces(self, tmp_path: Path) -> None:
        """The model sees the names of both; clients get them apart."""
        shown = '{"name": "mcp__sky__weather", "arguments": {"city": "Łódź"}}'
        first = "1uHi;"
        second = f"{first}a<tool_call>{shown};t4;"
        path = talking(
            tmp_path,
            {
                len(spell(first)): f"<tool_call>{shown}</tool_call>",
                len(spell(second)): "Four.",
            },
            THINKS,
        )
        function = RESPONSES["tools"][0]
        space = {"type": "namespace", "name": "mcp__sky__", "description": "", "tools": [function]}
        with Generator(path) as generator, serving(generator) as server:
            [call] = ask(server, "/v1/responses", tools=[space])["output"]
            assert (call["namespace"], call["name"]) == ("mcp__sky__", "weather")
            body = {**RESPONSES, "tools": [space], "stream": True}
            events = read_events(server.ask("/v1/responses", body).body)
            items = [event["item"] for event in events if "item" in event]
            assert {(one["namespace"], one["name"]) for one in items} == {("mcp__sky__", "weather")}
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
            items = [{"role": "user", "content": "Hi"}, call, result]
            found = ask(server, "/v1/responses", tools=[space], input=items)
        assert found["output"][0]["content"][0]["text"] == "Four."

    def test_items_of_newer_clients(self, tmp_path: Path) -> None:
        prompt = 'uHi;aNo<tool_call>{"name": "f", "arguments": {}};t4;'
        direct = {"type": "direct"}
        items = [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {}}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "No"}],
            },
            {
                "type": "function_call",
                "call_id": "a",
                "name": "f",
                "arguments": "{}",
                "caller": direct,
            },
            {
                "type": "function_call_output",
                "call_id": "a",
                "name": "f",
                "output": [{"type": "input_text", "text": "4"}],
                "caller": direct,
            },
        ]
        change = {
            "tools": [],
            "max_tool_calls": 3,
            "prompt_cache_options": {"mode": "implicit"},
            "reasoning": {"effort": "max", "context": "auto"},
        }
        path = talking(tmp_path, {len(spell(prompt)): "Four."}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/responses", input=items, **change)
        assert found["output"][0]["content"][0]["text"] == "Four."

    @pytest.mark.parametrize(
        "change",
        [
            {"background": True},
            {"tool_choice": "required", "tools": []},
            {"tool_choice": {"type": "function", "name": "wether"}},
            {"tool_choice": {"type": "web_search"}},
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            {"input": []},
            {"text": {"format": {"type": "yaml"}}},
        ],
    )
    def test_unsupported_requests(self, server: Server, change: Any) -> None:
        assert server.ask("/v1/responses", {**RESPONSES, **change}).status == 400

    @packages("openai")
    def test_official_client(self, server: Server) -> None:
        import openai

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with client.responses.stream(**RESPONSES) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
            assert response.output_text == "Let me see."
            assert client.responses.create(**RESPONSES).output_text == "Let me see."

    @packages("openai", "llguidance")
    def test_parsed_output_can_be_sent_back(self, tmp_path: Path) -> None:
        import openai

        place = create_model("Place", __config__=ConfigDict(extra="forbid"), near=(bool, ...))
        tool: Any = {**RESPONSES["tools"][0], "strict": True}
        asked: Any = {"model": "tiny", "input": "Hi", "temperature": 0}
        path = talking(tmp_path, {len("uHi;"): '{"near": true}', N_PROMPT: OUTPUT}, THINKS)
        with (
            Generator(path) as generator,
            serving(generator) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
        ):
            text: Any = client.responses.parse(**asked, text_format=place)
            call: Any = client.responses.parse(**asked, tools=[tool])
            assert text.output_parsed == place(near=True)
            assert call.output[-1].parsed_arguments == {"city": "Łódź"}
            for first in (text, call):
                client.responses.create(**{**asked, "input": [*first.output, *user("Go on")]})


WITH_LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


class TestLogprobs:
    def test_tokens_of_the_text(self, tmp_path: Path) -> None:
        """Without those of reasoning and calls; characters of several tokens are complete."""
        text = "Łódź, <b>"
        path = talking(tmp_path, {N_PROMPT: OUTPUT.replace("Let me see.", text)}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/responses", **WITH_LOGPROBS)
            body = {**RESPONSES, **WITH_LOGPROBS, "stream": True}
            events = read_events(server.ask("/v1/responses", body).body)
            [nothing] = ask(server, "/v1/responses")["output"][1]["content"]
        [part] = found["output"][1]["content"]
        assert part["text"] == text
        data = [byte for one in part["logprobs"] for byte in one["bytes"]]
        assert bytes(data).decode() == text
        assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}
        assert found["top_logprobs"] == 2
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
        [done] = [event for event in events if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
        assert events[-1]["response"]["output"][1]["content"] == [part]
        assert nothing["logprobs"] == []

    def test_same_as_in_chats(self, tmp_path: Path) -> None:
        chat = {"messages": user("Hi"), "temperature": 0, "logprobs": True, "top_logprobs": 2}
        path = talking(tmp_path, {len("uHi;"): "Hello"})
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/responses", tools=[], **WITH_LOGPROBS)
            [choice] = server.ask("/v1/chat/completions", chat).json()["choices"]
        assert found["output"][0]["content"][0]["logprobs"] == choice["logprobs"]["content"]
        assert len(choice["logprobs"]["content"]) == len("Hello")

    def test_include(self, server: Server) -> None:
        ask(server, "/v1/responses", include=["reasoning.encrypted_content"])
        answer = server.ask("/v1/responses", {**RESPONSES, "include": ["logprobs"]})
        error = answer.json()["error"]
        assert (answer.status, error["param"]) == (400, "include.0")
        assert "'message.output_text.logprobs'" in error["message"]
        answer = server.ask("/v1/responses", {**RESPONSES, "top_logprobs": 2})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "top_logprobs")
