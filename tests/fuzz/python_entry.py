"""Fuzz Python's entry points with atheris: python_entry.py [libFuzzer's options] [CORPUS].

Texts, sampling options, chat templates and GGUF files: any input gives a result or a ValueError
(TypeError if it has the wrong type).
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["h2o_cpp"]):
    import h2o_cpp
    from h2o_cpp import _core
    from h2o_cpp.model import chat_template, jinja_template

jinja_template._MAX_SECONDS = 1.0
GENERATOR = h2o_cpp.Generator(h2o_cpp.BUNDLED_MODEL, n_ctx=64, hh=16, threads=1)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def tokenizer(data: atheris.FuzzedDataProvider) -> None:
    text = data.ConsumeUnicode(200)
    tokens = GENERATOR.tokenize(text)
    assert all(0 <= token < 4096 for token in tokens)
    GENERATOR.detokenize([data.ConsumeIntInRange(-1, 4096) for _ in range(data.ConsumeInt(1) % 9)])


def options(data: atheris.FuzzedDataProvider) -> None:
    odd = data.ConsumeIntInRange(0, 7) == 0
    number = data.ConsumeFloat if odd else data.ConsumeProbability
    made = GENERATOR.generate(
        data.ConsumeUnicode(40) if odd else data.ConsumeUnicodeNoSurrogates(9),
        max_tokens=data.ConsumeIntInRange(0 if odd else 1, 4),
        temperature=number(),
        top_k=data.ConsumeInt(2) if odd else data.ConsumeIntInRange(0, 50),
        top_p=number(),
        min_p=number(),
        repeat_penalty=number(),
        seed=data.ConsumeIntInRange(0, 9),
        stop=[data.ConsumeUnicodeNoSurrogates(3) for _ in range(data.ConsumeIntInRange(0, 2))],
    )
    made.text.encode()


def template(data: atheris.FuzzedDataProvider) -> None:
    own = data.ConsumeUnicodeNoSurrogates(60)
    source = data.PickValueInList([TEMPLATE, own, "{{" + own + "}}", "{%" + own + "%}" + own])
    messages = [
        {"role": data.PickValueInList(["user", "system", ""]), "content": data.ConsumeUnicode(30)}
        for _ in range(data.ConsumeIntInRange(0, 3))
    ]
    chat_template.ChatTemplate(source, GENERATOR.tokenizer).tokens(messages)


def gguf(data: atheris.FuzzedDataProvider) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"GGUF\3\0\0\0" + data.ConsumeBytes(400))
        file.flush()
        read = _core.GgufFile(Path(file.name))
        dict(read.metadata)


def entry(raw: bytes) -> None:
    data = atheris.FuzzedDataProvider(raw)
    with suppress(ValueError, TypeError):
        data.PickValueInList([tokenizer, options, template, gguf])(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, entry)
    atheris.Fuzz()
