"""The argument parser: positional or named arguments, suggestions for typing errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from h2o_cpp.cli.help import Help
from h2o_cpp.cli.llama_cpp_flags import translate

# Checks the parsed and the remaining arguments; raises ValueError.
Check = Callable[[argparse.Namespace, Sequence[str]], None]


class Parser(argparse.ArgumentParser):
    """The ArgumentParser of h2o-cpp and of each command.

    Help shows the names of an option up to the first long one, which also names the attribute.
    Further names are hidden aliases.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)
        self._either: list[tuple[argparse.Action, argparse.Action]] = []
        self._checks: list[Check] = []

    def add_either(self, *names: str, metavar: str, help: str, **options: Any) -> None:
        """Add an argument that is given by position or by one of these names.

        It is required unless `options`, which both share, has a default.
        """
        option = self.add_argument(
            *names,
            action=Once,
            metavar=metavar,
            help=f"{metavar}, as an option instead",
            **options,
        )
        shared = {key: value for key, value in options.items() if key != "default"}
        nargs: dict[str, Any] = {"nargs": "?"} if "default" in options else {}
        positional = self.add_argument(
            option.dest,
            metavar=metavar,
            help=help,
            default=argparse.SUPPRESS,  # keep the option's value
            **nargs,
            **shared,
        )
        self._either.append((positional, option))

    def add_check(self, check: Check) -> None:
        """Call `check` after parsing; its ValueError is a usage error."""
        self._checks.append(check)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As in ArgumentParser, but remaining arguments are an error, with a suggestion."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # in a command
            try:
                words = translate(words, self._option_string_actions)
            except ValueError as error:
                self.error(str(error))
        by_option = []
        for positional, option in self._either:
            if _has(words, option.option_strings):
                positional.nargs, positional.required = argparse.SUPPRESS, False
                by_option.append(option)
        parsed, extras = super().parse_known_args(words, namespace)
        for check in self._checks:
            try:
                check(parsed, extras)
            except ValueError as error:
                self.error(str(error))
        if extras:
            self.error(self._explain(extras, by_option))
        return parsed, extras

    def _explain(self, extras: Sequence[str], by_option: Sequence[argparse.Action]) -> str:
        """The error for remaining arguments."""
        unknown = [word for word in extras if word.startswith("-")]
        if unknown:
            known = list(self._option_string_actions)
            names = [word.partition("=")[0] for word in unknown]
            return f"unrecognized arguments: {' '.join(unknown)}" + _suggest(names, known, 0.75)
        if by_option:
            given = " and ".join(str(option.metavar) for option in by_option)
            names = [option.option_strings[0] for option in by_option]
            return f"{given} given twice: by {' and '.join(names)}, and by position"
        return f"unrecognized arguments: {' '.join(extras)}"

    def _print_message(self, message: str, file: Any = None) -> None:
        """As in ArgumentParser, but raises an error if stdout does not take the help."""
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _suggest(
                [str(value)], [str(choice) for choice in action.choices or ()]
            )
            raise


class Arguments(Protocol):
    """A parser, or a group of its arguments."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


class Once(argparse.Action):
    """Stores a value and rejects a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "given twice")
        setattr(namespace, self.dest, values)


def _has(words: Sequence[str], names: Sequence[str]) -> bool:
    """Whether an option is given; no other option may begin with its short name."""
    options = words[: words.index("--")] if "--" in words else words
    return any(
        word == name or word.startswith(f"{name}=" if name.startswith("--") else name)
        for word in options
        for name in names
    )


def _suggest(words: Sequence[str], known: Sequence[str], cutoff: float = 0.6) -> str:
    """A suggestion if a word resembles a known one; cutoff: as for get_close_matches()."""
    close = [match for word in words for match in get_close_matches(word, known, 1, cutoff)]
    return f"; did you mean {' '.join(close)}?" if close else ""
