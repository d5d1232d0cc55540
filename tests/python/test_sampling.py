"""Sampling options and seeds, by their effect on outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator, _core
from h2o_cpp.generation.request import StreamOptions
from support.background import PROMPT
from support.changed_gguf import changed
from support.generating import PLAIN, generate

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, threads=1)


def mass_of_more_likely(p: Floats) -> Floats:
    """For each token, the total probability of all tokens that are more likely."""
    order = np.argsort(-p)
    mass = np.empty_like(p)
    mass[order] = np.cumsum(p[order]) - p[order]
    return mass


def test_documented_defaults() -> None:
    """The docstring of Generator.stream lists all options with the defaults of the core."""
    defaults = dict.fromkeys(("max_tokens", "seed", "stop", "constraint", "protect"), "None")
    defaults |= dict.fromkeys(("logit_bias", "dry_sequence_breakers", "samplers"), "None")
    defaults |= dict.fromkeys(("schema", "grammar", "regex", "choice"), "None")
    defaults |= {"ignore_eos": "False", "parse_special": "False", "draft": "True"}
    sampling = _core.Sampling()
    for name in StreamOptions.__annotations__.keys() - defaults:
        defaults[name] = f"{getattr(sampling, name):.6g}"
    defaults["repeat_penalty"] += ".0"
    assert defaults.keys() == StreamOptions.__annotations__.keys()
    assert dict(re.findall(r"(\w+)=([-\w.]+)", str(Generator.stream.__doc__))) == defaults


class TestSampling:
    def test_greedy_takes_the_most_likely_token(self, generator: Generator) -> None:
        tokens = generate(generator, temperature=0)
        assert tokens == generate(generator, temperature=0, seed=1)
        prompt = generator.tokenize(PROMPT)
        logits = generator.logits(prompt + tokens)[len(prompt) - 1 : -1]
        # Generation and logits() round differently, so a tie may go either way.
        margin = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
        assert margin.max() < 1e-2

    def test_tokens_that_the_file_suppresses_are_not_sampled(
        self, generator: Generator, tiny_opt: Path, tmp_path: Path
    ) -> None:
        """A bias does not matter; ids beyond the vocabulary are ignored."""
        first = generate(generator, temperature=0)[0]
        second = generate(generator, temperature=0, logit_bias={first: -math.inf})[0]
        ids = np.array([second, first, first, -1, 2**30]).tolist()
        keys = {"tokenizer.ggml.suppress_tokens": (ids, GGUFValueType.ARRAY)}
        file = changed(tiny_opt, tmp_path / "m.gguf", keys, {})
        biases = {first: -math.inf, second: -math.inf}
        expected = generate(generator, temperature=0.8, seed=3, logit_bias=biases)
        with Generator(file, threads=1) as suppressing:
            found = generate(suppressing, temperature=0.8, seed=3, logit_bias={first: 50.0})
        assert found == expected

    @pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
    def test_options_that_keep_only_the_most_likely_token(
        self, generator: Generator, options: dict[str, Any]
    ) -> None:
        greedy = generate(generator, temperature=0)
        assert generate(generator, temperature=5, **(PLAIN | options)) == greedy

    @pytest.mark.parametrize(
        ("options", "allowed"),
        [
            ({"top_k": 3}, lambda p: p >= np.sort(p)[-3]),
            ({"min_p": 0.3}, lambda p: p >= 0.3 * p.max()),
            ({"top_p": 0.5}, lambda p: mass_of_more_likely(p) < 0.5),
        ],
        ids=["top_k", "min_p", "top_p"],
    )
    def test_options_restrict_tokens(
        self,
        generator: Generator,
        options: dict[str, Any],
        allowed: Callable[[Floats], NDArray[np.bool_]],
    ) -> None:
        temperature, prompt = 1.5, generator.tokenize(PROMPT)

        def forbidden(tokens: list[int]) -> int:
            logits = generator.logits(prompt + tokens)[len(prompt) - 1 : -1].astype(float)
            p = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
            p /= p.sum(axis=1, keepdims=True)
            return sum(not allowed(row)[t] for row, t in zip(p, tokens, strict=True))

        plain: dict[str, Any] = {"temperature": temperature, "seed": 5, **PLAIN}
        tokens = generate(generator, **(plain | options))
        assert forbidden(tokens) <= 1  # rounding may move one token across the threshold
        assert len(set(tokens)) > 10
        assert forbidden(generate(generator, **plain)) > 20

    def test_temperature(self, generator: Generator) -> None:
        """Higher temperature gives less likely tokens."""

        def log_likelihood(temperature: float) -> float:
            prompt = generator.tokenize(PROMPT)
            means = []
            for seed in range(8):
                tokens = generate(generator, temperature=temperature, seed=seed, **PLAIN)
                logits = generator.logits(prompt + tokens)[len(prompt) - 1 : -1].astype(float)
                normal = np.log(np.exp(logits).sum(axis=1))
                means.append(np.mean(logits[np.arange(len(tokens)), tokens] - normal))
            return float(np.mean(means))

        # Each is a mean over 480 tokens with a standard error of about 0.12; 1.6 and 4.4 apart.
        cold, warm, hot = (log_likelihood(t) for t in (0.5, 1, 2))
        assert cold > warm + 0.5
        assert warm > hot + 2

    def test_repeat_penalty(self, generator: Generator) -> None:
        plain = generate(generator, temperature=0)
        penalized = generate(generator, temperature=0, repeat_penalty=1.5, repeat_last_n=-1)
        assert len(set(penalized)) > len(set(plain))
        no_effect: list[dict[str, Any]] = [
            {"repeat_penalty": 1.0},
            {"repeat_penalty": 1.5, "repeat_last_n": 0},
        ]
        assert all(generate(generator, temperature=0, **options) == plain for options in no_effect)

    def test_repeat_penalty_covers_repeat_last_n_tokens(self, generator: Generator) -> None:
        def shortest_distance(tokens: list[int]) -> int:
            pairs = [(i, j) for j in range(len(tokens)) for i in range(j) if tokens[i] == tokens[j]]
            return min((j - i for i, j in pairs), default=len(tokens))

        for last_n in (3, 10):
            options: dict[str, Any] = {"repeat_penalty": 1e9, "repeat_last_n": last_n}
            assert shortest_distance(generate(generator, temperature=0, **options)) > last_n

    def test_repeat_penalty_includes_the_prompt(self, generator: Generator) -> None:
        options: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1e9, "repeat_last_n": -1}
        assert not set(generate(generator, **options)) & set(generator.tokenize(PROMPT))


class TestSeeds:
    def test_equal_seeds_give_equal_outputs(self, generator: Generator, tiny_opt: Path) -> None:
        tokens = generate(generator, seed=7)
        assert generate(generator, seed=7) == tokens
        assert generate(Generator(tiny_opt, seed=1, threads=2), seed=7) == tokens

    def test_different_seeds_give_different_outputs(self, generator: Generator) -> None:
        seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
        assert len({tuple(generate(generator, seed=seed)) for seed in seeds}) == len(seeds)

    def test_without_seed_outputs_differ(self, tiny_opt: Path) -> None:
        generators = [Generator(tiny_opt, threads=1) for _ in range(2)]
        texts = {tuple(generate(generator)) for generator in generators for _ in range(3)}
        assert len(texts) == 6

    def test_generator_seed_is_any_integer(self, tiny_opt: Path) -> None:
        outputs = [
            Generator(tiny_opt, seed=seed, threads=1).generate("a", max_tokens=9).text
            for seed in (5, np.int64(5), np.uint8(5))
        ]
        assert len({*outputs}) == 1

    def test_generator_seed_makes_the_series_reproducible(self, tiny_opt: Path) -> None:
        def series(seed: int) -> list[list[int]]:
            generator = Generator(tiny_opt, seed=seed, threads=1)
            return [generate(generator) for _ in range(3)]

        first, second = series(1), series(2)
        assert first == series(1)
        assert len({tuple(tokens) for tokens in first + second}) == 6
