"""Offline jobs: from a file of prompts to a file of texts; one that was killed goes on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.request import Request, StreamOptions
from h2o_cpp.generation.stream import Generation
from h2o_cpp.generator import Generator
from h2o_cpp.model.atomic import atomic_output
from h2o_cpp.model.file_lock import lock_file

Row = TypeVar("Row")

_BEGINNING = b'{"index": '  # of every line of output

# The options that a line may have: all that JSON can say.
_LINE_OPTIONS = [
    option for option in StreamOptions.__annotations__ if option not in {"constraint", "logit_bias"}
]


class Sink(Protocol):
    """Where texts go; `finished` has the indices of the lines that are there."""

    finished: set[int]

    def write(self, index: int, fields: dict[str, Any]) -> None:
        """Add a line."""


class StdoutOutput(Closing):
    """Stdout as an output, which begins without any lines."""

    def __init__(self) -> None:
        self.finished: set[int] = set()

    def write(self, index: int, fields: dict[str, Any]) -> None:
        """Print a line."""
        sys.stdout.buffer.write(_line(index, fields))
        sys.stdout.buffer.flush()
        self.finished.add(index)

    def close(self) -> None:
        """Stdout stays open."""


class Output(Closing):
    """A file of texts, a JSON object in each line; only whole lines are added.

    It belongs to one process at a time. `finished` has the indices of the lines that are there.
    Beside it, PATH.job has the settings that it was made with.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        allow_other_settings: bool = False,
    ) -> None:
        """Open or make the file. A last line that is not whole, as a kill leaves it, is cut off.

        settings: what the texts depend on, as JSON.

        Raises ValueError for a file that was not written so, which is left as it is, or one that
        another process is writing, or one that other settings made.
        """
        self._path = path
        self._file = path.open("a+b")
        try:
            lock_file(self._file)
            self._file.seek(0)
            whole, torn = self._read(path)
            if settings is not None:
                self._check(settings, allow_other_settings)
            if torn:
                self._file.truncate(whole)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{path}: another job is writing it") from None
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> tuple[int, bytes]:
        """Bytes of the whole lines, and what follows them."""
        self.finished: set[int] = set()
        whole = 0
        for n, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                return whole, line
            index = _index(line)
            if index is None or index in self.finished:
                raise ValueError(f"{path}:{n}: this is not the output of a job")
            self.finished.add(index)
            whole += len(line)
        return whole, b""

    def _check(self, settings: Mapping[str, Any], allow_other: bool) -> None:
        """Refuse other settings than those that the lines were made with; remember these."""
        file = self._path.with_name(f"{self._path.name}.job")
        now = json.loads(json.dumps(settings))
        before = _read_settings(file)
        if self.finished and before is not None and before != now and not allow_other:
            changed = [
                f"{name} {before.get(name)!r}, now {now.get(name)!r}"
                for name in sorted({*before, *now})
                if before.get(name) != now.get(name)
            ]
            raise ValueError(
                f"{self._path} was made with {'; '.join(changed)}: give another output, or "
                "--allow-other-options to continue this one nevertheless"
            )
        if before != now:
            with atomic_output(file) as temporary:
                temporary.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")

    def write(self, index: int, fields: dict[str, Any]) -> None:
        """Add a line, which is in the file when this returns.

        Raises OSError, naming the file, where it cannot be, as on a full disk.
        """
        rest = memoryview(_line(index, fields))
        try:
            while rest:  # not through a buffer, which would be written again when it is closed
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from None
        self.finished.add(index)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def generate_lines(
    generator: Generator,
    prompts: Iterable[bytes],
    output: Sink,
    *,
    report: Callable[[int, str], None],
    field: str = "prompt",
    seed: int | None = None,
    options: StreamOptions,
) -> Iterator[Generation]:
    """Continue the prompt of each line that the output does not have; gives what was written.

    prompts: lines, each a JSON object whose `field` is a text or a list of token ids; its "id",
        if it has one, is that of the line of output. Options of Generator.stream, by their names,
        are those of this line. Empty lines are passed over.
    report: called for a line that cannot be continued, with its number, from 1, and the reason.
    seed: the text of a line without a seed of its own depends on this one and the line's index,
        from 0, not on the other lines.

    Lines are written as their texts end, so not in their order.

    Raises ValueError for options out of range.
    """
    generator.request([0], **options)

    def rows() -> Iterator[tuple[tuple[int, dict[str, Any]], Any, StreamOptions]]:
        for index, line in enumerate(prompts):
            if index in output.finished or not line.strip():
                continue
            try:
                prompt, fields, own = _parse(line, field)
            except (ValueError, RecursionError) as error:
                report(index + 1, str(error))
                continue
            yield (index, fields), prompt, {"seed": line_seed(seed, index), **own}

    for (index, fields), generation in continue_rows(
        generator, rows(), report=lambda row, reason: report(row[0] + 1, reason), options=options
    ):
        output.write(index, {**fields, **text_fields(generation)})
        yield generation


def continue_rows(
    generator: Generator,
    rows: Iterable[tuple[Row, Any, StreamOptions]],
    *,
    report: Callable[[Row, str], None],
    options: StreamOptions,
) -> Iterator[tuple[Row, Generation]]:
    """Continue rows, each with a prompt and options; gives them with their texts as these end.

    report: called for a row that cannot be continued, with the reason.
    """
    begun: list[Row] = []

    def requests() -> Iterator[Request]:
        for row, prompt, own in rows:
            of_row: StreamOptions = {**options, **own}
            try:
                request = generator.request(prompt, **of_row)
            except (ValueError, TypeError) as error:
                report(row, str(error))
                continue
            begun.append(row)
            yield request

    for i, generation in generator.run(requests()):
        yield begun[i], generation


def text_fields(generation: Generation) -> dict[str, Any]:
    """What is written of a text."""
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
    }


def line_seed(seed: int | None, index: int) -> int | None:
    """The seed of a line; different lines have unrelated ones."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")


def _parse(line: bytes, field: str) -> tuple[Any, dict[str, Any], StreamOptions]:
    """The prompt, the fields that the output line takes over, and the line's own options."""
    value = json.loads(line.decode())
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if field not in value:
        raise ValueError(f"it has no {field!r}")
    fields = {"id": value["id"]} if "id" in value else {}
    json.dumps(fields, ensure_ascii=False).encode()  # raises for half a surrogate pair
    options = {
        option: value[option]
        for option in _LINE_OPTIONS
        if option != field and value.get(option) is not None
    }
    return value[field], fields, cast(StreamOptions, options)


def _line(index: int, fields: dict[str, Any]) -> bytes:
    return json.dumps({"index": index, **fields}, ensure_ascii=False).encode() + b"\n"


def _read_settings(file: Path) -> dict[str, Any] | None:
    """What a job was made with; None if there is no such file. Raises ValueError for another."""
    try:
        settings = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: these are not the settings of a job")
    return settings


def _index(line: bytes) -> int | None:
    """The index that a whole line of output has."""
    try:
        index = json.loads(line)["index"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return index if isinstance(index, int) else None
