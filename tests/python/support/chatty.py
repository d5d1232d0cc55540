"""Models that follow a scripted conversation, and chat templates."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from h2o_cpp import Generator
from support.scripted_opt import END, Gguf, integers, scripted_opt, string, strings
from support.vocabularies import byte_pairs

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

PLAIN = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""

numbers = count()


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def chatty(script: list[int], n_ctx: int = 128) -> Gguf:
    """A scripted model with ChatML: byte 0 is <|im_start|>, "ab" is <|im_end|>."""
    model = scripted_opt(script, n_ctx)
    tokens = byte_pairs()["tokenizer.ggml.tokens"]
    tokens = ["<|im_start|>", *tokens[1:257], "<|im_end|>"]
    model.keys["tokenizer.ggml.tokens"] = strings(tokens)
    model.keys["tokenizer.ggml.token_type"] = integers([3] + [1] * 255 + [3, 3])
    model.keys["tokenizer.ggml.merges"] = strings([])
    model.keys["tokenizer.chat_template"] = string(CHATML)
    return model


def turn(message: str) -> int:
    """The number of prompt tokens of a message in the template."""
    return len(f"(user\n{message})\n(assistant\n")


def script(folder: Path, turns: dict[str, str], n_ctx: int = 128) -> Path:
    """A model that answers each message with its reply and <|im_end|>."""
    script, n = [END] * n_ctx, 0
    for message, reply in turns.items():
        n += turn(message)
        script[n - 1 : n + len(reply)] = [*reply.encode(), 257]
        n += len(reply) + len(")\n")
    return chatty(script, n_ctx).write(folder / f"{next(numbers)}.gguf")


def says(folder: Path, turns: dict[str, str], n_ctx: int = 128) -> Generator:
    return Generator(script(folder, turns, n_ctx), threads=1)
