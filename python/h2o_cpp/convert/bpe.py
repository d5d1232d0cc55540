"""BPE tokenizers from tokenizer.json, or GPT-2's from vocab.json and merges.txt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h2o_cpp.convert.checkpoint import read_json, read_optional_json
from h2o_cpp.convert.pipelines import (
    byte_level_pre,
    is_byte_fallback,
    is_prefix_first,
    sentencepiece_prefix,
)
from h2o_cpp.convert.sentencepiece import scores_from_merges
from h2o_cpp.convert.tokens import AddedToken, Tokens, added_token
from h2o_cpp.model.text_files import read_text


def read_tokenizer_json(path: Path) -> Tokens:
    """Read tokenizer.json: byte-level BPE, or SentencePiece's BPE in HF's form.

    Raises ValueError if it is damaged or llama.cpp has no name for its steps.
    """
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{path}: no model")
    _check_model(path, model)
    ids = _check_ids(path, model.get("vocab"))
    merges = _check_merges(path, model.get("merges"), ids)
    added = added_tokens(path, tokenizer)
    template = _template(path, tokenizer.get("post_processor"))
    if not is_byte_fallback(tokenizer):
        pre = byte_level_pre(path, tokenizer)
        return Tokens("gpt2", pre, ids, added, merges=merges, template=template)
    flags = {"add_space_prefix": sentencepiece_prefix(path, tokenizer)}
    names = {token.text for token in added}
    scores, types = scores_from_merges(path, {text for text in ids if text not in names}, merges)
    return Tokens(
        "llama",
        "default",
        ids,
        added,
        scores=scores,
        types=types,
        flags=flags,
        prefix_first=is_prefix_first(tokenizer),
        template=template,
    )


def read_vocab_and_merges(vocab: Path, merges: Path) -> Tokens:
    """Read GPT-2's byte-level BPE; added_tokens.json next to the files is optional."""
    lines = read_text(merges).split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    ids = _check_ids(vocab, read_json(vocab))
    return Tokens(
        "gpt2",
        "gpt-2",
        ids,
        read_added_tokens(vocab.with_name("added_tokens.json")),
        merges=_check_merges(merges, [line for line in lines if line], ids),
    )


def read_added_tokens(path: Path) -> list[AddedToken]:
    """Read added_tokens.json, {text: id}; an absent file has no tokens."""
    return [added_token(path, text, id, {}) for text, id in read_optional_json(path).items()]


def added_tokens(path: Path, tokenizer: Mapping[str, Any]) -> list[AddedToken]:
    """The added_tokens of tokenizer.json."""
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError(f"{path}: added_tokens must be a list of objects")
    return [added_token(path, entry.get("content"), entry.get("id"), entry) for entry in added]


def _check_model(path: Path, model: Mapping[str, Any]) -> None:
    for key, allowed in (
        ("type", ("BPE",)),
        ("dropout", (None, 0)),
        ("continuing_subword_prefix", (None, "")),
        ("end_of_word_suffix", (None, "")),
    ):
        if model.get(key) not in allowed:
            raise ValueError(
                f"{path}: model.{key} is {model.get(key)!r}; only plain BPE can be converted"
            )


def _check_ids(path: Path, vocab: object) -> dict[str, int]:
    """A vocabulary {text: id}. Raises ValueError for anything else."""
    if not isinstance(vocab, dict) or not all(
        isinstance(id, int) and not isinstance(id, bool) for id in vocab.values()
    ):
        raise ValueError(f"{path}: the vocabulary must give an integer id for each token")
    return dict(vocab)


def _check_merges(path: Path, merges: object, ids: Mapping[str, int]) -> list[str]:
    """Merges as "left right"; since tokenizers 0.20, JSON may have them as lists.

    Raises ValueError for a malformed merge, or one of texts without an id.
    """
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
        for text in (*pair, "".join(pair)):
            if text not in ids:
                raise ValueError(
                    f"{path}: merge {' '.join(pair)!r} needs {text!r}, which has no id"
                )
        joined.append(" ".join(pair))
    return joined


def _template(path: Path, post_processor: object) -> tuple[list[str], list[str]] | None:
    """The tokens that a TemplateProcessing, or one in a Sequence, adds before and after a text."""
    match post_processor:
        case {"type": "Sequence", "processors": list(processors)}:
            templates = [_template(path, processor) for processor in processors]
            return next((template for template in templates if template is not None), None)
        case {"type": "TemplateProcessing", "single": list(parts)}:
            before: list[str] = []
            after: list[str] = []
            place = before
            for part in parts:
                match part:
                    case {"Sequence": _}:
                        place = after
                    case {"SpecialToken": {"id": str(text)}}:
                        place.append(text)
                    case _:
                        raise ValueError(f"{path}: malformed post_processor")
            return before, after
    return None
