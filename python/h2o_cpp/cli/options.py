"""Options that commands share: the model, prompts, limits, sampling and the machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Literal, cast

from h2o_cpp import BUNDLED_MODEL, Generator, _core
from h2o_cpp.cli.argument_types import draft_source, gguf_output, integer, protected
from h2o_cpp.cli.cache_options import add_cache, options_of
from h2o_cpp.cli.files import STANDARD, read_text
from h2o_cpp.cli.output import tell
from h2o_cpp.cli.parser import Arguments, Once, Parser
from h2o_cpp.cli.sampling import add_form, add_sampling, form_options, sampling_options
from h2o_cpp.files.model_files import find_model, pulled_models
from h2o_cpp.files.stored_metadata import metadata_output
from h2o_cpp.generation.request import ENDLESS, StreamOptions
from h2o_cpp.model import chat_template
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.options import GeneratorOptions

# The inputs of find_model.
_MODEL = "GGUF file, a directory with one, the name of a pulled model, or hf://org/name"
_OR_BUNDLED = f"{_MODEL} (default: the bundled tiny model)"

_FEW_TOKENS = 32  # less than people mean by a number of tokens


def add_generation(
    parser: Parser,
    *,
    max_tokens: int | None = 128,
    policy: str | None = None,
    protect: Literal["auto"] | None = None,
) -> None:
    """Add the options of Generator, except the model, and of its streams, with these defaults."""
    limits = parser.add_mutually_exclusive_group()
    add_max_tokens(limits, max_tokens, "generate at most N tokens; -1 is --endless")
    limits.add_argument(
        "--endless",
        dest="max_tokens",
        action="store_const",
        const=ENDLESS,
        default=argparse.SUPPRESS,
        help="generate until the model ends the text, past --n-ctx with rolling positions "
        "(default: --max-tokens)",
    )

    add_cache(parser, memory=True, policy=policy)

    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling)
    add_form(sampling)
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT; may be repeated (default: none)",
    )
    sampling.add_argument(
        "--ignore-eos",
        action="store_true",
        help="continue after the end-of-text token (default: end there)",
    )
    parser.add_argument(
        "--protect",
        type=protected,
        default=protect,
        metavar="N",
        help="never evict these tokens of the prompt: prompt, all of them; N, the first; N,M, the "
        "first and the last; in chat: system, its system prompt; auto, this if it is at most half "
        f"of the budget (default: {protect or 'none'})",
    )

    add_drafts(parser)
    add_machine(parser, resident=True)


def add_drafts(parser: Parser) -> None:
    """Add the options of drafts, for open_generator."""
    drafts = parser.add_argument_group("drafts")
    drafts.add_argument(
        "--draft",
        "--spec-type",
        "-md",
        "--model-draft",
        type=draft_source,
        metavar="MODEL",
        help="guess the next tokens by a smaller model with the same vocabulary, by the file's "
        "layer for multi-token prediction (mtp), or from earlier occurrences of the last ones "
        "(lookup), and verify them at once, with the same output (default: none)",
    )
    drafts.add_argument(
        "--draft-max",
        "--draft-n",
        "--spec-draft-n-max",
        type=integer,
        metavar="N",
        help="guess at most N tokens at once (default: 16; 4 if layers are recurrent)",
    )
    drafts.add_argument(
        "--draft-tokens",
        type=integer,
        default=512,
        metavar="N",
        help="tokens that the cache of the draft model keeps (default: %(default)s)",
    )
    drafts.add_argument(
        "--lossless",
        action="store_true",
        help="keep all tokens, and guess the next ones with a second cache that keeps --hh "
        "(default: --draft-tokens) of them, with the output of the full cache "
        "(default: keep only --hh)",
    )


def add_model(parser: Parser, *, bundled: bool = False) -> None:
    """Add the model, positional or as --model; bundled: the default is the bundled one."""
    if bundled:
        parser.add_either("-m", "--model", metavar="MODEL", default=BUNDLED_MODEL, help=_OR_BUNDLED)
    else:
        parser.add_either("-m", "--model", metavar="MODEL", help=_MODEL)


def add_prompt(parser: Parser, metavar: str, what: str) -> None:
    """Add the model, and the prompt for read_prompt, positional or as --prompt or --file."""
    add_model(parser, bundled=True)
    prompt = parser.add_mutually_exclusive_group(required=True)
    words = prompt.add_argument("words", nargs="?", metavar=metavar, help=f'{what}; "-" is stdin')
    option = prompt.add_argument(
        "-p", "--prompt", action=Once, metavar=metavar, help=f"{metavar}, as an option instead"
    )
    file = prompt.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help=f"read {metavar} from FILE"
    )
    parser.replace_by(words, option, file)
    parser.set_defaults(words=None)

    def check(args: argparse.Namespace, extras: Sequence[str]) -> None:
        if args.words is None or any(word.startswith("-") for word in extras):
            return
        if extras:
            rest = " ".join(extras)
            raise ValueError(f"{metavar} must be one argument, got {rest!r} too: put it in quotes")
        if args.model is BUNDLED_MODEL and _is_model(args.words):
            raise ValueError(
                f"{args.words} is a model, and {metavar} is missing; did you mean: "
                f'{parser.prog} {quote(args.words)} "..."'
            )

    parser.add_check(check)


def add_text(parser: Parser) -> None:
    """Add the file of the text to measure, positional or as --file."""
    parser.add_either("-f", "--file", metavar="FILE", type=Path, help='UTF-8 text; "-" is stdin')


def add_max_tokens(parser: Arguments, default: int | None, meaning: str, *aliases: str) -> None:
    """Add --max-tokens; default None is up to --n-ctx."""
    parser.add_argument(
        "-n",
        "--max-tokens",
        "--n-predict",
        "--predict",
        *aliases,
        type=integer,
        default=default,
        metavar="N",
        help=f"{meaning} (default: {'up to --n-ctx' if default is None else default})",
    )


def add_text_tokens(parser: Arguments, default: str) -> None:
    parser.add_argument(
        "--text-tokens",
        "--max-tokens",
        type=integer,
        metavar="N",
        help=f"read only the first N tokens of the text (default: {default})",
    )


def add_template(parser: Arguments) -> None:
    parser.add_argument(
        "--template",
        "--chat-template",
        "--chat-template-file",
        metavar="NAME",
        help=f"chat template: one of {', '.join(BUILTIN_TEMPLATES)}; another template in "
        "the model file, such as rag; or a Jinja2 file, or its text (default: the model's own)",
    )


def add_machine(parser: Parser, *, resident: bool = False) -> None:
    """Add the options of the device; resident: also --max-resident and --exact."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto (the CPU), cpu, cuda, cuda:N, vulkan or vulkan:N (default: %(default)s)",
    )
    if resident:
        machine.add_argument(
            "--max-resident",
            metavar="SIZE",
            help="memory for weights on the device, such as 2GiB; layers that do not fit are "
            "read again in every pass (default: all weights stay)",
        )
        machine.add_argument(
            "--exact",
            action="store_true",
            help="multiply with weights and in attention in float32, more slowly (default: in 8 "
            "bits with quantized weights, in bf16 with others where it is faster)",
        )
    add_threads(machine)


def add_threads(parser: Arguments) -> None:
    parser.add_argument(
        "-t",
        "--threads",
        type=integer,
        metavar="N",
        help="CPU threads (default: one per core)",
    )


def add_json(parser: Arguments) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON (default: a table)")


def add_force(parser: Arguments) -> None:
    parser.add_argument(
        "--force", action="store_true", help="replace the file if it exists (default: refuse)"
    )


def add_store(parser: Parser, what: str) -> None:
    """Add --write, --output and --force, for stores()."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--write", action="store_true", help=f"store {what} in the model file (default: off)"
    )
    where.add_argument(
        "-o", "--output", type=gguf_output, metavar="FILE",
        help="store it in a copy of the model file (default: none)",
    )  # fmt: skip
    add_force(parser)


def stores(args: argparse.Namespace, model: str) -> bool:
    """Whether the result is stored, in args.output or the model file. Raises errors about it."""
    if not args.write and args.output is None:
        return False
    metadata_output(model, args.output, overwrite=args.write or args.force)
    return True


def generator_options(args: argparse.Namespace) -> GeneratorOptions:
    """The options of Generator that the command has; --seed is that of the output."""
    options = options_of(args, GeneratorOptions)
    # Commands without --prefix-cache have no use for a prompt's state after its end.
    return replace(options, seed=None, prefix_cache=getattr(args, "prefix_cache", 0))


def open_generator(args: argparse.Namespace) -> Generator:
    """Open the model, for one sequence or as many as add_sequences allows."""
    try:
        options = generator_options(args).with_policy(args.default_policy)
        generator = Generator(args.model, **vars(options))
    except ValueError as error:
        if args.n_ctx is None or "trained length" not in str(error):
            raise
        more = "outputs of a rotary model go past it with --hh X and --endless"
        raise ValueError(f"{error}; {more}") from None
    _note_budget(args, generator)
    if args.n_ctx is None and generator.n_ctx < generator.n_ctx_train:
        tell(
            f"note: the context is {generator.n_ctx} of the {generator.n_ctx_train} tokens that "
            "the model was trained for; -c N sets it, -c 0 uses all",
        )
    return generator


def _note_budget(args: argparse.Namespace, generator: Generator) -> None:
    """A note about a budget that is probably not what was meant."""
    hh = args.hh
    is_mistaken = type(hh) is int and 0 < hh <= _FEW_TOKENS and args.recent is None
    if is_mistaken and not getattr(args, "json", False):
        tell(f"note: --hh {hh} keeps {hh} tokens; {hh}% is --hh {hh / 100}")
    if hh == "auto":
        found = _core.GgufFile(str(generator.path)).metadata().get("h2o.n_ctx")
        if isinstance(found, int) and found != generator.n_ctx:
            tell(
                f"note: --hh auto was measured in a context of {found} tokens, not "
                f"{generator.n_ctx}: h2o-cpp advise -c {generator.n_ctx} measures it there"
            )


_STREAM = ("max_tokens", "stop", "ignore_eos", "protect")


def stream_options(args: argparse.Namespace) -> StreamOptions:
    options = {name: getattr(args, name) for name in _STREAM}
    return cast(StreamOptions, options | sampling_options(args) | form_options(args))


def read_prompt(args: argparse.Namespace) -> str:
    """The text of add_prompt's arguments: given, from stdin ("-") or from a file, the latter two
    without the last line break.
    """
    if args.file is not None:
        return read_text(args.file).removesuffix("\n")
    text: str = args.words if args.prompt is None else args.prompt
    return read_text(STANDARD).removesuffix("\n") if text == "-" else text


def read_template(given: str | None) -> str | None:
    """The text of a template: given as such, by its name or as a file (FILE, @FILE); a name that
    may be one of the model's templates stays as it is.

    Raises OSError for a file that cannot be read, and ValueError.
    """
    if given is None:
        return None
    if given.startswith("@"):
        return read_text(Path(given[1:]))
    if given.isidentifier() and not os.path.exists(given):
        return given
    return chat_template.read_template(given)


def _is_model(text: str) -> bool:
    """Whether the text is probably meant as a model rather than a prompt."""
    if text.startswith("hf://") or (text.endswith(".gguf") and len(text.split()) == 1):
        return True
    if os.path.isdir(text):
        with suppress(OSError, ValueError):
            find_model(text)
            return True
    return text in pulled_models() or (text.endswith(".gguf") and os.path.isfile(text))
