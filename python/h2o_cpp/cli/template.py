"""The option --template."""

from __future__ import annotations

from pathlib import Path

from h2o_cpp.cli.files import read_text
from h2o_cpp.cli.parser import Arguments
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.chat_template import is_jinja


def add_template(parser: Arguments) -> None:
    parser.add_argument(
        "--template",
        "--chat-template",
        "--chat-template-file",
        metavar="NAME",
        help=f"chat template: one of {', '.join(BUILTIN_TEMPLATES)}; or a Jinja2 file, or its text "
        "(default: the model's own)",
    )


def read_template(given: str | None) -> str | None:
    """The name of a built-in template, or the text of a template or a file (FILE, @FILE).

    Raises FileNotFoundError, and ValueError for anything else.
    """
    if given is None or given in BUILTIN_TEMPLATES or is_jinja(given):
        return given
    if given.startswith("@"):
        return read_text(Path(given[1:]))
    if Path(given).is_file():
        return read_text(Path(given))
    raise ValueError(
        f"--template {given}: no such file or built-in template, expected a file or one of "
        f"{', '.join(BUILTIN_TEMPLATES)}"
    )
