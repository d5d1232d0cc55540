"""Random vocabularies: tokens equal those of the reference libraries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFace

from support.original_tokenizers import check, check_bytes, original
from support.random_search import examples
from support.vocabularies import sentence_pieces, tokenizer_of

S = "\u2581"
thorough = settings(max_examples=examples(60))
pieces = st.lists(
    st.tuples(
        st.text(f"ab{S} é", min_size=1, max_size=4),
        st.sampled_from([1, 1, 1, 1, 3, 4, 5, 5]),
        st.sampled_from([-0.5, -1.0, -2.0, 0.0, 1.5]),
    ),
    max_size=25,
    unique_by=lambda piece: piece[0].replace(" ", S),
)


@thorough
@given(
    pieces,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.text(f"ab {S}éc<s>", max_size=20), min_size=5, max_size=5),
)
def test_random_sentence_pieces(
    pieces: list[tuple[str, int, float]],
    has_bytes: bool,
    prefix: bool,
    one_space: bool,
    texts: list[str],
) -> None:
    metadata = sentence_pieces(add_space_prefix=prefix, remove_extra_whitespaces=one_space)
    n = 3 + 256 * has_bytes
    for key, column in {"tokens": 0, "token_type": 1, "scores": 2}.items():
        values = metadata[f"tokenizer.ggml.{key}"][:n]
        metadata[f"tokenizer.ggml.{key}"] = values + [piece[column] for piece in pieces]
    ours, theirs = tokenizer_of(metadata), original(metadata)
    check_bytes(ours, theirs)
    for text in texts:
        check(ours, theirs, text)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_added_tokens_of_sentence_pieces(architecture: str) -> None:
    """They divide a text before SentencePiece; those of Phi-3 include the white space after them.

    The reference is tokenizers' BPE with a tokenizer.json like that of Llama 2 and Phi-3.
    """
    added = [("<|x|>", 3), ("</x>", 4), ("<b>", 4), ("<b>a", 4)]
    metadata = sentence_pieces(*added) | {"general.architecture": architecture}
    ours = tokenizer_of(metadata)
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [("a", "b"), (S, "ab"), (f"{S}a", "b"), (S, "a")]
    theirs = HuggingFace(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend(S), normalizers.Replace(" ", S)])
    strips = architecture == "phi3"
    theirs.add_special_tokens(["<s>", AddedToken("<|x|>", rstrip=strips, normalized=False)])
    theirs.add_tokens(
        [AddedToken(text, rstrip=strips, normalized=False) for text, kind in added if kind == 4]
    )

    @thorough
    @given(
        st.lists(st.sampled_from([*(text for text, _ in added), *"<s> |ab \nx/>é", "  ", "<s>"]))
    )
    def check(fragments: list[str]) -> None:
        text = "".join(fragments)
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected

    check()


@thorough
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30),
    st.lists(st.sampled_from(["<b>", "</x>", "ab", "\n\n"]), max_size=3, unique=True),
    st.lists(st.text(f"ab {S}éc\n<>/x", max_size=20), min_size=5, max_size=5),
)
def test_random_merges_of_pieces(
    picks: list[tuple[int, int]], whole: list[str], texts: list[str]
) -> None:
    """Gemma 4's model: merges of pieces with ▁ for a space; bytes where there is no piece."""
    types = {"a": 1, "b": 1, S: 1, "\n": 1, "é": 1}
    merges = []
    for picked in picks:
        left, right = ([*types][i % len(types)] for i in picked)
        if len(left + right) <= 8:
            merges.append((left, right))
            types[left + right] = 1
    types |= dict.fromkeys(whole, 4)  # user-defined: they divide a text
    merges = [
        (left, right) for left, right in merges if {left, right, left + right}.isdisjoint(whole)
    ]
    metadata = sentence_pieces(model="gemma4", merges=[" ".join(merge) for merge in merges])
    for key, values in {"tokens": [*types], "token_type": [*types.values()]}.items():
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:259] + values
    del metadata["tokenizer.ggml.scores"]
    ours = tokenizer_of(metadata)
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    vocabulary = {token: i for token, i in ids.items() if token not in whole}
    theirs = HuggingFace(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    theirs.normalizer = normalizers.Replace(" ", S)
    theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    theirs.add_tokens([AddedToken(text, normalized=False) for text in whole])
    same = {theirs.token_to_id(text): ids[text] for text in whole}
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        tokens = ours.encode(text, add_special=False)
        assert tokens == [same.get(token, token) for token in expected]
        assert ours.decode(tokens) == text.replace(S, " ")


@thorough
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30),
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    st.sampled_from(["gpt-2", "llama-bpe", "gpt-4o", "bloom", "falcon"]),
    st.lists(st.text("abc \n", max_size=20), min_size=5, max_size=5),
)
def test_random_merges(
    picks: list[tuple[int, int]],
    whole: list[str],
    pre: str,
    texts: list[str],
) -> None:
    """c is not a token and is dropped."""
    types = {"a": 1, "b": 1, "\u0120": 1, "\u010a": 1}
    merges = []
    for picked in picks:
        left, right = ([*types][i % len(types)] for i in picked)
        if len(left + right) <= 8:
            merges.append(f"{left} {right}")
            types[left + right] = 1
    types |= dict.fromkeys(whole, 4)  # user-defined
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*types],
        "tokenizer.ggml.token_type": [*types.values()],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    ours, theirs = tokenizer_of(metadata), original(metadata)
    check_bytes(ours, theirs)
    for text in texts:
        check(ours, theirs, text)
