"""The option --template."""

from __future__ import annotations

from pathlib import Path

from h2o_cpp.cli.files import read_text
from h2o_cpp.cli.parser import Arguments
from h2o_cpp.model import chat_template
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES


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
    """The text of a template: given as such, by its name or as a file (FILE, @FILE).

    Raises OSError for a file that cannot be read, and ValueError.
    """
    if given is None:
        return None
    if given.startswith("@"):
        return read_text(Path(given[1:]))
    return chat_template.read_template(given)
