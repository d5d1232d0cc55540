"""Serve a model to OpenAI's clients, and a page to chat with it and watch its cache.

SIGTERM and Ctrl-C end it: requests in progress may go on for --grace seconds. Needs the extra
`serve`.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.cli.argument_types import size
from h2o_cpp.cli.info import mebibytes
from h2o_cpp.cli.options import add_cache, add_machine, add_model, add_sequences, open_generator
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.template import add_template, read_template
from h2o_cpp.model.arguments import bytes_of
from h2o_cpp.model.chat_template import is_jinja


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_model(parser, default=BUNDLED_MODEL)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    server.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0: a free one (default: %(default)s)"
    )
    server.add_argument(
        "-a",
        "--name",
        "--alias",
        metavar="NAME",
        help="of the model (default: its file's, without .gguf)",
    )
    add_template(server)
    server.add_argument(
        "--api-key", default=os.environ.get("H2O_API_KEY"), metavar="KEY",
        help="that clients must send (default: the environment's H2O_API_KEY, or none)",
    )  # fmt: skip
    server.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME",
        help="a name under which clients reach it; * is any (default: local names and addresses)",
    )  # fmt: skip
    server.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="of web pages elsewhere that may use it; * is any (default: none)",
    )  # fmt: skip
    server.add_argument(
        "--grace", type=int, default=30, metavar="SECONDS",
        help="time to finish what is being generated at shutdown (default: %(default)s)",
    )  # fmt: skip

    limits = parser.add_argument_group("limits")
    add_sequences(limits, "sequences that are generated at once")
    limits.add_argument(
        "--prefix-cache", type=size, default="256MiB", metavar="SIZE",
        help="most memory for states of prompts, in which others that begin alike go on; outputs "
        "are the same; 0: none (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--prefix-ends", action="store_true",
        help="keep where outputs ended too: conversations go on there, as h2o-cpp chat does "
        "(default: read again what is no whole chunk)",
    )  # fmt: skip
    limits.add_argument(
        "--max-queue", type=int, default=64, metavar="N",
        help="requests that may wait; further ones get status 429 (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--max-tokens", type=int, metavar="N",
        help="the most tokens that a request may ask for (default: the context)",
    )  # fmt: skip
    limits.add_argument(
        "--max-prompt", type=int, metavar="N",
        help="the most tokens of a prompt (default: the context)",
    )  # fmt: skip
    limits.add_argument(
        "--max-body", default="4MiB", metavar="SIZE", help="of a request (default: %(default)s)"
    )
    limits.add_argument(
        "--max-bodies", default="64MiB", metavar="SIZE",
        help="of all requests in progress (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--max-connections", type=int, metavar="N",
        help="at once (default: 512, or half of the files that may be open)",
    )  # fmt: skip
    for name, seconds, what in (
        ("header", 10, "for the headers of a request to arrive"),
        ("body", 60, "for its body to arrive"),
        ("write", 60, "in which a client must take something of its answer"),
    ):
        limits.add_argument(
            f"--{name}-timeout", type=int, default=seconds, metavar="SECONDS",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    limits.add_argument(
        "--keep-alive", type=int, default=5, metavar="SECONDS",
        help="that a connection may be idle between requests (default: %(default)s)",
    )  # fmt: skip
    add_cache(parser, memory=True)
    add_machine(parser, resident=True)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; the log goes to stderr."""
    try:
        from h2o_cpp.serve.app import create_app
        from h2o_cpp.serve.server import Server
    except ImportError as error:
        raise ValueError(f"{error}: install the extra, pip install 'h2o-cpp[serve]'") from None
    with open_generator(args, many=True) as generator:
        app = create_app(
            generator,
            name=args.name or generator.path.stem,
            template=read_template(args.template),
            api_key=args.api_key,
            max_queue=args.max_queue,
            max_tokens=args.max_tokens,
            max_prompt=args.max_prompt,
            max_body_bytes=bytes_of("max_body", args.max_body),
            max_bodies_bytes=bytes_of("max_bodies", args.max_bodies),
            body_timeout=args.body_timeout,
            allowed_hosts=args.allowed_host,
            cors_origins=args.cors_origin,
        )
        server = Server(
            app,
            host=args.host,
            port=args.port,
            grace=args.grace,
            max_connections=args.max_connections,
            header_timeout=args.header_timeout,
            write_timeout=args.write_timeout,
            keep_alive=args.keep_alive,
            on_start=partial(_tell, generator, args.template),
        )
        return 0 if server.serve_until_signal() else 1


def _tell(generator: Generator, template: str | None, address: str) -> None:
    """What is served, how much memory its caches have, and where."""
    stats, n = generator.stats(), generator.max_sequences
    context = f"{generator.n_ctx} tokens" + (", texts may be longer" if generator.endless else "")
    if template is None:
        own = generator.tokenizer.chat_template is not None
        template = (
            "the file's own" if own else "none, so chats are refused; --template NAME has one"
        )
    elif is_jinja(template):
        template = "given"
    rows = {
        "model": f"{generator.path}, on {stats.backend}",
        "context": context,
        "sequences": f"{n} at once",
        "cache": f"{mebibytes(stats.cache_bytes // n)} for each, {mebibytes(stats.cache_bytes)} in "
        f"all (full: {mebibytes(stats.full_cache_bytes)})",
        "chat template": template,
        "page": address,
        "API": f"{address}/v1",
    }
    for key, value in rows.items():
        print(f"  {key:13}  {value}", file=sys.stderr)
