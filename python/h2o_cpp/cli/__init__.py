"""The command line, one module per command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from h2o_cpp import __version__
from h2o_cpp.cli.files import error_text
from h2o_cpp.cli.option_names import with_option_names
from h2o_cpp.cli.output import tell, tell_error
from h2o_cpp.cli.parser import Parser

# The summary and an example of each command, by group.
_GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "generate text": {
        "run": ("continue a text", 'run "The old man" --hh 0.2 -n 300'),
        "chat": ("chat with a model", "chat -m model.gguf --hh 0.2"),
        "generate": (
            "continue many prompts, from a file to a file",
            "generate -i prompts.jsonl -o outputs.jsonl -m model.gguf --hh 0.2",
        ),
        "embed": ("print the embedding of a text", 'embed model.gguf "The old man"'),
        "serve": (
            "serve models over OpenAI's API, with a chat page",
            "serve -m model.gguf --hh 0.2 --memory 4GiB",
        ),
    },
    "model files": {
        "pull": ("download a model from the Hugging Face Hub", "pull hf://OWNER/REPO:Q4_K_M"),
        "models": ("list the pulled models", "models"),
        "info": ("describe a GGUF file", "info model.gguf --memory 4GiB"),
        "convert": (
            "convert a Hugging Face checkpoint to GGUF",
            "convert CHECKPOINT_DIR -o model.gguf",
        ),
        "quantize": ("make a GGUF file smaller", "quantize model.gguf small.gguf Q4_K_M"),
        "imatrix": (
            "measure which weights matter, for quantize --imatrix",
            "imatrix model.gguf book.txt -o imatrix.gguf",
        ),
    },
    "what a small cache costs": {
        "advise": (
            "find the smallest cache that costs little on a text",
            "advise model.gguf book.txt --write",
        ),
        "perplexity": (
            "measure what eviction costs on a text",
            "perplexity model.gguf book.txt --hh 0.1,0.2",
        ),
        "heads": (
            "rank the KV heads that find facts, for --archive-heads",
            "heads model.gguf --write",
        ),
        "inspect": (
            "show what the cache keeps of a text",
            'inspect "The old man" -n 200 --hh 0.2 -c 256',
        ),
        "retrieve": (
            "measure how well facts in a prompt are found",
            "retrieve model.gguf --hh 0.2",
        ),
        "reasoning": (
            "measure how well problems with long traces are solved",
            "reasoning models/reasoning.gguf --hh 0.25,0.5",
        ),
        "eval": (
            "score a model on benchmark tasks under eviction",
            "eval model.gguf --data DIR --tasks copa,piqa --hh 0.2",
        ),
    },
    "this machine": {
        "bench": ("measure the speed of a model", "bench -m model.gguf --hh 0.2 --json"),
        "completion": (
            "print a shell completion script",
            "completion bash > ~/.local/share/bash-completion/completions/h2o-cpp",
        ),
    },
}

_EPILOG = """example, with the bundled model:
  h2o-cpp run "The old man" --hh 0.2 -n 300

"h2o-cpp COMMAND --help" shows the options of a command, and an example.

exit status:
  0    success
  1    failure
  2    wrong arguments
  130  interrupted by Ctrl-C"""


# Other programs' names of commands, and what is meant.
_MEANT = {
    **dict.fromkeys(("list", "ls"), "h2o-cpp models"),
    **dict.fromkeys(("rm", "remove", "delete"), "rm FILE, a path of h2o-cpp models --json"),
    "version": "h2o-cpp --version",
    "help": "h2o-cpp --help",
    "show": "h2o-cpp info MODEL",
    "ps": "GET /api/ps of h2o-cpp serve",
    "stop": "Ctrl-C in h2o-cpp serve",
    "create": "h2o-cpp convert CHECKPOINT -o MODEL.gguf",
    "complete": "h2o-cpp run PROMPT",
    **dict.fromkeys(("server", "start"), "h2o-cpp serve -m MODEL"),
    **dict.fromkeys(("download", "get"), "h2o-cpp pull hf://OWNER/REPO"),
}


def make_parser(command: str | None = None) -> Parser:
    """The parser with the arguments of one command, or of all commands, which import slowly."""
    parser = Parser(
        prog="h2o-cpp",
        description="LLM inference with a bounded, heavy-hitter (H2O) KV cache.",
        epilog=f"{_list_commands()}\n\n{_EPILOG}",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.meant = _MEANT
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in _GROUPS.values():
        for name, (summary, example) in group.items():
            one = commands.add_parser(name, help=summary, epilog=f"example:\n  h2o-cpp {example}")
            if command in (None, name):
                module = _module(name)
                one.description = module.__doc__
                module.add_arguments(one)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 after a failure, 2 for a wrong argument, 130 after Ctrl-C.

    Arguments that cannot be parsed exit with 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        make_parser("").print_help(sys.stderr)
        sys.exit(2)
    command = next((word for word in argv if not word.startswith("-")), "")
    args = None
    try:
        args = make_parser(command).parse_args(argv)
        status: int = _module(args.command).run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has exited
        _discard_output()
        return 1
    except (OSError, ValueError, MemoryError, ImportError) as error:  # an extra is missing
        text, wrong_argument = error_text(error), False
        if args and not isinstance(error, ImportError):
            parser = Parser()
            _module(args.command).add_arguments(parser)
            text, wrong_argument = with_option_names(text, parser, argv)
        tell_error(text)
        _discard_output()
        return 2 if wrong_argument and isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        tell("interrupted")
        return 130


def _discard_output() -> None:
    """Discard what stdout does not take, which Python would write again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _module(command: str) -> ModuleType:
    return import_module(f"h2o_cpp.cli.{command}")


def _list_commands() -> str:
    width = max(len(name) for group in _GROUPS.values() for name in group)
    groups = []
    for title, group in _GROUPS.items():
        rows = [f"  {name:{width}}  {summary}" for name, (summary, _) in group.items()]
        groups.append("\n".join([f"{title}:", *rows]))
    return "\n\n".join(groups)
