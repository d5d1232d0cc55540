"""llama.cpp loads converted files and agrees with transformers and tokenizers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from h2o_cpp.convert import convert
from support.needs import packages
from support.opt_checkpoint import write_json, write_safetensors
from support.random_models import (
    RECIPES,
    make_model,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from support.rotary_checkpoint import CONFIGS, random_weights
from support.tokenizer_files import NORMAL, PREPEND, read_tokens, write_sentencepiece_json

llama_cpp = pytest.importorskip("llama_cpp", reason="reads converted files with llama.cpp")

TEXTS = [
    "Hello world",
    "  two  spaces,\n\n\tlines and tabs \n",
    "I'll say: don't, WE'VE it's 1234567 3.14",
    "naïve Ærøskøbing Привет 你好世界 🙂👍🏽",
    "",
    " ",
    "x" * 40,
    "def f(x):\n    return x ** 2  # square\n",
]


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("opt")])
@packages("transformers")
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    model = make_model(RECIPES[name], seed=3)
    save_checkpoint(model, tmp_path)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    tokens = random_tokens(seed=4)
    expected = reference_logits(model, tokens)
    llama = llama_cpp.Llama(
        str(tmp_path / "out.gguf"),
        n_ctx=len(tokens),
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    llama.eval(tokens.tolist())
    logits = llama.scores[: len(tokens)]
    llama.close()
    # llama.cpp computes GELU in its tanh form with an f16 table, which differs from the exact
    # function by up to 5e-4; everything else is f32.
    tolerance = 5e-3 if name.startswith("gptneox") else 1e-4
    assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


Encode = Callable[[str], list[int]]


def write_checkpoint(path: Path, size: int) -> None:
    """Write the config and weights of a model with this vocabulary size, without a tokenizer."""
    config = CONFIGS["llama"] | {"vocab_size": size, "num_hidden_layers": 1}
    write_json(path / "config.json", config)
    write_safetensors(path / "model.safetensors", random_weights("llama", config))


def assert_tokens_agree(checkpoint: Path, size: int, encode: Encode) -> None:
    write_checkpoint(checkpoint, size)
    convert(checkpoint, checkpoint / "out.gguf")
    llama = llama_cpp.Llama(str(checkpoint / "out.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=False, special=False) == encode(text), text
    llama.close()


def encoder(tokenizer_json: Path) -> Encode:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("file", "size"), [("smollm2/tokenizer.json", 49152), ("gpt-neox/20B_tokenizer.json", 50432)]
)
def test_byte_level_tokens(shared: Path, tmp_path: Path, file: str, size: int) -> None:
    shutil.copy(shared / "tokenizers" / file, tmp_path / "tokenizer.json")
    assert_tokens_agree(tmp_path, size, encoder(tmp_path / "tokenizer.json"))


def split(numbers: str) -> pre_tokenizers.PreTokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    ("ignore_merges", "numbers", "normalizer"),
    [(True, r"\p{N}{1,3}", None), (False, r"\p{N}", normalizers.NFC())],
    ids=["llama-bpe", "qwen2"],
)
def test_trained_tokens(
    tmp_path: Path, ignore_merges: bool, numbers: str, normalizer: normalizers.Normalizer | None
) -> None:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = split(numbers)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), *TEXTS], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert_tokens_agree(tmp_path, 400, encoder(tmp_path / "tokenizer.json"))


def sentencepiece_encoder(model: Path) -> Encode:
    processor = SentencePieceProcessor(str(model))
    return lambda text: list(processor.Encode(text)) if text else []


def test_sentencepiece_tokens(shared: Path, tmp_path: Path) -> None:
    model = shared / "tokenizers" / "llama2" / "tokenizer.model"
    shutil.copy(model, tmp_path)
    assert_tokens_agree(tmp_path, 32000, sentencepiece_encoder(model))


def test_sentencepiece_tokens_from_tokenizer_json(shared: Path, tmp_path: Path) -> None:
    """The merges are those that HF derives: all pairs that form a piece, ordered by its score."""
    model = shared / "tokenizers" / "llama2"
    vocabulary = read_tokens(model, 32000)
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    merges = [
        [text[:i], text[i:]]
        for text in sorted(vocabulary.tokens, key=lambda text: -vocabulary.scores[ids[text]])
        if vocabulary.types[ids[text]] == NORMAL
        for i in range(1, len(text))
        if text[:i] in ids and text[i:] in ids
    ]
    write_sentencepiece_json(
        tmp_path,
        added_tokens=[],
        normalizer=PREPEND,
        pre_tokenizer=None,
        post_processor=None,
        model__vocab=ids,
        model__merges=merges,
    )
    tokenizer_json = tmp_path / "tokenizer.json"
    assert_tokens_agree(tmp_path, 32000, encoder(tokenizer_json))
    assert_tokens_agree(tmp_path, 32000, sentencepiece_encoder(model / "tokenizer.model"))
