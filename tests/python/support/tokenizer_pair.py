"""One vocabulary, read by the Python tokenizer and by the one of the C API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from h2o_cpp import _core
from h2o_cpp.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Pair:
    """The two tokenizers."""

    python: TextTokenizer
    core: _core.Tokenizer
    n_vocab: int

    def check(self, text: str) -> None:
        for add_special in (True, False):
            for parse_special in (True, False):
                for begins in (True, False):
                    options = {"parse_special": parse_special, "begins": begins}
                    expected = self.python.encode(text, add_special=add_special, **options)
                    got = self.core.encode(text, add_special=add_special, **options)
                    assert got == expected, (text, add_special, options)
        assert self.core.decode(expected) == self.python.decode(expected)

    def check_tokens(self) -> None:
        for token in range(self.n_vocab):
            for begins in (True, False):
                expected = self.python.token_bytes(token, begins=begins)
                assert self.core.token_bytes(token, begins=begins) == expected
            assert self.core.ends(token) == (token in self.python.end_tokens)


def pair_of_file(path: Path) -> Pair:
    file = _core.GgufFile(path)
    metadata = file.metadata()
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    return Pair(TextTokenizer(metadata, n_vocab), _core.Tokenizer(file, n_vocab), n_vocab)


def write(path: Path, metadata: dict[str, Any]) -> Path:
    writer = GGUFWriter(path, metadata.get("general.architecture", "test"))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int64(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pair(directory: Path, metadata: dict[str, Any]) -> Pair:
    return pair_of_file(write(directory / "vocabulary.gguf", metadata))
