"""Serve models with OpenAI's, Anthropic's and Ollama's APIs, and a chat page.

After SIGTERM or Ctrl-C, requests in progress have --grace seconds to finish. With --models, SIGHUP
reloads the list. Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.arguments import bytes_of, check_int
from h2o_cpp.cli.argument_types import integer, json_object
from h2o_cpp.cli.cache_options import add_cache, add_sequences, options_of
from h2o_cpp.cli.options import (
    add_drafts,
    add_machine,
    add_max_tokens,
    add_model,
    add_template,
    generator_options,
    open_generator,
    read_template,
)
from h2o_cpp.cli.output import mebibytes, print_table, tell, tell_error
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.sampling import add_sampling, changed_sampling
from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.generation.grammar import prepare_grammars
from h2o_cpp.model.chat_template import is_jinja
from h2o_cpp.reply import FORMATS

Say = Callable[[dict[str, str]], None]

if TYPE_CHECKING:
    from h2o_cpp.serve.catalog import Catalog
    from h2o_cpp.serve.service import Service


def add_arguments(parser: Parser) -> None:
    add_model(parser, bundled=True)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    server.add_argument(
        "--port",
        type=integer,
        default=8000,
        metavar="N",
        help="port to listen on; 0: a free one (default: %(default)s)",
    )
    server.add_argument(
        "-a",
        "--name",
        "--alias",
        metavar="NAME[,NAME]",
        help="name of the model in requests, and aliases (default: its file's, without .gguf)",
    )
    server.add_argument(
        "--strict-model", action="store_true",
        help="answer status 404 to other model names (default: a single model answers to any name)",
    )  # fmt: skip
    add_template(server)
    server.add_argument(
        "--chat-template-kwargs", type=json_object, default={}, metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false} (default: {})',
    )  # fmt: skip
    server.add_argument(
        "--tool-parser", choices=tuple(FORMATS), metavar="NAME",
        help=f"format of the model's tool calls: {', '.join(FORMATS)} (default: recognized from "
        "its chat template)",
    )  # fmt: skip
    server.add_argument(
        "--models", type=Path, metavar="PATH",
        help="serve the models of a directory or a TOML file, each loaded at its first request "
        "(default: --model)",
    )  # fmt: skip
    server.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="key that clients must send; may be repeated (default: the environment variable "
        "H2O_API_KEY, or none)",
    )  # fmt: skip
    server.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="PEM file of a certificate, for HTTPS (default: plain HTTP)",
    )
    server.add_argument(
        "--tls-key", metavar="FILE", help="PEM file of its private key (default: in --tls-cert)"
    )
    server.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME",
        help="host name in requests; may be repeated; *: any (default: local names and addresses)",
    )  # fmt: skip
    server.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="origin of web pages that may use the server besides those of localhost; *: any",
    )  # fmt: skip
    server.add_argument(
        "--grace", type=integer, default=30, metavar="SECONDS",
        help="time for requests in progress at shutdown (default: %(default)s)",
    )  # fmt: skip

    server.add_argument(
        "--drain", type=integer, default=0, metavar="SECONDS",
        help="time at shutdown during which /ready fails but requests are still accepted "
        "(default: %(default)s)",
    )  # fmt: skip
    server.add_argument(
        "--log-format", choices=("text", "json"), default="text",
        help="format of the log's lines (default: %(default)s)",
    )  # fmt: skip

    limits = parser.add_argument_group("limits")
    add_sequences(limits, "sequences decoded at once")
    add_max_tokens(limits, None, "maximum length of an output, in tokens")
    limits.add_argument(
        "--protect", choices=("auto", "system", "none"), default="auto",
        help="whether the system prompt of a conversation is never evicted, unless the request "
        "sets protect; auto: if it is at most half of the budget (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--truncation", choices=("error", "auto"), default="error",
        help="what happens to a longer prompt, unless the request decides: status 400, or auto: "
        "conversations lose their oldest turns, texts their oldest tokens (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--prefix-cache", default="256MiB", metavar="SIZE",
        help="memory for states of prompts; a prompt that begins like an earlier one continues "
        "from its state, with the same output; 0: none (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--prefix-cache-disk", metavar="DIR",
        help="directory for states that no longer fit in memory, also used after a restart "
        "(default: none)",
    )  # fmt: skip
    limits.add_argument(
        "--prefix-cache-disk-bytes", metavar="SIZE",
        help="disk space for that directory (default: 4GiB)",
    )  # fmt: skip
    limits.add_argument(
        "--prefix-ends", action="store_true",
        help="also keep the states at the ends of outputs, as h2o-cpp chat does; outputs then "
        "depend on what is stored (default: read incomplete chunks again)",
    )  # fmt: skip
    for name, metavar, default, what in (
        ("max-models", "N", None, "maximum number of models loaded at once (default: as many as "
         "fit in memory)"),
        ("idle-timeout", "SECONDS", None, "unload a model of --models after this time without "
         "requests (default: never)"),
        ("max-requests-per-key", "N", None, "maximum number of requests in progress per key; "
         "others get status 429 (default: no limit)"),
        ("max-queue", "N", 64, "maximum number of waiting requests; others get status 429"),
        ("max-prompt", "N", None, "maximum length of a prompt, in tokens (default: the context; "
         "no limit with a budget and rolling positions)"),
        ("max-connections", "N", None, "maximum number of connections (default: 512, or half of "
         "the allowed open files)"),
        ("header-timeout", "SECONDS", 10, "time for the headers of a request"),
        ("body-timeout", "SECONDS", 60, "time for the body of a request"),
        ("write-timeout", "SECONDS", 60, "time in which a client must read, or is disconnected"),
        ("keep-alive", "SECONDS", 75, "idle time between requests of a connection"),
        ("max-body", "SIZE", "8MiB", "maximum size of a request body"),
        ("max-bodies", "SIZE", "64MiB", "maximum size of all request bodies in progress"),
    ):  # fmt: skip
        kind = str if metavar == "SIZE" else integer
        shown = "" if default is None else " (default: %(default)s)"
        limits.add_argument(
            f"--{name}", type=kind, default=default, metavar=metavar, help=what + shown
        )
    add_cache(parser, memory=True, policy="contribution")
    add_sampling(parser.add_argument_group("sampling, unless a request says otherwise"))
    add_drafts(parser)
    add_machine(parser, resident=True)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the log goes to stderr."""
    try:
        from h2o_cpp.serve.app import create_app_of
        from h2o_cpp.serve.catalog import Catalog
        from h2o_cpp.serve.model_list import read_models
        from h2o_cpp.serve.options import AccessOptions, Defaults, ServerOptions, ServiceOptions
        from h2o_cpp.serve.server import Server
        from h2o_cpp.serve.service import Service
    except ImportError as error:
        raise ValueError(f"{error}: install the extra, pip install 'h2o-cpp[serve]'") from None
    _check_one_or_many(args)
    served = ServiceOptions(
        template=read_template(args.template),
        tool_parser=args.tool_parser,
        max_queue=args.max_queue,
        max_tokens=args.max_tokens,
        max_prompt=args.max_prompt,
        defaults=Defaults(
            changed_sampling(args) | {"seed": args.seed},
            args.chat_template_kwargs,
            None if args.protect == "none" else args.protect,
            policy=args.default_policy,
            truncation=args.truncation,
        ),
    )
    access = AccessOptions(
        api_key=args.api_key or os.environ.get("H2O_API_KEY"),
        max_requests_per_key=args.max_requests_per_key,
        max_body_bytes=bytes_of("max_body", args.max_body),
        max_bodies_bytes=bytes_of("max_bodies", args.max_bodies),
        body_timeout=args.body_timeout,
        allowed_hosts=args.allowed_host,
        cors_origins=args.cors_origin,
    )
    listen = options_of(args, ServerOptions)
    say = _print if args.log_format == "text" else _log_rows
    with ExitStack() as opened:
        on_hangup: Callable[[], Awaitable[None]] | None = None
        if args.models is None:
            generator = opened.enter_context(open_generator(args))
            name, *aliases = args.name.split(",") if args.name else [generator.path.stem]
            policy = generator_options(args).with_policy(args.default_policy).policy_name
            defaults = replace(served.defaults, policy=policy)
            service = Service(generator, name=name, options=replace(served, defaults=defaults))
            catalog = Catalog.of(service, any_name=not args.strict_model, aliases=aliases)
            announce = partial(_print_model, say, service, args.template)
            # Not in the way of the first requests, and not waited for at the end.
            Thread(target=prepare_grammars, args=[generator.tokenizer], daemon=True).start()
        else:
            options = generator_options(args)
            entries = read_models(args.models, options, served)
            catalog = Catalog(
                entries,
                max_loaded=args.max_models,
                idle=args.idle_timeout,
                any_name=not args.strict_model,
            )

            async def on_hangup() -> None:
                try:
                    await catalog.replace(read_models(args.models, options, served))
                    say({"models": ", ".join(catalog.entries)})
                except (OSError, ValueError) as error:
                    tell_error(f"{error}; the models stay as they were")

            announce = partial(_print_models, say, catalog)
        app = create_app_of(catalog, access)
        server = Server(app, listen, on_hangup=on_hangup, on_start=announce)
        return 0 if server.serve_until_signal() else 1


def _check_one_or_many(args: argparse.Namespace) -> None:
    """Raises ValueError for options of a single model with --models, and the reverse; and for their
    numbers out of range."""
    for name in ("max_models", "idle_timeout"):
        value = getattr(args, name)
        if value is not None:
            check_int(name, value, 1)
            if args.models is None:
                raise ValueError(f"{name}={value} needs --models, a list of models")
    if args.models is None:
        return
    if args.name is not None:
        raise ValueError("--name is for a single model; with --models, the list names each model")
    if args.model is not BUNDLED_MODEL:
        raise ValueError("--models lists the models, expected no --model")


def _print_models(say: Say, catalog: Catalog, address: str) -> None:
    say({"models": ", ".join(catalog.entries), "page": address, "API": f"{address}/v1"})


def _print_model(say: Say, service: Service, template: str | None, address: str) -> None:
    """Print the model, the memory of its caches and the address."""
    generator = service.generator
    limits = service.limits
    context = f"{generator.n_ctx} tokens"
    if service.max_tokens > generator.n_ctx and generator.endless:
        context += f", which prompts and outputs of {service.max_tokens} tokens go past"
    elif generator.endless:
        context += ", which prompts go past, and outputs if --max-tokens is larger"
    if template is None:
        own = generator.tokenizer.chat_template is not None
        template = (
            "the file's own" if own else "none, so chats are refused; --template NAME has one"
        )
    elif is_jinja(template):
        template = "given"
    rows = {
        "model": f"{generator.path}, on {service.backend}",
        "context": context,
        "sequences": f"{limits.n_sequences} at once",
        "cache": f"{mebibytes(limits.cache_bytes)} for each (full: "
        f"{mebibytes(limits.full_cache_bytes)})",
        "chat template": template,
        "page": address,
        "API": f"{address}/v1",
    }
    say(rows)


def _log_rows(rows: dict[str, str]) -> None:
    visible_log("uvicorn.error").info("; ".join(f"{key}: {text}" for key, text in rows.items()))


def _print(rows: dict[str, str]) -> None:
    print_table(rows, width=len("chat template"), write=tell)
