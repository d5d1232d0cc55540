"""Prompts for text between a beginning and an end (fill in the middle)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from h2o_cpp.model.tokenizer import Tokenizer

# The tokens' older and newer names in GGUF files, and their texts in models whose files lack them:
# Qwen, StarCoder and Granite, CodeGemma, DeepSeek, CodeLlama, and GLM.
_PREFIX = (
    ("fim_pre", "prefix"),
    (
        *(
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<\uff5cfim\u2581begin\uff5c>",
            "\u2581<PRE>",
            "<PRE>",
        ),
        "<|code_prefix|>",
    ),
)
_SUFFIX = (
    ("fim_suf", "suffix"),
    (
        *(
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<\uff5cfim\u2581hole\uff5c>",
            "\u2581<SUF>",
            "<SUF>",
        ),
        "<|code_suffix|>",
    ),
)
_MIDDLE = (
    ("fim_mid", "middle"),
    (
        *(
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<\uff5cfim\u2581end\uff5c>",
            "\u2581<MID>",
            "<MID>",
        ),
        "<|code_middle|>",
    ),
)
_FILE = ("fim_sep",), ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_REPOSITORY = ("fim_rep",), ("<|repo_name|>", "<reponame>", "<repo_name>", "<fim-repo>")
_PAD = ("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>")


class Infill(NamedTuple):
    """The tokens of a model that fills in the middle.

    ends: the texts of tokens that also end an output, because another file would follow.
    """

    tokenizer: Tokenizer
    prefix: int
    suffix: int
    middle: int
    file: int | None
    repository: int | None
    ends: dict[int, str]

    @staticmethod
    def of(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> Infill | None:
        """The tokens of a model, by the metadata of its file; None if it has none."""

        def find(kind: tuple[Sequence[str], Sequence[str]]) -> int | None:
            names, texts = kind
            for name in names:
                token = metadata.get(f"tokenizer.ggml.{name}_token_id")
                if isinstance(token, int) and 0 <= token < tokenizer.n_vocab:
                    return token
            for text in texts:
                match tokenizer.split_special(text):
                    case [int() as token]:
                        return token
            return None

        prefix, suffix, middle = find(_PREFIX), find(_SUFFIX), find(_MIDDLE)
        if prefix is None or suffix is None or middle is None:
            return None
        file, repository, pad = find(_FILE), find(_REPOSITORY), find(_PAD)
        ends = {
            token: tokenizer.token_text(token)
            for token in (file, repository, pad)
            if token is not None
        }
        return Infill(tokenizer, prefix, suffix, middle, file, repository, ends)

    def prompt(
        self,
        prefix: str,
        suffix: str,
        *,
        files: Sequence[tuple[str, str]] = (),
        most: int | None = None,
    ) -> list[int]:
        """Tokens after which the model writes what is between prefix and suffix.

        files: names and texts of other files of the project; most: as for Tokenizer.encode().
        """
        parts: list[int | str] = []
        if files and self.repository is not None:
            parts += [self.repository, "myproject\n"]
        for name, text in files:
            if self.file is None:
                parts.append(f"{text}\n\n")
            else:
                parts += [self.file, f"{name}\n{text}"]
        parts += [self.prefix, prefix, self.suffix, suffix, self.middle]
        return self.tokenizer.encode_chat([part for part in parts if part != ""], most=most)
