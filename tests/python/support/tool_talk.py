"""A scripted model that calls tools, and abridged chat templates of model families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.chatty import chatty, numbers
from support.scripted_opt import END, integers, string, strings
from support.vocabularies import byte_pairs

N_CTX = 1024
CALL, CALL_END, IM_END = 1, 2, 257  # tokens

# These templates add little text, so that the prompt tokens are easy to count.
TOOLS = """{%- if tools %}{{ tools | length }}{% endif %}
{%- for m in messages %}{{ m.role[0] }}{{ m.content }}
{%- for c in m.tool_calls or () %}<tool_call>{{ c.function | tojson }}{% endfor %};{% endfor %}"""
THINKS = TOOLS + "{# <think> </think> #}"

# Abridged published templates.
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}"""
DOCUMENTS = """{%- for d in documents or [] %}{{ d.title }}: {{ d['text'] | upper }}
{% endfor %}{{ documents is none }} {{ tools | tojson(sort_keys=true) }}
{{- messages | map(attribute='role') | join(',') }}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city, “now”",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Graz", "Łódź"]}},
            "required": ["city"],
        },
    },
}


def talking(folder: Path, replies: dict[int, str | list[int]], template: str = TOOLS) -> Path:
    """A model that generates replies[n] and <|im_end|> after a prompt of n tokens.

    <tool_call> is a special token, in replies too.
    """
    script = [END] * N_CTX
    for n_prompt, reply in replies.items():
        tokens = spell(reply) if isinstance(reply, str) else reply
        script[n_prompt - 1 : n_prompt + len(tokens)] = [*tokens, IM_END]
    model = chatty(script, N_CTX)
    spellings = byte_pairs()["tokenizer.ggml.tokens"]
    spellings = ["<|im_start|>", "<tool_call>", "</tool_call>", *spellings[3:257], "<|im_end|>"]
    model.keys["tokenizer.ggml.tokens"] = strings(spellings)
    model.keys["tokenizer.ggml.token_type"] = integers([3, 3, 3] + [1] * 253 + [3, 3])
    model.keys["tokenizer.chat_template"] = string(template)
    return model.write(folder / f"{next(numbers)}.gguf")


def spell(text: str) -> list[int]:
    """The tokens of a text, with <tool_call> as a special token."""
    replaced = text.replace("</tool_call>", chr(CALL_END)).replace("<tool_call>", chr(CALL))
    return [*replaced.encode()]
