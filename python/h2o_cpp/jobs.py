"""Offline jobs: from a file of prompts to a file of texts; one that was killed goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.request import Request, StreamOptions
from h2o_cpp.generation.stream import Generation
from h2o_cpp.generator import Generator
from h2o_cpp.model.file_lock import lock_file

Row = TypeVar("Row")

_BEGINNING = b'{"index": '  # of every line of output


class Output(Closing):
    """A file of texts, a JSON object in each line; only whole lines are added.

    It belongs to one process at a time. `finished` has the indices of the lines that are there.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file. A last line that is not whole, as a kill leaves it, is cut off.

        Raises ValueError for a file that was not written so, which is left as it is, or one that
        another process is writing.
        """
        self._path = path
        self._file = path.open("a+b")
        try:
            lock_file(self._file)
            self._file.seek(0)
            whole, torn = self._read(path)
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

    def write(self, index: int, fields: dict[str, Any]) -> None:
        """Add a line, which is in the file when this returns.

        Raises OSError, naming the file, where it cannot be, as on a full disk.
        """
        line = json.dumps({"index": index, **fields}, ensure_ascii=False).encode() + b"\n"
        rest = memoryview(line)
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
    prompts: Path,
    output: Output,
    *,
    report: Callable[[int, str], None],
    field: str = "prompt",
    seed: int | None = None,
    options: StreamOptions,
) -> Iterator[Generation]:
    """Continue the prompt of each line that the output does not have; gives what was written.

    prompts: a JSON object in each line, whose `field` is a text or a list of token ids; its "id",
        if it has one, is that of the line of output. Empty lines are passed over.
    report: called for a line that cannot be continued, with its number, from 1, and the reason.
    seed: the text of a line depends on it and the line's index, from 0, not on the other lines.

    Lines are written as their texts end, so not in their order.

    Raises ValueError for options out of range.
    """
    generator.request([0], **options)

    def rows() -> Iterator[tuple[tuple[int, dict[str, Any]], Any, int | None]]:
        with prompts.open("rb") as file:
            for index, line in enumerate(file):
                if index in output.finished or not line.strip():
                    continue
                try:
                    prompt, fields = _parse(line, field)
                except (ValueError, RecursionError) as error:
                    report(index + 1, str(error))
                    continue
                yield (index, fields), prompt, line_seed(seed, index)

    for (index, fields), generation in continue_rows(
        generator, rows(), report=lambda row, reason: report(row[0] + 1, reason), options=options
    ):
        output.write(index, {**fields, **text_fields(generation)})
        yield generation


def continue_rows(
    generator: Generator,
    rows: Iterable[tuple[Row, Any, int | None]],
    *,
    report: Callable[[Row, str], None],
    options: StreamOptions,
) -> Iterator[tuple[Row, Generation]]:
    """Continue rows, each with a prompt and a seed; gives them with their texts as these end.

    report: called for a row that cannot be continued, with the reason.
    """
    begun: list[Row] = []

    def requests() -> Iterator[Request]:
        for row, prompt, seed in rows:
            own: StreamOptions = {**options, "seed": seed}
            try:
                request = generator.request(prompt, **own)
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


def _parse(line: bytes, field: str) -> tuple[Any, dict[str, Any]]:
    """The prompt, and the fields that the output line takes over."""
    value = json.loads(line.decode())
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if field not in value:
        raise ValueError(f"it has no {field!r}")
    fields = {"id": value["id"]} if "id" in value else {}
    json.dumps(fields, ensure_ascii=False).encode()  # raises for half a surrogate pair
    return value[field], fields


def _index(line: bytes) -> int | None:
    """The index that a whole line of output has."""
    try:
        index = json.loads(line)["index"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return index if isinstance(index, int) else None
