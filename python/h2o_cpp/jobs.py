"""Offline jobs: from a file of prompts to a file of outputs; an interrupted job can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast
from zlib import crc32

from h2o_cpp.files.atomic import atomic_output, check_output
from h2o_cpp.files.file_lock import lock_file
from h2o_cpp.files.visible_text import visible_json
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.request import Request, StreamOptions, check_names
from h2o_cpp.generation.stream import Generation
from h2o_cpp.generator import Generator

Row = TypeVar("Row")

_BEGINNING = b'{"index": '  # of every output line

_CHANGED = "give another output, or allow_other_options=True to continue this one anyway"
_CARRIED = ("id", "metadata")  # fields of a line that are copied to its output
_CHECKSUM = "input_crc32"  # of the line


class StdoutOutput(Closing):
    """Stdout as an output, which begins without any lines."""

    def __init__(self) -> None:
        self.finished: dict[int, str | None] = {}

    def write(self, index: int, fields: dict[str, Any]) -> None:
        """Print a line."""
        line = _line(index, fields)
        if sys.stdout.isatty():
            line = visible_json(json.loads(line)).encode() + b"\n"
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        self.finished[index] = fields.get(_CHECKSUM)

    def close(self) -> None:
        """Stdout stays open."""


class Output(Closing):
    """A file of outputs with a JSON object per line; incomplete lines are never kept.

    Only one process can open it. `finished` has the indices of its lines, with the checksums of
    their inputs, if known. PATH.job stores the settings of the job.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        allow_other_options: bool = False,
    ) -> None:
        """Open or create the file; an incomplete last line is removed.

        settings: JSON values that the outputs depend on.
        allow_other_options: continue an output with other settings or of other inputs.

        Raises FileNotFoundError if it has no directory; and ValueError, and leaves the file
        unchanged, if it is not the output of a job, another process is writing it, or its settings
        differ.
        """
        check_output(path)
        self.finished: dict[int, str | None] = {}
        self._path = path
        self._file = path.open("a+b")
        try:
            lock_file(self._file)
            self._file.seek(0)
            whole, torn = self._read()
            if allow_other_options:
                self.finished = dict.fromkeys(self.finished)
            if settings is not None:
                self._check(settings, allow_other_options)
            if torn:
                self._file.truncate(whole)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{path}: another job is writing this file") from None
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> tuple[int, bytes]:
        """The number of bytes in complete lines, and the rest."""
        whole = 0
        for n, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                return whole, line
            index, checksum = _read_line(line)
            if index is None or index in self.finished:
                raise ValueError(f"{self._path}:{n}: not an output line of a job")
            self.finished[index] = checksum
            whole += len(line)
        return whole, b""

    def _check(self, settings: Mapping[str, Any], allow_other: bool) -> None:
        """Compare settings with those of the existing lines, and store them."""
        file = self._path.with_name(f"{self._path.name}.job")
        now = json.loads(json.dumps(settings))
        before = _read_settings(file)
        if self.finished and before is not None and not allow_other:
            changed = [
                f"{name}={before.get(name)!r}, now {now.get(name)!r}"
                for name in sorted({*before, *now})
                if before.get(name) != now.get(name)  # a missing one was not given
            ]
            if changed:
                raise ValueError(f"{self._path} was made with {'; '.join(changed)}: {_CHANGED}")
        if before != now:
            with atomic_output(file) as temporary:
                temporary.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")

    def write(self, index: int, fields: dict[str, Any]) -> None:
        """Append a line; it is in the file when this returns.

        Raises OSError naming the file, for example if the disk is full.
        """
        rest = memoryview(_line(index, fields))
        try:
            while rest:  # unbuffered, so that closing writes nothing again
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from None
        self.finished[index] = fields.get(_CHECKSUM)

    def close(self) -> None:
        """Close and unlock the file."""
        self._file.close()


def generate_lines(
    generator: Generator,
    prompts: Iterable[bytes],
    output: Output | StdoutOutput,
    *,
    report: Callable[[int, str], None],
    field: str = "prompt",
    seed: int | None = None,
    options: StreamOptions,
) -> Iterator[Generation]:
    """Continue the prompt of each line that is not in the output yet; yields what was written.

    prompts: lines with a JSON object whose `field` is a text or a list of token ids. Its "id" and
        "metadata" are copied to the output. Options of Generator.stream apply to this line; other
        fields are ignored, unless one seems to be a misspelled option. Empty lines are skipped.
    report: called for an invalid line with its number, from 1, and the reason.
    seed: the output of a line without a seed of its own depends on this one and the line's index,
        from 0, not on other lines.

    Lines are written as their outputs end, so in any order.

    Raises ValueError for options out of range, and for a line that has changed since its output
    was written.
    """
    generator.request([0], **options)

    def rows() -> Iterator[tuple[tuple[int, dict[str, Any]], Any, StreamOptions]]:
        for index, line in enumerate(prompts):
            if not line.strip():
                continue
            checksum = f"{crc32(line.strip()):08x}"
            if index in output.finished:
                if output.finished[index] not in (None, checksum):
                    raise ValueError(
                        f"line {index + 1} has changed since its output was written: {_CHANGED}"
                    )
                continue
            try:
                prompt, fields, own = _parse(line, field)
            except (ValueError, TypeError, RecursionError) as error:
                report(index + 1, str(error))
                continue
            yield (
                (index, {**fields, _CHECKSUM: checksum}),
                prompt,
                {"seed": line_seed(seed, index), **own},
            )

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
    """Continue rows with a prompt and options; yields each with its output when it ends.

    report: called for an invalid row, with the reason.
    """
    begun: list[Row] = []

    def requests() -> Iterator[Request]:
        for row, prompt, own in rows:
            of_row: StreamOptions = {**options, **own}
            try:
                request = generator.request(prompt, **of_row)
            except (ValueError, TypeError, ImportError) as error:  # without llguidance
                report(row, str(error))
                continue
            begun.append(row)
            yield request

    for i, generation in generator.run(requests()):
        yield begun[i], generation


def text_fields(generation: Generation) -> dict[str, Any]:
    """The output fields of a generation."""
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
    }


def line_seed(seed: int | None, index: int) -> int | None:
    """The seed of a line, unrelated to those of other lines."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")


def _parse(line: bytes, field: str) -> tuple[Any, dict[str, Any], StreamOptions]:
    """A line's prompt, the fields to copy to the output, and its own options."""
    text = line.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error}), expected an object such as {json.dumps({field: 'The old man'})}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    if field not in value:
        raise ValueError(f"the object has no {field!r}")
    prompt = value.pop(field)
    fields = {name: value.pop(name) for name in _CARRIED if name in value}
    json.dumps(fields, ensure_ascii=False).encode()  # raises for unpaired surrogates
    check_names(value, others=True)
    options = {
        name: option
        for name, option in value.items()
        if name in StreamOptions.__annotations__ and option is not None
    }
    if isinstance(biases := options.get("logit_bias"), dict):  # whose keys are strings in JSON
        options["logit_bias"] = {
            int(token) if token.isdecimal() else token: bias for token, bias in biases.items()
        }
    return prompt, fields, cast(StreamOptions, options)


def _line(index: int, fields: dict[str, Any]) -> bytes:
    return json.dumps({"index": index, **fields}, ensure_ascii=False).encode() + b"\n"


def _read_settings(file: Path) -> dict[str, Any] | None:
    """The settings of a job; None if there is no such file.

    Raises ValueError for an invalid file.
    """
    try:
        settings = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: not the settings of a job")
    return settings


def _read_line(line: bytes) -> tuple[int | None, str | None]:
    """The index in a complete output line, None if it is invalid; and the checksum of its input."""
    try:
        fields = json.loads(line) if line.endswith(b"\n") else {}
        index = fields["index"]
        return index if isinstance(index, int) else None, fields.get(_CHECKSUM)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, None
