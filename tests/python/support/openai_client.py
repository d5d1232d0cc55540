"""The bundled model served to OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from h2o_cpp import Generator
from support.chatty import PLAIN
from support.serving import Server, serving

CACHE: dict[str, Any] = {"hh": 60, "n_ctx": 512, "threads": 1}
SAMPLED: dict[str, Any] = {"max_tokens": 20, "seed": 7, "temperature": 0.9}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A ship?"}]


@contextmanager
def tiny_server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, max_sequences=3, **CACHE) as generator,
        serving(generator, template=PLAIN, max_queue=20) as server,
    ):
        yield server


@contextmanager
def client_of(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
