"""Reads GPT-2's kind of byte-level BPE from tokenizer.json, or from vocab.json and merges.txt."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_cpp.convert.checkpoint import read_json


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as a whole, before BPE; a special one is never produced by text."""

    text: str
    id: int
    special: bool


@dataclass(frozen=True)
class Bpe:
    """Ids by token text, merges as "left right" in order of rank, and the added tokens.

    Texts are in GPT-2's visible form of bytes (Ġ for a space). Added tokens need not be in `ids`.
    """

    ids: dict[str, int]
    merges: list[str]
    added: list[AddedToken]


def read_bpe(directory: Path) -> Bpe:
    """Reads the tokenizer of a checkpoint; tokenizer.json is preferred.

    Raises FileNotFoundError when there is none, ValueError when it is damaged or of another kind.
    """
    tokenizer = directory / "tokenizer.json"
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if tokenizer.is_file():
        bpe = _read_tokenizer_json(tokenizer)
    elif vocab.is_file() and merges.is_file():
        bpe = _read_vocab_and_merges(vocab, merges)
    else:
        raise FileNotFoundError(
            f"{directory}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)"
        )
    for merge in bpe.merges:
        for text in (*merge.split(" "), merge.replace(" ", "")):
            if text not in bpe.ids:
                raise ValueError(f"{directory}: merge {merge!r} needs {text!r}, which has no id")
    return bpe


def added_token(path: Path, text: object, id: object, special: object) -> AddedToken:
    """An added token from the JSON file `path`; raises ValueError unless it is well formed."""
    if isinstance(text, str) and isinstance(id, int) and isinstance(special, bool):
        return AddedToken(text, id, special)
    raise ValueError(f"{path}: malformed added token {text!r} with id {id!r}")


def _read_vocab_and_merges(vocab: Path, merges: Path) -> Bpe:
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{merges}: not UTF-8 text ({error})") from error
    if lines[0].startswith("#version"):
        del lines[0]
    added = vocab.with_name("added_tokens.json")
    return Bpe(
        _check_ids(vocab, read_json(vocab)),
        _check_merges(merges, [line for line in lines if line]),
        [
            added_token(added, text, id, False)
            for text, id in (read_json(added) if added.is_file() else {}).items()
        ],
    )


def _read_tokenizer_json(path: Path) -> Bpe:
    tokenizer = read_json(path)
    model = _object(tokenizer, "model")
    _check_kind(path, tokenizer, model, _object(tokenizer, "pre_tokenizer"))
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError(f"{path}: added_tokens must be a list of objects")
    return Bpe(
        _check_ids(path, model.get("vocab")),
        _check_merges(path, model.get("merges")),
        [
            added_token(path, entry.get("content"), entry.get("id"), entry.get("special", False))
            for entry in added
        ],
    )


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _check_kind(
    path: Path,
    tokenizer: Mapping[str, Any],
    model: Mapping[str, Any],
    pre_tokenizer: Mapping[str, Any],
) -> None:
    """Refuses whatever `tokenizer.ggml.pre = "gpt-2"` does not mean."""
    for key, value, allowed in (
        ("normalizer", tokenizer.get("normalizer"), (None,)),
        ("pre_tokenizer.type", pre_tokenizer.get("type"), ("ByteLevel",)),
        ("pre_tokenizer.use_regex", pre_tokenizer.get("use_regex", True), (True,)),
        ("pre_tokenizer.add_prefix_space", pre_tokenizer.get("add_prefix_space"), (None, False)),
        ("model.type", model.get("type"), ("BPE",)),
        ("model.byte_fallback", model.get("byte_fallback"), (None, False)),
        ("model.ignore_merges", model.get("ignore_merges"), (None, False)),
        ("model.dropout", model.get("dropout"), (None, 0)),
        ("model.continuing_subword_prefix", model.get("continuing_subword_prefix"), (None, "")),
        ("model.end_of_word_suffix", model.get("end_of_word_suffix"), (None, "")),
    ):
        if value not in allowed:
            found = value.get("type", "an object") if isinstance(value, dict) else value
            raise ValueError(
                f"{path}: {key} is {found!r};"
                " only byte-level BPE with the pattern of GPT-2 can be converted"
            )


def _check_ids(path: Path, vocab: object) -> dict[str, int]:
    if not isinstance(vocab, dict) or not all(
        isinstance(id, int) and not isinstance(id, bool) for id in vocab.values()
    ):
        raise ValueError(f"{path}: the vocabulary must give an integer id for each token")
    return dict(vocab)


def _check_merges(path: Path, merges: object) -> list[str]:
    """Merges are "left right" or, since tokenizers 0.20, ["left", "right"]."""
    if not isinstance(merges, list) or not merges:
        raise ValueError(f"{path}: no merges")
    joined = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) and part and " " not in part for part in pair)
        ):
            raise ValueError(f"{path}: malformed merge {merge!r}")
        joined.append(" ".join(pair))
    return joined
