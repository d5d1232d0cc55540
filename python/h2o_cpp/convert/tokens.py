"""The tokens in a checkpoint's tokenizer files: byte-level BPE and SentencePiece's BPE."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf import TokenType

from h2o_cpp.convert.checkpoint import read_json, read_optional_json
from h2o_cpp.convert.pipelines import (
    byte_level_pre,
    is_prefix_first,
    normalizer_flags,
    sentencepiece_prefix,
    unigram_steps,
    word_piece_flags,
)
from h2o_cpp.files.text_files import read_text


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched before BPE; special ones are not matched in text."""

    text: str
    id: int
    special: bool
    single_word: bool = False
    """Whether it counts only where it stands alone."""
    strips: bool = False
    """Whether it includes the white space before or after it, which GGUF cannot express."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a tokenizer; added tokens need not be in `ids`.

    Texts of byte-level BPE ("gpt2") use GPT-2's printable form of bytes (Ġ is a space), those of
    SentencePiece ("llama") ▁ for a space, and those of WordPiece ("bert") ## within a word.
    """

    model: str
    """tokenizer.ggml.model."""
    pre: str
    """tokenizer.ggml.pre: the pre-tokenizer."""
    ids: dict[str, int]
    added: list[AddedToken]
    merges: list[str] = field(default_factory=list)
    """Merges of gpt2 and gemma4: "left right" in order of rank."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores of t5; and of llama, where the merge to the piece of highest score is applied
    first."""
    types: Mapping[str, TokenType] = field(default_factory=dict)
    """Types of tokens that are not normal, without `added`."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Default ids by GGUF name (bos, eos, unknown, padding)."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """tokenizer.ggml.{key}, such as add_space_prefix and normalizer.lowercase."""
    prefix_first: bool = False
    """Whether a space is put only before the first text: Metaspace with the scheme "first"."""
    charsmap: bytes = b""
    """tokenizer.ggml.precompiled_charsmap, for model "t5"."""
    template: tuple[list[str], list[str]] | None = None
    """Tokens that the tokenizer adds before and after a text, if its file has a template."""


def read_tokens(directory: Path, *, piece_merges: bool = False) -> Tokens:
    """Read a checkpoint's tokens. Prefers tokenizer.model, from which tokenizer.json is made.

    piece_merges: SentencePiece's BPE keeps its merges, as model "gemma4"; otherwise its pieces have
        scores, as model "llama".

    Raises FileNotFoundError without a tokenizer, and ValueError if it is damaged, no BPE, or its
    steps have no name in llama.cpp.
    """
    model, tokenizer = directory / "tokenizer.model", directory / "tokenizer.json"
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if model.is_file():
        added = _read_added_tokens(directory / "added_tokens.json")
        if not tokenizer.is_file():
            return _read_sentencepiece(model, added)
        same = read_json(tokenizer)
        if not _is_sentencepiece(model):
            return _read_tokenizer_json(tokenizer)
        tokens = _read_sentencepiece(model, added + _added_tokens(tokenizer, same))
        return replace(tokens, prefix_first=is_prefix_first(same))
    if tokenizer.is_file():
        return _read_tokenizer_json(tokenizer, piece_merges)
    if vocab.is_file() and merges.is_file():
        return _read_vocab_and_merges(vocab, merges)
    if (directory / "vocab.txt").is_file():
        return _read_vocab_txt(directory)
    raise FileNotFoundError(
        f"{directory}: no tokenizer (tokenizer.model, tokenizer.json, vocab.txt, or vocab.json and"
        " merges.txt)"
    )


def added_token(path: object, text: object, id: object, fields: Mapping[str, Any]) -> AddedToken:
    """An added token from the JSON file `path`. Raises ValueError if it is malformed."""
    special, lstrip, rstrip, single = (
        fields.get(key, False) for key in ("special", "lstrip", "rstrip", "single_word")
    )
    if isinstance(text, str) and isinstance(id, int) and isinstance(special, bool):
        strips = lstrip is True or rstrip is True
        return AddedToken(text, id, special, single_word=single is True, strips=strips)
    raise ValueError(f"{path}: malformed added token {text!r} with id {id!r}")


def _read_tokenizer_json(path: Path, piece_merges: bool = False) -> Tokens:
    """Read tokenizer.json: byte-level BPE, or SentencePiece's BPE in HF's form.

    Raises ValueError if it is damaged or llama.cpp has no name for its steps.
    """
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{path}: no model")
    if model.get("type") == "WordPiece":
        return _read_word_pieces(path, tokenizer)
    if model.get("type") == "Unigram":
        return _read_unigram(path, tokenizer)
    _check_model(path, model)
    ids = _check_ids(path, model.get("vocab"))
    merges = _check_merges(path, model.get("merges", []), ids)
    added = _added_tokens(path, tokenizer)
    template = _template(path, tokenizer.get("post_processor"))
    if model.get("byte_fallback") is not True:  # true: characters without a token become bytes
        pre = byte_level_pre(path, tokenizer)
        return Tokens("gpt2", pre, ids, added, merges=merges, template=template)
    flags = {"add_space_prefix": sentencepiece_prefix(path, tokenizer)}
    names = {token.text for token in added}
    texts = {text for text in ids if text not in names}
    scores: dict[str, float] = {}
    if piece_merges:
        types = _byte_types(path, texts)
    else:
        scores, types = _scores_from_merges(path, texts, merges)
    return Tokens(
        "gemma4" if piece_merges else "llama",
        "default",
        ids,
        added,
        merges=merges if piece_merges else [],
        scores=scores,
        types=types,
        flags=flags,
        prefix_first=is_prefix_first(tokenizer),
        template=template,
    )


def _read_word_pieces(path: Path, tokenizer: Mapping[str, Any]) -> Tokens:
    """Read BERT's tokenizer from tokenizer.json."""
    ids = _check_ids(path, tokenizer["model"].get("vocab"))
    added = _added_tokens(path, tokenizer)
    flags = word_piece_flags(path, tokenizer)
    normalized = [
        entry["content"]
        for entry in tokenizer.get("added_tokens") or ()
        if entry.get("normalized") is True and entry.get("special") is not True
    ]
    if normalized and any(flags.values()):
        raise ValueError(
            f"{path}: the added token {normalized[0]!r} is normalized, as is the text that it"
            " matches; a GGUF file cannot express this"
        )
    template = _template(path, tokenizer.get("post_processor"))
    return _word_pieces(path, ids, added, flags, template or (["[CLS]"], ["[SEP]"]))


def _read_unigram(path: Path, tokenizer: Mapping[str, Any]) -> Tokens:
    """Read SentencePiece's unigram model in HF's form, such as XLM-RoBERTa's."""
    model = tokenizer["model"]
    scores: dict[str, float] = {}
    for entry in model.get("vocab") or ():
        match entry:
            case [str(text), int() | float() as score] if text not in scores:
                scores[text] = float(score)
            case _:
                raise ValueError(f"{path}: malformed or repeated piece {entry!r}")
    unknown = model.get("unk_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(scores) or model.get("byte_fallback"):
        raise ValueError(f"{path}: unk_id is {unknown!r}, or characters become bytes")
    charsmap, flags = unigram_steps(path, tokenizer)
    ids = {text: id for id, text in enumerate(scores)}
    template = _template(path, tokenizer.get("post_processor"))
    before, after = template or ([], [])
    named = (("bos", before), ("eos", after), ("seperator", after if before else []))
    special_ids = {name: ids[texts[0]] for name, texts in named if texts and texts[0] in ids}
    special_ids["unknown"] = unknown
    return Tokens(
        "t5",
        "default",
        ids,
        _added_tokens(path, tokenizer),
        scores=scores,
        types={list(ids)[unknown]: TokenType.UNKNOWN},
        special_ids=special_ids,
        flags=flags,
        template=template,
        charsmap=charsmap,
    )


def _read_vocab_txt(directory: Path) -> Tokens:
    """Read BERT's vocab.txt, a token in each line; its steps are in tokenizer_config.json."""
    path = directory / "vocab.txt"
    texts = read_text(path).split("\n")
    if texts[-1] == "":
        texts.pop()
    ids = {text.rstrip("\r"): id for id, text in enumerate(texts)}
    if len(ids) < len(texts):
        raise ValueError(f"{path}: two tokens are the same")
    config = read_optional_json(directory / "tokenizer_config.json")
    lower = config.get("do_lower_case", True)
    strips = config.get("strip_accents")
    chinese = config.get("tokenize_chinese_chars", True)
    normalizer = {
        "lowercase": lower,
        "strip_accents": strips,
        "handle_chinese_chars": chinese,
    }
    added = [
        AddedToken(text, ids[text], special=True)
        for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        if text in ids
    ]
    flags = normalizer_flags(path, normalizer)
    return _word_pieces(path, ids, added, flags, (["[CLS]"], ["[SEP]"]))


def _word_pieces(
    path: Path,
    ids: dict[str, int],
    added: list[AddedToken],
    flags: Mapping[str, bool],
    template: tuple[list[str], list[str]],
) -> Tokens:
    known = {**ids, **{token.text: token.id for token in added}}
    match template:
        case [str(first)], [str(last)] if first in known and last in known:
            special_ids = {"bos": known[first], "eos": known[last], "seperator": known[last]}
        case _:
            raise ValueError(f"{path}: expected one token before a text and one after it")
    for name, text in (("unknown", "[UNK]"), ("mask", "[MASK]")):
        if text in known:
            special_ids[name] = known[text]
    return Tokens(
        "bert", "default", ids, added, special_ids=special_ids, flags=flags, template=template
    )


def _read_vocab_and_merges(vocab: Path, merges: Path) -> Tokens:
    """Read GPT-2's byte-level BPE; added_tokens.json next to the files is optional."""
    lines = read_text(merges).split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    ids = _check_ids(vocab, read_json(vocab))
    return Tokens(
        "gpt2",
        "gpt-2",
        ids,
        _read_added_tokens(vocab.with_name("added_tokens.json")),
        merges=_check_merges(merges, [line for line in lines if line], ids),
    )


def _read_added_tokens(path: Path) -> list[AddedToken]:
    """Read added_tokens.json, {text: id}; an absent file has no tokens."""
    return [added_token(path, text, id, {}) for text, id in read_optional_json(path).items()]


def _added_tokens(path: Path, tokenizer: Mapping[str, Any]) -> list[AddedToken]:
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
        value = model.get(key)
        if key == "type" and value is None and "merges" in model:
            continue  # written by tokenizers before 0.9
        if value not in allowed:
            raise ValueError(f"{path}: model.{key} is {value!r}; only plain BPE can be converted")


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
    if not isinstance(merges, list):
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
    """The tokens that a post-processor, or one in a Sequence, adds before and after a text."""
    match post_processor:
        case {
            "type": "RobertaProcessing" | "BertProcessing",
            "cls": [str(first), _],
            "sep": [str(last), _],
        }:
            return [first], [last]
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


def _read_sentencepiece(path: Path, added: list[AddedToken]) -> Tokens:
    """Read tokenizer.model. Raises ValueError if it is damaged or not a BPE of plain text."""
    model = _parse_sentencepiece(path)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    for value, why in (
        (trainer.model_type != trainer.BPE, "it is not a BPE model"),
        (trainer.treat_whitespace_as_suffix, "it puts spaces at the ends of words"),
        (normalizer.precompiled_charsmap, "it normalizes characters"),
        (not normalizer.escape_whitespaces, "it keeps spaces"),
    ):
        if value:
            raise ValueError(f"{path}: {why}; a GGUF file of model `llama` cannot express this")
    ids = {piece.piece: id for id, piece in enumerate(model.pieces)}
    if len(ids) < len(model.pieces):
        raise ValueError(f"{path}: two pieces are the same")
    # The types have the same numbers in GGUF.
    types = {piece.piece: TokenType(piece.type) for piece in model.pieces}
    _check_bytes(path, types)
    flags = {"add_space_prefix": normalizer.add_dummy_prefix}
    if normalizer.remove_extra_whitespaces:
        flags["remove_extra_whitespaces"] = True
    special_ids = {
        "unknown": trainer.unk_id,
        "bos": trainer.bos_id,
        "eos": trainer.eos_id,
        "padding": trainer.pad_id,
    }
    return Tokens(
        "llama",
        "default",
        ids,
        added,
        scores={piece.piece: piece.score for piece in model.pieces},
        types=types,
        # Missing tokens have id -1.
        special_ids={name: id for name, id in special_ids.items() if 0 <= id < len(ids)},
        flags=flags,
    )


def _is_sentencepiece(path: Path) -> bool:
    """Whether tokenizer.model is SentencePiece's, rather than the ranks of tiktoken."""
    try:
        return len(_parse_sentencepiece(path).pieces) > 0
    except ValueError:
        return False


def _parse_sentencepiece(path: Path) -> Any:
    """The ModelProto in a file.

    SentencePieceProcessor does not expose the model's type, its normalization or user-defined
    pieces; the protocol buffers do, and need `protobuf`.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        model = ModelProto.FromString(path.read_bytes())
    except (DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable SentencePiece model ({error})") from error
    for id, piece in enumerate(model.pieces):
        if not isinstance(piece.piece, str):  # protobuf returns invalid UTF-8 as bytes
            raise ValueError(
                f"{path}: not a readable SentencePiece model (piece {id} is not UTF-8)"
            )
    return model


def _scores_from_merges(
    path: Path, texts: AbstractSet[str], merges: Sequence[str]
) -> tuple[dict[str, float], dict[str, TokenType]]:
    """Scores and types with which SentencePiece merges in the same order as BPE with `merges`.

    BPE applies the listed merge of lowest rank; SentencePiece the merge to the piece of highest
    score, listed or not. They agree if every way to form a piece is listed, consecutively.
    Raises ValueError otherwise.
    """
    if not merges:
        raise ValueError(f"{path}: no merges")
    scores: dict[str, float] = {}
    last = None
    for merge in merges:
        piece = merge.replace(" ", "", 1)
        if piece != last and piece in scores:
            raise ValueError(f"{path}: the merges to {piece!r} are not of one rank")
        scores.setdefault(piece, float(-len(scores)))
        last = piece

    types = _byte_types(path, texts)
    listed = set(merges)
    for piece in texts - types.keys():
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            # SentencePiece begins with single characters, whether or not they are pieces.
            mergeable = all(part in texts or len(part) == 1 for part in (left, right))
            if mergeable and f"{left} {right}" not in listed:
                raise ValueError(f"{path}: token {piece!r} has no merge of {left!r} and {right!r}")
    worst = float(-len(scores))  # never compared: only merges form these pieces
    return {text: scores.get(text, worst) for text in texts}, types


def _byte_types(path: Path, texts: AbstractSet[str]) -> dict[str, TokenType]:
    """The types of the tokens for bytes. Raises ValueError unless there is one for every byte."""
    types = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    types = {text: type for text, type in types.items() if text in texts}
    _check_bytes(path, types)
    return types


def _check_bytes(path: Path, types: Mapping[str, TokenType]) -> None:
    if list(types.values()).count(TokenType.BYTE) != 256:
        raise ValueError(f"{path}: not every byte has a token for characters without one")
