"""Generator: generate(), logits(), stats() and close()."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import (
    BUNDLED_MODEL,
    Chat,
    Engine,
    Generation,
    Generator,
    HeadStats,
    KVCache,
    Policy,
    Stats,
)
from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.measure.machine import rss_bytes
from support.background import PROMPT
from support.generating import generate
from support.needs import LINUX, PLAIN_MEMORY


@pytest.fixture(scope="module")
def generator(tiny_opt: Path, device: str) -> Generator:
    return Generator(tiny_opt, threads=1, device=device)


def test_sizes_and_repr(tiny_opt: Path) -> None:
    generator = Generator(tiny_opt, hh=20, n_ctx=100, threads=1)
    assert (generator.n_ctx, generator.n_vocab) == (100, 4096)
    policy = "Policy(n_sinks=0, n_heavy=10, n_recent=10)"
    assert repr(generator) == f"<Generator: tiny-opt.gguf, n_ctx=100, {policy}>"
    stream = generator.stream("a", max_tokens=3, ignore_eos=True)
    assert repr(stream) == "<Stream: 0 tokens, not ended>"
    list(stream)
    assert repr(stream) == "<Stream: 3 tokens, length>"
    generator.close()
    assert repr(generator) == "<Generator: closed>"
    for name in ("n_ctx", "n_vocab"):
        with pytest.raises(RuntimeError, match="closed"):
            getattr(generator, name)
    cache = KVCache(2, 1, 8, Policy.window(4), threads=1)
    policy = "Policy(n_sinks=0, n_heavy=0, n_recent=4)"
    assert repr(cache) == f"<KVCache: {policy}, 0 tokens seen, {cache.nbytes} bytes>"


def test_bundled_model() -> None:
    with Generator(BUNDLED_MODEL, threads=1) as generator:
        assert generator.generate("a", max_tokens=2, ignore_eos=True).completion_tokens == 2


class TestGenerate:
    @pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 4}, {"stop": "and"}], ids=str)
    def test_generate_equals_stream(self, generator: Generator, options: dict[str, Any]) -> None:
        options = {"seed": 1, "max_tokens": 50} | options
        stream = generator.stream(PROMPT, **options)
        text = "".join(stream)
        result = generator.generate(PROMPT, **options)
        assert isinstance(result, Generation)
        assert (result.text, result.finish_reason) == (text, stream.finish_reason)
        assert result.completion_tokens == stream.completion_tokens == len(stream.tokens)
        assert result.prompt_tokens == stream.prompt_tokens == len(generator.tokenize(PROMPT))
        assert result.prompt_seconds > 0
        assert result.decode_seconds > 0

    def test_prompt_may_be_tokens(self, generator: Generator) -> None:
        tokens = generator.tokenize(PROMPT)
        prompts: list[Any] = [PROMPT, tokens, tuple(tokens), np.array(tokens)]
        results = [generator.generate(one, temperature=0, max_tokens=20) for one in prompts]
        assert [result.prompt_tokens for result in results] == [len(tokens)] * 4
        assert {result.text for result in results} == {results[0].text}

    @pytest.mark.parametrize("hh", [None, 0.2])
    def test_output_is_independent_of_previous_calls(
        self, tiny_opt: Path, hh: float | None, device: str
    ) -> None:
        generator = Generator(tiny_opt, hh=hh, n_ctx=200, threads=1, device=device)
        tokens = generate(generator, 50, seed=1)
        generator.logits(range(200))
        generate(generator, 60, seed=2)
        assert generate(generator, 50, seed=1) == tokens

    @pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "temperature": 1}])
    def test_unreached_budget_equals_full_cache(
        self, tiny_opt: Path, options: dict[str, Any]
    ) -> None:
        full = generate(Generator(tiny_opt, threads=1), 300, **options)
        for hh in (1.0, 2048, 400):
            assert generate(Generator(tiny_opt, hh=hh, threads=1), 300, **options) == full
        assert generate(Generator(tiny_opt, hh=0.02, threads=1), 300, **options) != full


class TestLogits:
    def test_shape_type_and_repeatability(self, generator: Generator) -> None:
        tokens = generator.tokenize(PROMPT)
        logits = generator.logits(tokens)
        assert logits.shape == (len(tokens), 4096)
        assert logits.dtype == np.float32
        assert np.isfinite(logits).all()
        for other in (np.array(tokens), np.array(tokens, np.uint16), tuple(tokens)):
            np.testing.assert_array_equal(generator.logits(other), logits)

    def test_prefix_gives_the_same_rows(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, threads=1)
        tokens = generator.tokenize(PROMPT)
        logits = generator.logits(tokens)
        # A shorter text is a batch of another size, which may round differently.
        np.testing.assert_allclose(generator.logits(tokens[:4]), logits[:4], rtol=0, atol=1e-3)

    @pytest.mark.parametrize("n_batch", [1, 7, 40])
    def test_chunk_size_does_not_matter_with_full_cache(self, tiny_opt: Path, n_batch: int) -> None:
        tokens = np.arange(5, 45)
        whole = Generator(tiny_opt, kv_dtype="f32", threads=1).logits(tokens)
        chunked = Generator(tiny_opt, n_batch=n_batch, kv_dtype="f32", threads=1)
        np.testing.assert_allclose(chunked.logits(tokens), whole, rtol=0, atol=1e-3)

    def test_logits_leaves_tokens_in_cache(self, generator: Generator) -> None:
        generator.logits(range(10, 30))
        assert generator.stats().tokens_seen == 20


class TestStats:
    def test_stats_before_first_token(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, hh=0.2, threads=1)
        stats = generator.stats()
        assert isinstance(stats, Stats)
        assert (stats.tokens_seen, stats.tokens_kept, stats.evictions) == (0, 0, 0)
        assert (stats.n_ctx, stats.n_layers, stats.n_kv_heads) == (2048, 6, 6)
        assert stats.backend.startswith(("cpu", "cuda"))
        positions, scores = generator.kept(0, 0)
        assert positions.size == scores.size == 0

    @pytest.mark.parametrize(
        ("policy", "n"),
        [
            (Policy.full(), 40),
            (Policy.window(30), 20),
            (Policy.window(30), 40),
            (Policy.sinks(4, 26), 40),
            (Policy.h2o(20, 10), 40),
            (Policy.h2o(20, 10), 5),
            (Policy.h2o(29, 1, sinks=2), 40),
            (Policy.h2o(30, 0), 40),
        ],
        ids=str,
    )
    def test_stats_and_kept_after_generation(
        self, tiny_opt: Path, policy: Policy, n: int, device: str
    ) -> None:
        generator = Generator(tiny_opt, policy=policy, n_ctx=200, threads=1, device=device)
        stream = generator.stream(PROMPT, max_tokens=n, seed=1)
        for _ in stream:
            pass
        seen = stream.prompt_tokens + len(stream.tokens) - 1  # the last token was not evaluated
        kept = seen if policy.budget is None else min(seen, policy.budget)
        stats = generator.stats()
        assert (stats.tokens_seen, stats.tokens_kept) == (seen, kept)
        assert stats.evictions == seen - kept

        recent = seen if policy.n_recent is None else policy.n_recent
        guaranteed = {*range(min(policy.n_sinks, seen)), *range(max(seen - recent, 0), seen)}
        choices = set()
        for layer in range(stats.n_layers):
            for head in range(stats.n_kv_heads):
                positions, scores = generator.kept(layer, head)
                assert positions.dtype == np.int32
                assert scores.dtype == np.float32
                assert len(positions) == len(scores) == kept
                assert positions.tolist() == sorted(set(positions.tolist()))
                assert guaranteed <= set(positions.tolist()) <= set(range(seen))
                assert (scores > 0).all() if policy.n_heavy else (scores == 0).all()
                choices.add(tuple(positions.tolist()))
        # Heads keep different tokens if the policy scores them.
        assert (len(choices) > 1) == (policy.n_heavy > 0 and stats.evictions > 0)

    @pytest.mark.parametrize("hh", [0.05, 0.2, 0.5])
    def test_cache_memory_is_proportional_to_budget(self, tiny_opt: Path, hh: float) -> None:
        stats = Generator(tiny_opt, hh=hh, threads=1).stats()
        full = Generator(tiny_opt, threads=1).stats()
        assert full.cache_bytes == full.full_cache_bytes == stats.full_cache_bytes
        # K and V in two bytes, and a position in four; a budget needs a score of four bytes too.
        elements = 2048 * 6 * 6 * 2 * 32
        assert full.cache_bytes == pytest.approx(elements * 2 + 2048 * 6 * 6 * 4, rel=0.01)
        assert stats.cache_bytes == pytest.approx(full.cache_bytes * hh, rel=0.05)
        wide = Generator(tiny_opt, hh=hh, kv_dtype="f32", threads=1).stats()
        assert wide.cache_bytes == pytest.approx(2 * stats.cache_bytes, rel=0.1)

    @LINUX  # reads /proc/self/status
    @PLAIN_MEMORY
    def test_memory_does_not_grow(self, tiny_opt: Path) -> None:
        """The cache is allocated at the start; a generated token takes only 4 more bytes.

        The tolerance of 1 MiB covers block allocations of Python and libc. Leaking one row of
        logits or the keys and values of one token per step would be 5 MB or more.
        """
        generator = Generator(tiny_opt, hh=0.2, n_ctx=2048, threads=1)
        stream = generator.stream(PROMPT, max_tokens=1500, ignore_eos=True, seed=1)
        before = 0
        for _ in stream:
            if len(stream.tokens) >= 450 and not before:  # past the budget of 409
                before = rss_bytes()
        assert len(stream.tokens) == 1500
        assert generator.stats().evictions > 1000
        assert rss_bytes() - before < 2**20


class TestClose:
    CALLS: tuple[Callable[[Generator], object], ...] = (
        lambda g: g.stream("a"),
        lambda g: g.generate("a"),
        lambda g: g.tokenize("a"),
        lambda g: g.detokenize([5]),
        lambda g: g.logits([5]),
        lambda g: g.stats(),
        lambda g: g.kept(0, 0),
    )

    def test_methods_raise_after_close(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, threads=1)
        generator.generate("a", max_tokens=2)
        generator.close()
        generator.close()
        for call in self.CALLS:
            with pytest.raises(RuntimeError, match="closed"):
                call(generator)

    def test_context_manager_closes(self, tiny_opt: Path) -> None:
        with Generator(tiny_opt, threads=1) as generator:
            assert generator.generate("a", max_tokens=2).completion_tokens == 2
        with pytest.raises(RuntimeError, match="closed"):
            generator.stats()
        with pytest.raises(ZeroDivisionError), Generator(tiny_opt, threads=1) as generator:
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="closed"):
            generator.stats()

    def test_close_before_stream_starts(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, threads=1)
        stream = generator.stream("a", max_tokens=2)
        generator.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(stream)

    def test_tokenizer_and_template_do_not_keep_model_alive(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, threads=1)
        tokenizer, template = generator.tokenizer, generator.chat_template("chatml")
        model = weakref.ref(generator._runtime().model)
        assert model() is not None
        generator.close()
        assert model() is None
        assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"
        assert template.tokens([{"role": "user", "content": "a"}])

    @LINUX  # reads /proc/self/status
    @PLAIN_MEMORY
    def test_close_frees_memory(self, tiny_opt: Path) -> None:
        """Even if a finished stream is still referenced."""
        program = f"""
from h2o_cpp import Generator
from h2o_cpp.measure.machine import rss_bytes
generator = Generator({str(tiny_opt)!r}, kv_dtype="f32", threads=1)
stream = generator.stream(list(range(1500)), max_tokens=1, temperature=0)
text = "".join(stream)
before, cache = rss_bytes(), generator.stats().cache_bytes * 1500 / 2048
generator.close()
print((before - rss_bytes()) / cache)
"""
        # Return large blocks to the system immediately.
        tunables = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
        output = subprocess.check_output(
            [sys.executable, "-W", "error", "-c", program], env=os.environ | tunables, text=True
        )
        assert float(output) > 0.9


def test_stats_of_layers_and_heads(tiny_opt: Path, device: str) -> None:
    policies = [Policy.h2o(4, 4), Policy.window(5), Policy.h2o(2, 9), Policy.full()]
    policies += [Policy.window(3)] * 2
    with Generator(tiny_opt, policy=policies, n_ctx=60, threads=1, device=device) as generator:
        assert generator.stats(layers=True).layers[0].heads[0] == HeadStats(-1, -1, 0.0)
        generator.generate([5] * 20, max_tokens=21, temperature=0, ignore_eos=True)
        assert generator.stats().layers == ()
        stats = generator.stats(layers=True)
        assert stats.tokens_kept == stats.tokens_seen == 40
        assert [layer.tokens_kept for layer in stats.layers] == [8, 5, 11, 40, 3, 3]
        assert [layer.evictions for layer in stats.layers] == [32, 35, 29, 0, 37, 37]
        for i, layer in enumerate(stats.layers):
            assert len(layer.heads) == stats.n_kv_heads
            for h, head in enumerate(layer.heads):
                positions, scores = generator.kept(i, h)
                assert head.oldest == min(positions)
                assert head.score == pytest.approx(scores.sum(), rel=1e-5)
                if i in (1, 3, 4, 5):  # policies without scores
                    assert (head.heaviest, head.score) == (-1, 0.0)
                else:
                    assert head.heaviest == positions[list(scores).index(max(scores))]
        assert stats.layers[1].heads[0].oldest == 35


def test_wrong_number_of_layer_policies_is_rejected(tiny_opt: Path) -> None:
    with pytest.raises(ValueError, match="3 policies for 6 layers"):
        Generator(tiny_opt, policy=[Policy.window(5)] * 3)


def test_lists_and_arrays_of_prompts(generator: Generator) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "seed": 1}
    rows = np.array([[5, 6, 7], [1, 2, 3]])
    expected = [generator.generate(row.tolist(), **options) for row in rows]
    texts = [one.text for one in expected]
    prompts: Any
    for prompts in (rows, rows.tolist(), [*rows], tuple(rows.tolist())):
        assert [one.text for one in generator.generate(prompts, **options)] == texts
    words: Any
    for words in (np.array(["The", "It was"]), np.array(["The", "It was"], object)):
        assert [type(one) for one in generator.generate(words, **options)] == [Generation] * 2
    none: Any
    for none in ([], (), np.zeros((0, 3), int)):
        assert generator.generate(none) == generator.generate([], each=[]) == []
        assert list(generator.stream_many(none)) == []
    with generator.stream("The old man", **options) as stream:
        next(stream)
        after = stream.save()
    continued: Any = generator.generate([], after=after, **options)
    assert continued.text == generator.generate("", after=after, **options).text


def test_signature_lists_options_of_generator(tiny_opt: Path) -> None:
    parameters = inspect.signature(Generator).parameters
    assert list(parameters)[:2] == ["path", "hh"]
    assert (parameters["positions"].default, parameters["n_batch"].default) == ("auto", None)
    documented = re.findall(r"^        (\w+): ", Generator.__init__.__doc__ or "", re.MULTILINE)
    assert sorted(parameters) == sorted(documented)
    with pytest.raises(TypeError, match="no option 'max_sequence'; did you mean max_sequences"):
        Generator(tiny_opt, max_sequence=1)  # type: ignore[call-arg]


def test_options_of_generator_are_none_of_an_output(tiny_opt: Path) -> None:
    with Generator(tiny_opt, threads=1) as generator:
        of_both = {"seed", "draft"}
        for name in inspect.signature(Generator).parameters.keys() - {"path", *of_both}:
            options: Any = {name: 1}
            with pytest.raises(TypeError, match=f"^{name} is an option of Generator, not of an "):
                generator.stream("a", **options)


def test_signatures_list_all_options(tiny_opt: Path) -> None:
    def defaults(function: Any) -> dict[str, object]:
        parameters = inspect.signature(function).parameters
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {name: p.default for name, p in parameters.items()}

    functions = [Generator.stream, Generator.generate, Generator.stream_many, Generator.request]
    for function in (*functions, Generator.chat, Chat.say, Engine.submit, Engine.submit_async):
        found = defaults(function)
        assert found["temperature"] == pytest.approx(0.8)
        assert (found["top_k"], found["seed"], found["ignore_eos"]) == (40, None, False)
        assert found["max_tokens"] is found["stop"] is None
        assert StreamOptions.__annotations__.keys() <= found.keys()
    shown = pydoc.render_doc(Generator.generate)
    assert "max_tokens: 'int | None' = None, temperature: 'float' = 0.8, top_k" in shown
    assert "**options" not in shown
    with Generator(tiny_opt, threads=1) as generator:
        generation = generator.generate("The old man", max_tokens=5, seed=1)
        assert str(generation) == generation.text
