"""The argument parser: positional or named arguments, suggestions for typing errors, the help."""

from __future__ import annotations

import argparse
import copy
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn, Protocol

from h2o_cpp.cli.llama_cpp_flags import translate
from h2o_cpp.cli.output import put_styled
from h2o_cpp.files.visible_text import message_line

# Checks the parsed and the remaining arguments; raises ValueError.
Check = Callable[[argparse.Namespace, Sequence[str]], None]


class _Either(NamedTuple):
    """A positional argument, and the options that replace it."""

    positional: argparse.Action
    options: tuple[argparse.Action, ...]

    def given(self, words: Sequence[str]) -> argparse.Action | None:
        """The option that is given."""
        return next((one for one in self.options if _has(words, one.option_strings)), None)


class Parser(argparse.ArgumentParser):
    """The ArgumentParser of h2o-cpp and of each command.

    Help shows the names of an option up to the first long one, which also names the attribute.
    Further names are hidden aliases.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)
        self._either: list[_Either] = []
        self._checks: list[Check] = []
        self.meant: Mapping[str, str] = {}  # by a word that is no choice
        self.hint = ""  # after unknown words

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
        self.replace_by(positional, option)

    def replace_by(self, positional: argparse.Action, *options: argparse.Action) -> None:
        """Omit `positional` if one of `options` is given.

        If two such arguments remain and the first is optional, it is the first of two words.
        """
        self._either.append(_Either(positional, options))

    def add_check(self, check: Check) -> None:
        """Call `check` after parsing; its ValueError is a usage error."""
        self._checks.append(check)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses as ArgumentParser, but remaining arguments are an error, with a suggestion."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # in a command
            try:
                words = translate(words, self._option_string_actions)
            except ValueError as error:
                self.error(str(error))
        by_option = [(one.positional, given) for one in self._either if (given := one.given(words))]
        by_position = [one.positional for one in self._either if not one.given(words)]
        two = len(by_position) == 2 and not by_position[0].required
        for positional in (*(one for one, _ in by_option), *by_position[: int(two)]):
            positional.nargs, positional.required = argparse.SUPPRESS, False
            positional.default = argparse.SUPPRESS
        parsed, extras = super().parse_known_args(words, namespace)
        extras = [word for word in extras if word != "--"]
        if two and len(extras) == 1 and self._is_positional(extras[0], words):
            first, second = by_position
            setattr(parsed, first.dest, getattr(parsed, second.dest))
            setattr(parsed, second.dest, extras.pop())
        for check in self._checks:
            try:
                check(parsed, extras)
            except ValueError as error:
                self.error(str(error))
        if extras:
            self.error(self._explain(extras, by_option))
        return parsed, extras

    def _is_positional(self, word: str, words: Sequence[str]) -> bool:
        literal = words[words.index("--") :] if "--" in words else ()
        return word in literal or self._parse_optional(word) is None

    def _explain(
        self, extras: Sequence[str], by_option: Sequence[tuple[argparse.Action, argparse.Action]]
    ) -> str:
        """The error for remaining arguments; by_option: positional arguments given by options."""
        unknown = [word for word in extras if word.startswith("-")]
        if unknown:
            known = list(self._option_string_actions)
            names = [word.partition("=")[0] for word in unknown]
            return f"unrecognized arguments: {' '.join(unknown)}" + _suggest(names, known, 0.75)
        if by_option:
            given = " and ".join(str(positional.metavar) for positional, _ in by_option)
            names = [option.option_strings[0] for _, option in by_option]
            return f"{given} given twice: by {' and '.join(names)}, and by position"
        hint = f"; {self.hint}" if self.hint else ""
        return f"unrecognized arguments: {' '.join(extras)}{hint}"

    def error(self, message: str) -> NoReturn:
        """Reports as ArgumentParser does, in one visible line."""
        super().error(message_line(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints as ArgumentParser does, but raises an error if stdout does not take the help."""
        if file is sys.stdout:
            put_styled(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if value in self.meant:
                error.message = f"there is no {value}; did you mean: {self.meant[value]}"
            else:
                choices = [str(choice) for choice in action.choices or ()]
                error.message += _suggest([str(value)], choices)
            raise


class Help(argparse.HelpFormatter):
    """Fills paragraphs with whole words, but keeps lists and examples, whose lines are indented.

    The epilog lists the commands in groups. The usage line shows required arguments. Aliases of an
    option, after its first long name, are hidden.
    """

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        words = [self._prog]
        options = False
        for action in actions:
            if action.option_strings and not action.required:
                options = True
                continue
            if action.option_strings:
                words.append(action.option_strings[0])
            name = str(action.metavar or action.dest)
            words.append(name if action.required else f"[{name}]")
        words += ["[options]"] if options else []
        return f"{'usage: ' if prefix is None else prefix}{' '.join(words)}\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            paragraph if "\n  " in paragraph else "\n".join(self._split_lines(paragraph, width))
            for paragraph in paragraphs
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        short = list(takewhile(lambda name: not name.startswith("--"), action.option_strings))
        shown.option_strings = action.option_strings[: len(short) + 1]
        return super()._format_action_invocation(shown)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return ""
        return super()._format_action(action)


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
