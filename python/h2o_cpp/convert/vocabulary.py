"""A checkpoint's vocabulary as GGUF stores it: types, special tokens, padding."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFValueType, GGUFWriter, TokenType

from h2o_cpp.convert.config import Config
from h2o_cpp.convert.tokenizer_settings import TokenizerSettings, end_ids
from h2o_cpp.convert.tokens import AddedToken, Tokens, read_tokens

# llama.cpp's scores of added tokens and padding
_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0

_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endofturn|>", "<turn|>")

# These end an output without a key, in llama.cpp too (kEnds in cpp/text/tokenizer/vocabulary.cpp)
_KNOWN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|flush|>", "<|calls|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>"),
    *("<turn|>", "<|tool_response>"),
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their types by id, and the other tokenizer.* keys."""

    model: str
    pre: str
    tokens: list[str]
    types: list[TokenType]
    scores: list[float]
    """By id, for models "llama" and "t5"."""
    merges: list[str]
    """By rank, for models "gpt2" and "gemma4"."""
    special_ids: Mapping[str, int]
    """Ids by GGUF name (bos, eos, eot, eom, unknown, padding)."""
    suppressed: list[int]
    """Tokens that are never sampled."""
    flags: Mapping[str, bool]
    chat_templates: Mapping[str, str]
    """By name; "default" is the one without a name in the file."""
    charsmap: bytes
    """Replacements before tokenization, for model "t5"."""
    notes: list[str]
    """The parts of the checkpoint that the file cannot express."""

    def write(self, writer: GGUFWriter) -> None:
        """Add the tokenizer.* keys to a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.model in ("llama", "t5"):
            writer.add_token_scores(self.scores)
        if self.charsmap:
            writer.add_precompiled_charsmap(self.charsmap)
        writer.add_token_types(self.types)
        if self.model in ("gpt2", "gemma4"):
            key = "tokenizer.ggml.merges"  # may be empty: a vocabulary of characters
            writer.add_key_value(key, self.merges, GGUFValueType.ARRAY, GGUFValueType.STRING)
        for name, id in self.special_ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
        if self.suppressed:
            key, array = "tokenizer.ggml.suppress_tokens", GGUFValueType.ARRAY
            writer.add_key_value(key, self.suppressed, array, GGUFValueType.INT32)
        for name, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        for name, template in self.chat_templates.items():
            key = "tokenizer.chat_template"
            writer.add_string(key if name == "default" else f"{key}.{name}", template)
        if named := sorted({*self.chat_templates} - {"default"}):
            writer.add_array("tokenizer.chat_templates", named)

    @property
    def chat_template(self) -> str | None:
        """The default template."""
        return self.chat_templates.get("default")


def read_vocabulary(
    directory: Path,
    config: Config,
    *,
    size: int,
    add_bos: bool,
    control_tokens: frozenset[str],
    visible_tokens: frozenset[str] = frozenset(),
    piece_merges: bool = False,
) -> Vocabulary:
    """Read the tokenizer of a checkpoint and pad its tokens to `size` ids.

    Special tokens come from tokenizer_config.json, else special_tokens_map.json, else (by id)
    config.json. Further end tokens come from generation_config.json, else config.json. `add_bos`:
    the default of add_bos_token for byte-level BPE. `control_tokens`: control tokens besides those
    listed as special, of which `visible_tokens` are text. `piece_merges`: see read_tokens.
    Added tokens beyond `size`, which the model cannot embed, are omitted, with a note.
    Raises FileNotFoundError without a tokenizer, ValueError when it is damaged, too large, or of
    an unknown kind.
    """
    settings = TokenizerSettings(directory)
    config = settings.with_generation_config(config)
    tokens = read_tokens(directory, piece_merges=piece_merges)
    ids = dict(tokens.ids)
    types = dict.fromkeys(ids, TokenType.NORMAL) | dict(tokens.types)
    scores = dict(tokens.scores)
    added = [*tokens.added, *settings.added_tokens()]
    beyond = frozenset(token.text for token in added if token.id >= size) - ids.keys()
    for token in added:
        if token.text in beyond:
            continue
        if ids.setdefault(token.text, token.id) != token.id:
            raise ValueError(f"{directory}: the added token {token.text!r} has two ids")
        types[token.text] = _added_type(token)
        scores[token.text] = _ADDED_SCORE
    if words := sorted({token.text for token in added if token.single_word}):
        raise ValueError(
            f"{directory}: the added token {_and_others(words)} has single_word, so it counts only"
            " where it stands alone; a GGUF file cannot express this"
        )
    types |= dict.fromkeys(control_tokens | settings.special_texts(), TokenType.CONTROL)
    types |= dict.fromkeys(visible_tokens & ids.keys(), TokenType.USER_DEFINED)

    texts = {id: text for text, id in ids.items()}
    if len(texts) < len(ids):
        raise ValueError(f"{directory}: two tokens of the vocabulary share an id")
    if min(texts, default=0) < 0 or max(texts, default=0) >= size:
        raise ValueError(
            f"{directory}: the vocabulary has token ids {min(texts)} to {max(texts)},"
            f" but config.json has vocab_size {size}"
        )
    special_ids = {**tokens.special_ids, **dict(settings.special_ids(config, ids, size, beyond))}
    for text in _END_OF_TURN:
        if types.get(text) is TokenType.CONTROL and ids.get(text) != special_ids.get("eos"):
            special_ids.setdefault("eot", ids[text])
    notes = _name_ends(end_ids(config), texts, types, special_ids)
    notes += _beyond_note(beyond, size)
    # The engine reads Phi-3's tokens as transformers does.
    is_phi3 = config.get("model_type") == "phi3" and tokens.model == "llama"
    if not is_phi3 and tokens.model not in ("bert", "t5"):  # which drop white space
        notes += _strip_note(token for token in added if token.text not in beyond)
    flags = _flags(directory, settings, tokens, ids, special_ids, add_bos)
    if tokens.prefix_first and flags["add_space_prefix"]:
        notes.append(
            "transformers adds a space only to text at the start, not to text after a special"
            " token; a GGUF file cannot express this, so the model reads one there too"
        )
    return Vocabulary(
        model=tokens.model,
        pre=tokens.pre,
        tokens=[
            _stored_text(tokens, types, texts[i]) if i in texts else f"[PAD{i}]"
            for i in range(size)
        ],
        types=[types[texts[i]] if i in texts else TokenType.UNUSED for i in range(size)],
        scores=[scores.get(texts[i], 0.0) if i in texts else _PADDING_SCORE for i in range(size)],
        merges=tokens.merges,
        special_ids=special_ids,
        suppressed=_suppressed(config, size),
        flags=flags,
        chat_templates=settings.chat_templates(),
        charsmap=tokens.charsmap,
        notes=notes,
    )


def _suppressed(config: Config, size: int) -> list[int]:
    ids = config.get("suppress_tokens")
    return [id for id in ids if type(id) is int and 0 <= id < size] if isinstance(ids, list) else []


def _added_type(token: AddedToken) -> TokenType:
    """Does as llama.cpp's converter: some control tokens are not marked as special."""
    control = token.special or token.text in ("<pad>", "<mask>")
    for bar in ("|", "\uff5c"):  # full-width in DeepSeek's tokens
        control |= token.text.startswith(f"<{bar}") and token.text.endswith(f"{bar}>")
    return TokenType.CONTROL if control else TokenType.USER_DEFINED


def _name_ends(
    ends: Iterable[int],
    texts: Mapping[int, str],
    types: dict[str, TokenType],
    special_ids: dict[str, int],
) -> list[str]:
    """Give names to tokens that end an output; returns notes about those without one."""
    notes = []
    for id in ends:
        text = texts.get(id, "")
        if types.get(text) not in (TokenType.CONTROL, TokenType.USER_DEFINED):
            continue  # such as a default of the library
        types[text] = TokenType.CONTROL
        if text in _KNOWN_ENDS or id in (special_ids["eos"], special_ids.get("eot")):
            continue
        if special_ids.setdefault("eom" if "eot" in special_ids else "eot", id) != id:
            notes.append(
                f"{text} will not end an output: a GGUF file names at most three tokens that do"
            )
    return notes


def _beyond_note(beyond: Iterable[str], size: int) -> Iterator[str]:
    if texts := sorted(beyond):
        yield f"the model has {size} tokens, without {_and_others(texts)}: it reads them as text"


def _strip_note(added: Iterable[AddedToken]) -> Iterator[str]:
    texts = list(dict.fromkeys(token.text for token in added if token.strips))
    if texts:
        yield (
            f"transformers drops white space beside {_and_others(texts)};"
            " a GGUF file cannot express this, so the model reads it"
        )


def _and_others(texts: Sequence[str]) -> str:
    others = f" and {len(texts) - 1} other{'s' * (len(texts) > 2)}" if texts[1:] else ""
    return f"{texts[0]}{others}"


def _stored_text(tokens: Tokens, types: Mapping[str, TokenType], text: str) -> str:
    """Does as llama.cpp's converter: text matched before BPE is stored with spaces, and pieces
    that begin a word have a space in front instead of others having ##."""
    if tokens.model == "llama" and types[text] is TokenType.USER_DEFINED:
        return text.replace("▁", " ")
    if tokens.model == "bert" and types[text] is TokenType.NORMAL:
        return text[2:] if text.startswith("##") else f"▁{text}"
    return text


def _flags(
    directory: Path,
    settings: TokenizerSettings,
    tokens: Tokens,
    ids: Mapping[str, int],
    special_ids: dict[str, int],
    add_bos: bool,
) -> dict[str, bool]:
    """add_bos_token, add_eos_token if true, and the tokenizer's own flags."""
    flags = dict(tokens.flags)
    before, after = tokens.template or (None, None)
    for name, texts, default in (
        ("bos", before, add_bos or tokens.model != "gpt2"),
        ("eos", after, False),
    ):
        added = [ids.get(text) for text in texts or ()]
        match added:
            case [int(id)] if name == "eos" and special_ids.get("eos", id) != id:
                # llama.cpp's converter does so: the added token is eos, and the other ends a turn.
                if special_ids.get("eot", id) == id:
                    special_ids["eot"] = special_ids["eos"]
                special_ids["eos"] = id
        if texts and added != [special_ids.get(name)]:
            raise ValueError(
                f"{directory}: the tokenizer adds {' '.join(texts)} to a text,"
                f" expected only its {name}_token"
            )
        setting = settings.flag(f"add_{name}_token")
        if setting and name not in special_ids:
            raise ValueError(
                f"{settings.path}: add_{name}_token is true, but there is no {name}_token"
            )
        if setting is None:
            setting = (default if texts is None else bool(texts)) and name in special_ids
        if setting or name == "bos":
            flags[f"add_{name}_token"] = setting

    prefix = settings.flag("add_prefix_space")
    if tokens.model == "gpt2" and prefix:
        raise ValueError(
            f"{settings.path}: add_prefix_space is true;"
            " a GGUF file cannot express this for byte-level BPE"
        )
    if tokens.model != "gpt2" and prefix is not None:
        flags["add_space_prefix"] = prefix
    return flags
