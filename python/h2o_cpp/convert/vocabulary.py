"""The vocabulary of a Hugging Face checkpoint as GGUF stores it: BPE, special tokens, padding."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from h2o_cpp.convert.bpe import AddedToken, added_token, read_bpe
from h2o_cpp.convert.checkpoint import Config, read_json

# key of a special token in HF's files -> name in tokenizer.ggml.{name}_token_id
_SPECIAL_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their types by id, merges by rank, and what to do with special tokens."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    special_ids: Mapping[str, int]
    """Ids by GGUF name (bos, eos, unknown, padding) of those that the tokenizer has."""
    add_bos: bool
    chat_template: str | list[dict[str, str]] | None

    def write(self, writer: GGUFWriter) -> None:
        """Adds the tokenizer.* keys to a file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        for name, id in self.special_ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
        writer.add_add_bos_token(self.add_bos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(
    directory: Path, config: Config, *, size: int, add_bos: bool, control_tokens: frozenset[str]
) -> Vocabulary:
    """Reads the tokenizer of a checkpoint and pads its tokens to `size` ids.

    Special tokens come from tokenizer_config.json, else special_tokens_map.json, else (by id)
    config.json. `add_bos` is the default of tokenizer_config.json's add_bos_token, and
    `control_tokens` are control tokens beside those listed as special. Raises FileNotFoundError
    without a tokenizer, ValueError when it is damaged, too large, or not GPT-2's byte-level BPE.
    """
    settings = _Settings(directory)
    bpe = read_bpe(directory)
    ids = dict(bpe.ids)
    types = dict.fromkeys(ids, TokenType.NORMAL)
    for token in (*bpe.added, *settings.added_tokens()):
        if ids.setdefault(token.text, token.id) != token.id:
            raise ValueError(f"{directory}: the added token {token.text!r} has two ids")
        types[token.text] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    types |= dict.fromkeys(control_tokens | settings.special_texts(), TokenType.CONTROL)

    texts = {id: text for text, id in ids.items()}
    if len(texts) < len(ids):
        raise ValueError(f"{directory}: two tokens of the vocabulary share an id")
    if min(texts, default=0) < 0 or max(texts, default=0) >= size:
        raise ValueError(
            f"{directory}: the vocabulary has token ids {min(texts)} to {max(texts)},"
            f" but config.json has vocab_size {size}"
        )
    return Vocabulary(
        tokens=[texts.get(id, f"[PAD{id}]") for id in range(size)],
        types=[types[texts[id]] if id in texts else TokenType.UNUSED for id in range(size)],
        merges=bpe.merges,
        special_ids=dict(settings.special_ids(config, ids, size)),
        add_bos=settings.flag("add_bos_token", add_bos),
        chat_template=settings.chat_template(),
    )


class _Settings:
    """tokenizer_config.json and special_tokens_map.json, both optional."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokenizer_config.json"
        self.config = _read_optional(self.path)
        special = _read_optional(directory / "special_tokens_map.json")
        for key in (*_SPECIAL_KEYS, "additional_special_tokens"):
            if self.config.get(key) is not None:
                special[key] = self.config[key]
        self.special = {key: list(_token_texts(value)) for key, value in special.items()}
        if self.flag("add_prefix_space", False):
            raise ValueError(
                f"{self.path}: add_prefix_space is true;"
                " a GGUF file cannot express this for byte-level BPE"
            )

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if isinstance(value, bool):
            return value
        raise ValueError(f"{self.path}: {key} must be true or false, found {value!r}")

    def added_tokens(self) -> Iterator[AddedToken]:
        """added_tokens_decoder, {"2": {"content": "</s>", "special": true}}."""
        decoder = self.config.get("added_tokens_decoder")
        for key, entry in decoder.items() if isinstance(decoder, dict) else ():
            fields = entry if isinstance(entry, dict) else {}
            id = int(key) if key.isdecimal() else key
            yield added_token(self.path, fields.get("content"), id, fields.get("special", False))

    def special_texts(self) -> frozenset[str]:
        return frozenset(text for texts in self.special.values() for text in texts)

    def special_ids(
        self, config: Config, ids: Mapping[str, int], size: int
    ) -> Iterator[tuple[str, int]]:
        """Pairs of GGUF name and id; the tokenizer's own choice comes before config.json's."""
        for key, name in _SPECIAL_KEYS.items():
            if texts := self.special.get(key):
                if texts[0] not in ids:
                    raise ValueError(
                        f"{self.path.parent}: {key} {texts[0]!r} is not in the vocabulary"
                    )
                yield name, ids[texts[0]]
            elif (id := config.get(f"{key}_id")) is not None:
                if not isinstance(id, int) or not 0 <= id < size:
                    raise ValueError(f"config.json: {key}_id {id!r} is not in the vocabulary")
                yield name, id

    def chat_template(self) -> str | list[dict[str, str]] | None:
        """One Jinja2 template, or a list of {"name", "template"}."""
        template = self.config.get("chat_template")
        if isinstance(template, list) and all(
            isinstance(choice, dict) and all(isinstance(text, str) for text in choice.values())
            for choice in template
        ):
            return template
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{self.path}: chat_template must be a string or a list of templates")
        return template


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_texts(value: object) -> Iterator[str]:
    """The text of a special token, written as "</s>", {"content": "</s>"} or a list of these."""
    match value:
        case str(text) | {"content": str(text)}:
            yield text
        case list(entries):
            for entry in entries:
                yield from _token_texts(entry)
