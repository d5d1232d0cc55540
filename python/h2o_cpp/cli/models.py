"""List the pulled models, in $H2O_MODELS or ~/.cache/h2o-cpp/models.

Every command takes a model by its name or the beginning of its name: -m NAME.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from h2o_cpp import _core
from h2o_cpp.cli.options import add_json
from h2o_cpp.cli.output import mebibytes, put, put_json, tell, tell_error
from h2o_cpp.cli.parser import Parser
from h2o_cpp.files.model_files import models_directory, pulled_models
from h2o_cpp.files.visible_text import visible


class Described(NamedTuple):
    """A model file; `type` is the type of most of its bytes."""

    name: str
    path: str
    n_bytes: int
    architecture: str
    type: str
    chat: bool  # has a chat template
    can_run: bool


def add_arguments(parser: Parser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; unreadable files are errors on stderr, with status 1."""
    status = 0
    models = []
    for name, path in pulled_models().items():
        try:
            models.append(describe(name, path))
        except (OSError, ValueError) as error:
            tell_error(str(error))
            status = 1
    if args.json:
        put_json([model._asdict() for model in models])
        return status
    if not models and status == 0:
        tell(
            f"no models in {models_directory()}; get one by: h2o-cpp pull hf://OWNER/REPO",
        )
    rows = [["NAME", "SIZE", "ARCHITECTURE", "TYPE"]]
    rows += ([visible(cell) for cell in _row(model)] for model in models)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if models else ():
        put("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return status


def describe(name: str, path: Path) -> Described:
    """Read a model file's description. Raises OSError and ValueError."""
    files = _core.GgufShards(str(path)).files
    metadata = files[0].metadata()
    architecture = str(metadata.get("general.architecture", ""))
    bytes_of: Counter[str] = Counter()
    for file in files:
        for _, dtype, _, n_bytes in file.tensors():
            bytes_of[dtype] += n_bytes
    return Described(
        name=name,
        path=str(path),
        n_bytes=sum(Path(file.path).stat().st_size for file in files),
        architecture=architecture,
        type=bytes_of.most_common(1)[0][0] if bytes_of else "",
        chat="tokenizer.chat_template" in metadata,
        can_run=architecture in _core.architectures(),
    )


def _row(model: Described) -> tuple[str, str, str, str]:
    architecture = model.architecture + ("" if model.can_run else " (cannot be run)")
    return model.name, mebibytes(model.n_bytes), architecture, model.type
