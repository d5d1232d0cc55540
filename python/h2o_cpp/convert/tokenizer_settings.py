"""The tokenizer's settings in a checkpoint, besides its tokens."""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from h2o_cpp.convert.checkpoint import read_optional_json
from h2o_cpp.convert.config import Config
from h2o_cpp.convert.tokens import AddedToken, added_token
from h2o_cpp.files.text_files import read_text

# key of a special token in HF's files -> name in tokenizer.ggml.{name}_token_id
_SPECIAL_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_OTHER_SPECIAL_KEYS = ("additional_special_tokens", "extra_special_tokens")


class TokenizerSettings:
    """tokenizer_config.json and other files, all of which are optional."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokenizer_config.json"
        self._config = read_optional_json(self.path)
        special = read_optional_json(directory / "special_tokens_map.json")
        for key in (*_SPECIAL_KEYS, *_OTHER_SPECIAL_KEYS):
            if self._config.get(key) is not None:
                special[key] = self._config[key]
        self._special = {key: list(_token_texts(value)) for key, value in special.items()}

    def with_generation_config(self, config: Config) -> Config:
        """config.json with the eos_token_id and suppress_tokens of generation_config.json."""
        file = self.path.with_name("generation_config.json")
        generation, changed = read_optional_json(file), dict(config)
        for key in ("eos_token_id", "suppress_tokens"):
            ids = generation.get(key)
            if not isinstance(ids, int | list | None):
                raise ValueError(f"{file}: {key} is {ids!r}, expected an id or a list of ids")
            if ids not in (None, []):
                changed[key] = ids
        return changed

    def flag(self, key: str) -> bool | None:
        """A setting such as add_bos_token; None if it is missing."""
        value = self._config.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise ValueError(f"{self.path}: {key} must be true or false, found {value!r}")

    def added_tokens(self) -> Iterator[AddedToken]:
        """added_tokens_decoder, {"2": {"content": "</s>", "special": true}}."""
        decoder = self._config.get("added_tokens_decoder")
        for key, entry in decoder.items() if isinstance(decoder, dict) else ():
            fields = entry if isinstance(entry, dict) else {}
            id = int(key) if key.isdecimal() else key
            yield added_token(self.path, fields.get("content"), id, fields)

    def special_texts(self) -> frozenset[str]:
        """The texts of all special tokens."""
        return frozenset(text for texts in self._special.values() for text in texts)

    def special_ids(
        self, config: Config, ids: Mapping[str, int], size: int, beyond: AbstractSet[str]
    ) -> Iterator[tuple[str, int]]:
        """GGUF names and ids; the tokenizer's settings take precedence over config.json.

        beyond: added tokens that the model does not have.
        """
        for key, name in _SPECIAL_KEYS.items():
            texts = self._special.get(key)
            if texts and texts[0] not in beyond:
                if texts[0] not in ids and name in ("unknown", "padding"):
                    continue  # transformers adds it, beyond what the model was trained with
                if texts[0] not in ids:
                    raise ValueError(
                        f"{self.path.parent}: {key} {texts[0]!r} is not in the vocabulary"
                    )
                yield name, ids[texts[0]]
            elif (id := config.get(f"{key}_id")) is not None:
                first = id[0] if isinstance(id, list) and id else id
                if isinstance(first, int) and 0 <= first < size:
                    yield name, first
                elif name != "padding":  # which has no effect here; -1 in old checkpoints
                    raise ValueError(f"config.json: {key}_id {id!r} is not in the vocabulary")

    def chat_templates(self) -> dict[str, str]:
        """Jinja2 templates by name: "default", and others such as "tool_use"."""
        file = self.path.with_name("chat_template.jinja")
        folder = self.path.with_name("additional_chat_templates")
        files = {"default": file} if file.is_file() else {}
        files |= {re.sub(r"\W", "_", path.stem): path for path in sorted(folder.glob("*.jinja"))}
        if files:
            return {name: read_text(path) for name, path in files.items()}
        given = self._config.get("chat_template")
        if given is None:  # beside an encoder of images, it may be in a file of its own
            given = read_optional_json(file.with_suffix(".json")).get("chat_template")
        if given is None:
            return {}
        templates: dict[str, str] = {}
        for one in given if isinstance(given, list) else [{"name": "default", "template": given}]:
            match one:
                case {"name": str(name), "template": str(template)}:
                    templates[re.sub(r"\W", "_", name)] = template
                case _:
                    raise ValueError(
                        f"{self.path}: chat_template must be a string or a list of templates"
                    )
        return templates


def end_ids(config: Config) -> list[int]:
    """eos_token_id: one id, or a list of several."""
    ids = config.get("eos_token_id")
    return [id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)]


def _token_texts(value: object) -> Iterator[str]:
    """The text of a special token, given as "</s>", {"content": "</s>"} or several of these."""
    match value:
        case str(text) | {"content": str(text)}:
            yield text
        case list(entries):
            for entry in entries:
                yield from _token_texts(entry)
        case dict(named):
            for entry in named.values():
                yield from _token_texts(entry)
