"""Invalid paths, options, prompts and tokens raise one clear error each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, KVCache, Policy
from support.needs import LINUX, PLAIN_MEMORY, needs
from support.scripted_opt import scripted_opt, strings


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, n_ctx=100, threads=1)


class TestPaths:
    def test_missing(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.gguf", tmp_path / "none" / "none.gguf"):
            with pytest.raises(FileNotFoundError) as error:
                Generator(path)
            assert error.value.filename == str(path)

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no GGUF model found") as error:
            Generator(tmp_path)
        assert str(error.value).startswith(f"{tmp_path}: ")

    @needs("named pipes", hasattr(os, "mkfifo"))
    def test_named_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="pipe: not a regular file"):
            Generator(tmp_path / "pipe")

    @needs("a user other than root", hasattr(os, "geteuid") and os.geteuid() != 0)
    def test_unreadable_file(self, tmp_path: Path) -> None:
        path = scripted_opt([]).write(tmp_path / "secret.gguf")
        path.chmod(0)
        with pytest.raises(PermissionError, match="secret"):
            Generator(path)

    def test_unicode_path_as_path_str_and_bytes(self, tmp_path: Path) -> None:
        text = "мødel 模型 🦙.gguf"
        path = scripted_opt([]).write(tmp_path / os.fsdecode(text.encode()))  # in every locale
        for name in (path, str(path), os.fsencode(path)):
            assert Generator(name, threads=1).tokenize("x") == [ord("x")]  # type: ignore[arg-type]
        path.write_bytes(b"GGUX")
        with pytest.raises(ValueError, match=re.escape(text)):
            Generator(path)

    @LINUX  # elsewhere file names are Unicode
    def test_path_that_is_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / os.fsdecode(b"\xff.gguf")
        with pytest.raises(FileNotFoundError) as missing:
            Generator(path)
        assert missing.value.filename == str(path)
        path.write_bytes(b"GGUX")
        with pytest.raises(ValueError, match=r"\.gguf.*expected 'GGUF'"):
            Generator(path)

    @pytest.mark.parametrize("path", [None, 5, 1.5, ["a.gguf"]])
    def test_path_of_wrong_type(self, path: object) -> None:
        with pytest.raises(TypeError):
            Generator(path)  # type: ignore[arg-type]


class TestGeneratorOptions:
    """hh and recent are tested in test_policy.py."""

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("n_ctx", n) for n in (-1, 2049, 2**31, 2**32 + 1, 2**70)),
            *(("n_batch", n) for n in (-1, 0, 65537, 2**31, 2**32 + 1, 2**70)),
            *(("threads", n) for n in (-1, 0, 1025, 2**31, 2**32 + 1, 2**70)),
            *(("kv_dtype", name) for name in ("", "q5_1", "F16", "float16", "f64")),
            *(("device", name) for name in ("", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1")),
            *(("device", name) for name in ("cuda:99", "cuda:1e0", "cuda:99999999999")),
        ],
    )
    def test_invalid_values_are_rejected(self, tiny_opt: Path, option: str, value: Any) -> None:
        name = "cuda" if str(value).startswith("cuda") else option
        with pytest.raises(ValueError, match=name):
            Generator(tiny_opt, **{option: value})

    @pytest.mark.parametrize(
        "options",
        [
            {"hh": 2**32},
            {"hh": 2**70, "recent": 2**69},
            {"policy": Policy.window(2**31)},
            {"policy": Policy.h2o(2**31 - 1, 2**31 - 1, sinks=2**31 - 1)},
        ],
        ids=str,
    )
    def test_huge_budgets_keep_everything_or_are_rejected(
        self, tiny_opt: Path, options: dict[str, Any]
    ) -> None:
        try:
            generator = Generator(tiny_opt, n_ctx=50, threads=1, **options)
        except ValueError:
            return
        generator.logits(range(50))
        assert generator.stats().tokens_kept == 50

    def test_policy_without_slots_is_rejected(self, tiny_opt: Path) -> None:
        with pytest.raises(ValueError, match="keep a token"):
            Generator(tiny_opt, policy=Policy(0, 0, 0))

    def test_exact_and_prefix_cache_disk_are_checked(self, tiny_opt: Path) -> None:
        with pytest.raises(TypeError, match="exact='no', expected True or False"):
            Generator(tiny_opt, exact="no")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prefix_cache_disk is empty, expected a directory"):
            Generator(tiny_opt, prefix_cache_disk="")
        with pytest.raises(ValueError, match="prefix_cache_disk_bytes='1GiB' needs prefix_cache_d"):
            Generator(tiny_opt, prefix_cache_disk_bytes="1GiB")

    def test_more_sequences_than_a_batch_has_rows(self, tiny_opt: Path) -> None:
        message = "max_sequences=2, expected at most 1 with n_batch=65536"
        with pytest.raises(ValueError, match=message):
            Generator(tiny_opt, n_batch=65536, max_sequences=2)

    def test_unknown_options_are_rejected(self, tiny_opt: Path, generator: Generator) -> None:
        with pytest.raises(TypeError, match="heavy_hitters"):
            Generator(tiny_opt, heavy_hitters=0.2)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="max_new_tokens"):
            generator.generate("a", max_new_tokens=3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="policy"):  # an option of Generator
            generator.stream("a", policy="window")  # type: ignore[call-arg]


class TestStreamOptions:
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("temperature", x) for x in (-0.1, float("nan"), float("inf"), 1e39)),
            *(("top_k", n) for n in (-1, -(2**31))),
            *(("top_p", x) for x in (0, -0.1, 1.001, float("nan"))),
            *(("min_p", x) for x in (-0.1, 1.001, float("nan"))),
            *(("repeat_penalty", x) for x in (0, -1, float("nan"), float("inf"))),
            *(
                (option, x)
                for option in ("temperature", "top_p", "min_p", "repeat_penalty")
                for x in (None, "0.5", True, [0.5])
            ),
            pytest.param("temperature", 10**400, id="temperature-huge"),
            ("repeat_last_n", -2),
            *(("max_tokens", n) for n in (0, -2, 1.5)),
            *(("seed", n) for n in (-1, 2**64)),
            *(("stop", s) for s in ("", [""], ["a", ""])),
        ],
    )
    def test_invalid_values_are_rejected(
        self, generator: Generator, option: str, value: Any
    ) -> None:
        for call in (generator.stream, generator.generate):
            with pytest.raises(ValueError, match=option):
                call("a", **({"max_tokens": 3} | {option: value}))
        assert generator.generate("a", max_tokens=3).completion_tokens == 3

    @pytest.mark.parametrize("option", ["top_k", "repeat_last_n"])
    @pytest.mark.parametrize("value", [2**31, 2**32 - 1, 2**70])
    def test_values_above_32_bits(self, generator: Generator, option: str, value: int) -> None:
        """They mean "all" or raise ValueError."""
        options: dict[str, Any] = {option: value, "max_tokens": 3}
        try:
            assert generator.generate("a", **options).completion_tokens == 3
        except ValueError as error:
            assert option in str(error)  # noqa: PT017 - either is right

    def test_extreme_valid_values_are_accepted(self, generator: Generator) -> None:
        for options in (
            {"temperature": 1e-45},
            {"temperature": 1e38},
            {"top_k": 2**31 - 1},
            {"top_p": 1e-45},
            {"repeat_penalty": 1e-38, "repeat_last_n": 2**31 - 1},
            {"repeat_penalty": 1e38},
            {"max_tokens": 2**70, "stop": ["e"]},
            {"seed": 2**64 - 1},
            {"stop": ()},
            {"stop": None},
            {"temperature": np.float32(0.5), "top_p": 1},
        ):
            result = generator.generate("a", **({"max_tokens": 3} | options))
            assert result.prompt_tokens == 2


class TestPrompts:
    @pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int64)])
    def test_empty(self, generator: Generator, prompt: Any) -> None:
        """To generate(), an empty list has no prompts."""
        for call in (generator.stream, generator.generate):
            if call == generator.generate and isinstance(prompt, list | tuple):
                found: Any = call(prompt)
                assert found == []
                continue
            with pytest.raises(ValueError, match="prompt is empty"):
                call(prompt)
        with pytest.raises(ValueError, match="prompt is empty"):
            generator.read(prompt)

    def test_text_without_tokens(self, tmp_path: Path) -> None:
        """The only character is not in the vocabulary."""
        file = scripted_opt([])
        tokens = ["a", "b", "ab", *(f"[{i}]" for i in range(255))]
        file.keys["tokenizer.ggml.tokens"] = strings(tokens)
        with Generator(file.write(tmp_path / "small.gguf"), threads=1) as generator:
            assert generator.tokenize("é") == []
            with pytest.raises(ValueError, match="prompt"):
                generator.generate("é")

    @pytest.mark.parametrize("hh", [None, 0.2])
    def test_too_long(self, tiny_opt: Path, hh: float | None) -> None:
        generator = Generator(tiny_opt, n_ctx=100, hh=hh, threads=1)
        assert generator.generate([5] * 100).completion_tokens == 1
        for prompt in ([5] * 101, [5] * 5000, "word " * 200):
            with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, n_ctx is 100"):
                generator.stream(prompt)

    @pytest.mark.parametrize("token", [-1, 4096, 2**31, 2**32 + 5, 2**64, -(2**63)])
    def test_tokens_out_of_range(self, generator: Generator, token: int) -> None:
        calls: list[Callable[[list[int]], object]] = [
            generator.stream,
            generator.generate,
            generator.logits,
            generator.detokenize,
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"token {token} is not in the voc|tokens must be"):
                call([5, token, 6])

    @pytest.mark.parametrize("prompt", [[None], [[5]], [1.5], ["5"], [b"a"]])
    def test_lists_of_other_types(self, generator: Generator, prompt: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            generator.stream(prompt)

    def test_rows_are_no_tokens(self, generator: Generator) -> None:
        with pytest.raises(TypeError, match=r"tokens\[0\]=array\(\[5\]\), expected a token id"):
            generator.detokenize(np.array([[5]]))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("prompt", "kind"),
        [
            (b"The", "bytes"),
            (bytearray(b"The"), "bytearray"),
            (memoryview(b"The"), "memoryview"),
            (None, "NoneType"),
            (5, "int"),
            (1.5, "float"),
        ],
    )
    def test_wrong_type(self, generator: Generator, prompt: Any, kind: str) -> None:
        for call in (generator.stream, generator.generate):
            with pytest.raises(TypeError, match=f"^prompt must be text or token ids, got {kind}$"):
                call(prompt)

    @pytest.mark.parametrize("tokens", [[], [[5]], [1.5], ["5"], "5", None, 5, [True], [None]])
    def test_logits_of_invalid_tokens(self, generator: Generator, tokens: Any) -> None:
        with pytest.raises(ValueError, match="tokens must be"):
            generator.logits(tokens)

    def test_logits_of_text_suggests_tokenize(self, generator: Generator) -> None:
        with pytest.raises(ValueError, match=r"tokenize\(\) makes them of a text"):
            generator.logits("The")

    def test_logits_of_more_tokens_than_n_ctx(self, generator: Generator) -> None:
        assert generator.logits([5] * 100).shape == (100, 4096)
        with pytest.raises(ValueError, match="101 tokens, n_ctx is 100"):
            generator.logits([5] * 101)

    @pytest.mark.parametrize(
        ("layer", "head"), [(-1, 1), (6, 1), (1, -1), (1, 6), (2**31, 1), (1, 2**32)]
    )
    def test_kept_of_head_out_of_range(self, generator: Generator, layer: int, head: int) -> None:
        bad = head if layer == 1 else layer
        with pytest.raises(ValueError, match=rf"(layer|head)\W{bad}\b"):
            generator.kept(layer, head)


class TestMemory:
    def test_huge_cache_is_memory_error(self) -> None:
        with pytest.raises(MemoryError, match=r"bytes|memory"):
            KVCache(1024, 1024, 2**20, Policy.full(), max_tokens=2**31 - 1)

    @LINUX  # RLIMIT_AS
    @PLAIN_MEMORY
    def test_cache_above_memory_limit_is_memory_error(self, tiny_opt: Path) -> None:
        """A cache of 19 MB exceeds the limit and raises MemoryError; a smaller one works."""
        program = f"""
import resource
from pathlib import Path
from h2o_cpp import Generator
Generator({str(tiny_opt)!r}, hh=16, n_batch=16, threads=1).close()
mapped = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**23 + 2**22, resource.RLIM_INFINITY))
try:
    Generator({str(tiny_opt)!r}, kv_dtype="f32", n_batch=16, threads=1)
except MemoryError as error:
    print(error)
with Generator({str(tiny_opt)!r}, hh=16, n_batch=16, threads=1) as generator:
    print(generator.generate("a", max_tokens=3).completion_tokens)
"""
        output = subprocess.check_output([sys.executable, "-c", program], text=True)
        message, n_tokens = output.splitlines()
        assert "bytes" in message
        assert n_tokens == "3"
