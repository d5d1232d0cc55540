"""Arguments of wrong types or extreme sizes raise one clear error each, without delay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator, KVCache, Policy

INT32_MAX = 2**31 - 1
WRONG: Any = "a"


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, n_ctx=100, threads=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": [None] * 5}, r"policy=\[None.*, expected a name, a Policy"),
        ({"policy": []}, "policy is an empty list"),
        ({"policy": 5}, "policy=5, expected a name, a Policy"),
        ({"policy": ["h2o"] * 5}, r"policy=\['h2o'.*, expected a name, a Policy"),
        ({"device": None}, "device=None, expected"),
        ({"positions": None}, "positions=None, expected"),
        ({"n_batch": INT32_MAX}, "n_batch=2147483647, expected an integer, 1 to 65536"),
        ({"max_sequences": INT32_MAX}, "max_sequences=2147483647, .* at most 65025"),
        ({"max_resident": 2**80}, "max_resident=1208925819614629174706176, expected"),
        ({"memory": 2**80}, "memory=1208925819614629174706176, expected"),
    ],
    ids=str,
)
def test_invalid_generator_options(tiny_opt: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Generator(tiny_opt, **options)


def test_impossible_max_sequences_are_refused_before_loading(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no model")
    for n, message in ((65026, "at most 65025 with n_batch=512"), (0, "1 or more")):
        with pytest.raises(ValueError, match=f"max_sequences={n}, expected .*{message}"):
            Generator(file, max_sequences=n)


@pytest.mark.parametrize("policy", [None, "h2o", 4, [Policy.full()]], ids=str)
def test_invalid_cache_policies(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"policy=.*, expected a Policy"):
        KVCache(2, 1, 8, policy)
    cache = KVCache(2, 1, 8, Policy.window(4), threads=1)
    if policy is not None:  # None keeps the current policy
        with pytest.raises(TypeError, match=r"policy=.*, expected a Policy"):
            cache.reset(0, policy)


def test_huge_cache_is_rejected_before_allocation() -> None:
    """Before per-sequence data is allocated, which took a minute and 16 GiB."""
    with pytest.raises(MemoryError):
        KVCache(2, 1, 2**20, Policy.window(2**20), n_sequences=INT32_MAX)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda g: g.generate("a", stop="\udc80"),
            ValueError,
            r"stop='\\udc80' has an unpaired surrogate",
        ),
        (lambda g: g.generate("a", after=5), TypeError, "after=5, expected a Snapshot"),
        (lambda g: g.generate(["a"], each=[None]), TypeError, r"each=\[None\], expected a list"),
        (lambda g: g.generate(["a"], each=5), TypeError, "each=5, expected a list"),
        (lambda g: g.generate([2**70]), ValueError, f"token {2**70} is not in the vocabulary"),
        (lambda g: g.detokenize(["a"]), TypeError, "expected a token id"),
        (lambda g: g.detokenize([2**70]), ValueError, f"token {2**70} is not in the vocabulary"),
    ],
    ids=range(7),
)
def test_invalid_call_arguments(
    generator: Generator, call: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(generator)


def test_timeouts(tiny_opt: Path) -> None:
    generator = Generator(tiny_opt, n_ctx=50, max_sequences=1, threads=1)
    with generator.engine(max_queue=1) as engine:
        for timeout in (float("nan"), -1, WRONG):
            with pytest.raises(ValueError, match="timeout="):
                engine.submit("a", timeout=timeout)
        assert engine.submit("a", max_tokens=1, timeout=float("inf")).result()
        assert engine.submit("a", max_tokens=1, timeout=1e300).result()


def test_many_stop_strings_are_fast(generator: Generator) -> None:
    """One automaton matches all stop strings; without it, this took 54 seconds."""
    text = generator.generate("The", max_tokens=30, seed=1, ignore_eos=True).text
    stop = [f"no such text {i}" for i in range(100_000)] + [text[20:24]]
    cut = generator.generate("The", max_tokens=30, seed=1, ignore_eos=True, stop=stop)
    assert cut.text == text[: text.index(text[20:24])]
    assert cut.finish_reason == "stop"
