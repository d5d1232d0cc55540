"""Every sampler gives the same tokens as a numpy reference that sorts."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, _core
from h2o_cpp.generation.sampling import make_sampling
from support.generating import PLAIN, generate
from support.sampler_reference import OFF, Reference, longest_repetitions

N_VOCAB = 500
# Below this margin the core's float32 may decide differently.
MARGIN = 1e-5
# llama.cpp's default chain.
LLAMA_CPP = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

CASES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5, "repeat_last_n": -1},
    "all penalties": {
        "repeat_penalty": 1.3,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "repeat_last_n": 9,
    },
    "bias": {"logit_bias": {3: 8.0, 7: -5.0, 499: -math.inf, 11: 6.5}},
    "bias and penalty": {"logit_bias": {3: 8.0, 5: 9.0}, "repeat_penalty": 1.4},
    "dry": {"dry_multiplier": 2.0, "dry_base": 1.5},
    "dry, near": {"dry_multiplier": 3.0, "dry_penalty_last_n": 12, "dry_allowed_length": 1},
    "typical": {"typical_p": 0.6},
    "typical, most": {"typical_p": 0.97},
    "sigma": {"top_n_sigma": 2.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "xtc after top-k": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "top_k": 30},
    "xtc beyond": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "dynamic": {"temperature": 1.0, "dynatemp_range": 0.8, "dynatemp_exponent": 1.3},
    "dynamic from 0": {"temperature": 0.0, "dynatemp_range": 0.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 4.0, "temperature": 0.9},
    "llama.cpp": {
        "samplers": "llama.cpp",
        "temperature": 1.4,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.95,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.08,
        "frequency_penalty": 0.2,
        "dry_multiplier": 0.8,
    },
    "another order": {
        "samplers": ("min_p", "temperature", "top_p", "top_k"),
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.01,
    },
    "top-p before temperature": {
        "samplers": ("top_p", "temperature"),
        "temperature": 2.0,
        "top_p": 0.7,
    },
    "left out": {"samplers": ("top_k",), "temperature": 0.1, "top_p": 0.1, "top_k": 100},
    "all": {
        "temperature": 0.8,
        "top_k": 400,
        "top_p": 0.99,
        "min_p": 0.001,
        "typical_p": 0.98,
        "top_n_sigma": 3.0,
        "presence_penalty": 0.5,
        "xtc_probability": 0.2,
    },
}


def both(options: dict[str, Any], breakers: list[int]) -> tuple[_core.Sampler, Reference]:
    sampling = make_sampling({**OFF, **options})
    sampling.seed = 17
    core = _core.Sampler(N_VOCAB, sampling)
    core.set_dry_breakers([token in breakers for token in range(N_VOCAB)])
    if options.get("samplers") == "llama.cpp":
        options = {**options, "samplers": LLAMA_CPP}
    return core, Reference(N_VOCAB, {**options, "seed": 17}, breakers)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spread", [1.0, 3.0], ids=["flat", "peaked"])
def test_tokens_equal_the_reference(name: str, spread: float) -> None:
    """With equal random numbers and repetitive history."""
    rng = np.random.default_rng(5)
    core, reference = both(CASES[name], breakers=[4])
    n_compared = 0
    for step in range(150):
        logits = (rng.normal(size=N_VOCAB) * spread).astype(np.float32)
        logits[step % 7] += 4
        logits[rng.integers(N_VOCAB)] = np.nan if step % 5 == 0 else -np.inf
        masked = step % 3 == 0
        allowed = rng.random(N_VOCAB) < 0.7 if masked else np.ones(N_VOCAB, bool)
        packed = np.packbits(allowed, bitorder="little")
        words = np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)
        expected = reference.sample(np.where(np.isnan(logits), -np.inf, logits), allowed)
        token = core.sample(logits, words if masked else None)
        if reference.margin > MARGIN:
            assert token == expected, (step, reference.margin)
            n_compared += 1
        elif token != expected and reference.o["mirostat"]:
            pytest.fail(f"step {step}: rounding affects all further steps; change the seed")
        seen = int(rng.integers(7)) if step % 2 else expected
        for sampler in (core, reference):
            sampler.accept(seen)
    assert n_compared > 100  # of 150


def test_reference_random_numbers() -> None:
    """The first outputs of std::mt19937_64(5489)."""
    rng = Reference(10, {"seed": 5489}).random
    assert [rng() for _ in range(2)] == [14514284786278117030, 4620546740167642908]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1}, {"mirostat": 2}])
def test_banned_tokens_are_never_drawn(options: dict[str, Any]) -> None:
    """Even if the others have no number; an error if there are no others."""
    allowed = np.array([0b1111], np.uint32)
    for banned in ([0, 1, 2], [0, 1, 2, 3]):
        sampling = make_sampling({**OFF, **options, "logit_bias": dict.fromkeys(banned, -np.inf)})
        sampler = _core.Sampler(20, sampling)
        for last in (1.0, np.inf, -np.inf, np.nan):
            logits = np.array([3, np.inf, np.nan, last] + [5] * 16, np.float32)
            if len(banned) == 3:
                assert {sampler.sample(logits, allowed) for _ in range(9)} == {3}
            else:
                with pytest.raises(ValueError, match="no token is allowed"):
                    sampler.sample(logits, allowed)


def test_banning_every_token_is_an_error(tiny_opt: Path) -> None:
    with Generator(tiny_opt, threads=1) as generator:
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 40}):
            with pytest.raises(ValueError, match="no token is allowed"):
                generator.generate("A", logit_bias=dict.fromkeys(range(4096), -np.inf), **options)  # type: ignore[call-overload]
        assert generator.generate("A", max_tokens=3).completion_tokens == 3


def test_naming_the_default_samplers_changes_nothing(tiny_opt: Path) -> None:
    """Naming them uses the same code path, or gives the same tokens by another."""
    with Generator(tiny_opt, threads=1) as generator:
        options: dict[str, Any] = {"temperature": 1.2, "seed": 3, "top_k": 50, "top_p": 0.9}
        tokens = generate(generator, **options)
        names = ["temperature", "top_k", "top_p", "min_p"]
        assert generate(generator, samplers=names, **options) == tokens
        assert generate(generator, samplers=["penalties", "dry", *names], **options) == tokens
        assert generate(generator, samplers=["top_k"], seed=3, top_k=1) == generate(
            generator, temperature=0
        )
        # A bias of 0 uses another path through the penalties; a sigma of 1e9 keeps all tokens.
        assert generate(generator, logit_bias={1: 0.0}, **options) == tokens
        assert generate(generator, top_n_sigma=1e9, **options) == tokens


def test_dry_repetitions_equal_brute_force() -> None:
    """The Z function, breakers and the window of DRY, observed in greedy choices."""
    rng = random.Random(9)
    for case in range(200):
        n, min_length, limit = rng.randint(1, 60), rng.randint(1, 3), rng.randint(1, 80)
        tokens = [rng.randrange(3 + case % 3) for _ in range(n)]
        breakers = [4] if case % 2 else []
        sampling = make_sampling(
            {
                **OFF,
                "temperature": 0,
                "dry_multiplier": 1.0,
                "dry_base": 1.1,
                "dry_allowed_length": min_length,
                "dry_penalty_last_n": limit,
            }
        )
        core = _core.Sampler(8, sampling)
        core.set_dry_breakers([token in breakers for token in range(8)])
        for token in tokens:
            core.accept(token)
        found = longest_repetitions(tokens[-limit:], min_length, breakers)
        for token, length in found.items():
            for difference in (-1e-3, 1e-3):  # slightly less and slightly more likely than token 7
                logits = np.full(8, -100, np.float32)
                logits[7], logits[token] = 0, 1.1 ** (length - min_length) + difference
                assert core.sample(logits) == (token if difference > 0 else 7)
        for token in set(range(7)) - set(found):
            logits = np.full(8, -100, np.float32)
            logits[7], logits[token] = 0, 1e-3
            assert core.sample(logits) == token


class TestGenerator:
    def test_bias_forces_and_bans_tokens(self, tiny_opt: Path) -> None:
        with Generator(tiny_opt, threads=1) as generator:
            tokens = generate(generator, temperature=0)
            assert set(generate(generator, temperature=0, logit_bias={70: 1000})) == {70}
            banned = dict.fromkeys(set(tokens), -math.inf)
            assert not set(generate(generator, temperature=0, logit_bias=banned)) & set(tokens)

    def test_penalties_reduce_repetition(self, tiny_opt: Path) -> None:
        with Generator(tiny_opt, threads=1) as generator:
            plain = len(set(generate(generator, temperature=0)))
            for options in (
                {"frequency_penalty": 2.0},
                {"presence_penalty": 5.0, "repeat_last_n": -1},
                {"dry_multiplier": 5.0, "dry_sequence_breakers": []},
            ):
                assert len(set(generate(generator, temperature=0, **options))) > plain

    def test_dry_sequence_breakers_limit_repetitions(self, tiny_opt: Path) -> None:
        """With every letter and space as breaker no repetition is long enough for a penalty."""
        every = [*"abcdefghijklmnopqrstuvwxyz .,"]
        with Generator(tiny_opt, threads=1) as generator:
            dry: dict[str, Any] = {"temperature": 0, "dry_multiplier": 5.0}
            plain = generate(generator, temperature=0)
            assert generate(generator, dry_sequence_breakers=every, **dry) == plain
            assert generate(generator, dry_sequence_breakers=[], **dry) != plain

    def test_mirostat_continues_from_a_snapshot(self, tiny_opt: Path) -> None:
        """Its state is part of the random state."""
        options: dict[str, Any] = {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5, **PLAIN}
        with Generator(tiny_opt, threads=1) as generator:
            with generator.stream("The old man", seed=4, max_tokens=40, **options) as stream:
                whole = "".join(stream)
            with generator.stream("The old man", seed=4, max_tokens=20, **options) as stream:
                begun = "".join(stream)
                snapshot = stream.save()
            with generator.stream("", after=snapshot, max_tokens=20, **options) as stream:
                assert begun + "".join(stream) == whole


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"samplers": ["top_q"]}, ValueError, "there is no sampler"),
        ({"samplers": ["top_k", "penalties"]}, ValueError, "before all others"),
        ({"samplers": ["top_k", "top_k"]}, ValueError, "top_k twice"),
        ({"samplers": "top_k"}, TypeError, "expected a list"),
        ({"logit_bias": [1]}, TypeError, "expected a dict"),
        ({"logit_bias": {10**6: 1.0}}, ValueError, "not in the vocabulary"),
        ({"logit_bias": {1: math.inf}}, ValueError, "expected a number"),
        ({"logit_bias": {1: math.nan}}, ValueError, "expected a number"),
        ({"mirostat": 3}, ValueError, "mirostat is 3"),
        ({"typical_p": 0}, ValueError, "typical_p is 0"),
        ({"xtc_probability": 1.5}, ValueError, "xtc_probability is 1.5"),
        ({"dry_multiplier": -1}, ValueError, "dry_multiplier is -1"),
        ({"dry_base": 0.5}, ValueError, "dry_base is 0.5"),
        ({"dry_sequence_breakers": "x"}, TypeError, "expected a list"),
        ({"dynatemp_range": -1}, ValueError, "dynatemp_range is -1"),
        ({"top_n_sigma": -2}, ValueError, "top_n_sigma is -2"),
        ({"frequency_penalty": math.nan}, ValueError, "frequency_penalty is nan"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options(
    tiny_opt: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with Generator(tiny_opt, threads=1) as generator, pytest.raises(error, match=message):
        generator.generate("a", max_tokens=1, **options)
