"""Download a model from the Hugging Face Hub; every command then takes it by name.

SOURCE is hf://OWNER/REPO, with /FILE or :TYPE to choose one of several models (otherwise Q4_K_M),
or the address of its page.
Repeat the command to continue an interrupted download. Models are stored in $H2O_MODELS, by default
~/.cache/h2o-cpp/models. Needs the extra `pull`.
"""

from __future__ import annotations

import argparse

from h2o_cpp import _core
from h2o_cpp.cli.models import Described, describe
from h2o_cpp.cli.output import mebibytes, put, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.files.hub import is_page
from h2o_cpp.files.model_files import pulled_models
from h2o_cpp.files.pull import pull


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="hf://OWNER/REPO[/FILE][:TYPE][@REVISION]")


def run(args: argparse.Namespace) -> int:
    """Download; the name goes to stdout, everything else to stderr."""
    is_source = args.source.startswith("hf:") or is_page(args.source)
    source = args.source if is_source else f"hf://{args.source}"
    path = pull(source)
    # A file that is no model has no name.
    name = next((name for name, found in pulled_models().items() if found == path), str(path))
    model = describe(name, path)
    tell(f"pulled {mebibytes(model.n_bytes)}: {_what_next(model)}")
    put(name)
    return 0


def _what_next(model: Described) -> str:
    if model.can_run:
        return f"h2o-cpp {'chat' if model.chat else 'run'} -m {model.name}"
    return (
        f"but its architecture, {model.architecture}, is not supported; these are: "
        f"{', '.join(_core.architectures())}"
    )
