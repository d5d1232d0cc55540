"""Print a script that completes commands, options and file names in a shell.

Store it as ~/.local/share/bash-completion/completions/h2o-cpp (bash), _h2o-cpp in a directory of
$fpath (zsh) or ~/.config/fish/completions/h2o-cpp.fish (fish). Needs the extra `completion`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o_cpp.cli.output import put
from h2o_cpp.cli.parser import Parser

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise ValueError(f"{error}: install the extra, pip install 'h2o-cpp[completion]'") from None
    from h2o_cpp.cli import make_parser  # imports this module

    parser = make_parser()
    _complete_files(parser, shtab)
    put(shtab.complete(parser, shell=args.shell), lines=True)
    return 0


def _complete_files(parser: argparse.ArgumentParser, shtab: object) -> None:
    """Enable completion of file names for arguments that are paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_files(each, shtab)
        elif action.type is Path or action.metavar == "MODEL":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
