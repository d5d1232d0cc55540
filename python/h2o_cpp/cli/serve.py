"""Serve a model to OpenAI's clients, and a page to chat with it and watch its cache.

SIGTERM and Ctrl-C end it: requests in progress may go on for --grace seconds. Needs the extra
`serve`.
"""

from __future__ import annotations

import argparse
import os

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli.files import read_template
from h2o_cpp.cli.options import add_cache, add_machine, add_model, add_sequences, open_generator
from h2o_cpp.cli.parser import Parser
from h2o_cpp.model.arguments import bytes_of


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
    server.add_argument(
        "--template", metavar="TEXT",
        help="Jinja2 chat template, or @FILE that holds one (default: the model's own)",
    )  # fmt: skip
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
    add_cache(parser)
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
        )
        return 0 if server.serve_until_signal() else 1
