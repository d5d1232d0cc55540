"""Device names, concurrent use, and memory.

On a GPU: H2O_TEST_DEVICE=cuda pytest -m gpu
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, KVCache, Policy, Rope, _core
from h2o_cpp.cli import inspect, main
from h2o_cpp.eval.budgeted import BudgetedModel
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.measure.speed import Workload, measure
from h2o_cpp.model import session
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.options import CacheOptions
from support.background import GREEDY, PROMPT, Background, greedy
from support.gpu_memory import free_bytes
from support.greedy_process import text_of, texts_of_processes
from support.needs import CUDA, needs
from support.random_texts import Text

MAKE: list[Callable[[Path, str], object]] = [
    lambda path, device: Generator(path, device=device),
    lambda _, device: KVCache(1, 1, 8, Policy.window(4), device=device),
]


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    "name",
    ["gpu", "", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:99", "cpu:0", "vulkan:", "vulkan:99"],
)
def test_unknown_device_is_rejected(
    tiny_opt: Path, make: Callable[[Path, str], object], name: str
) -> None:
    with pytest.raises(
        ValueError, match=r"^device is '.*', expected auto, cpu|CUDA|cuda|[vV]ulkan"
    ) as error:
        make(tiny_opt, name)
    assert "\n" not in str(error.value)


@needs("no CUDA device", _core.cuda_device_count() == 0)
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_without_device_is_rejected(
    tiny_opt: Path, make: Callable[[Path, str], object], name: str
) -> None:
    with pytest.raises(ValueError, match=r"(?i)cuda"):
        make(tiny_opt, name)


def test_device_names(tiny_opt: Path) -> None:
    expected = {"cpu": "cpu", "auto": "cpu"}
    if _core.cuda_device_count() > 0:
        expected = {"cpu": "cpu", "auto": "cpu", "cuda": "cuda", "cuda:0": "cuda"}
    for name, backend in expected.items():
        with Generator(tiny_opt, device=name, threads=1) as generator:
            assert generator.stats().backend.startswith(backend)


Choose = Callable[..., None]


@pytest.fixture
def core_chooses(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Lets the core choose so with 0 bytes needed, and `then` with the bytes that are needed."""

    def choose(first: tuple[str, str, bool], then: tuple[str, str, bool] | None = None) -> None:
        monkeypatch.setattr(
            _core, "auto_device", lambda n_bytes: then if n_bytes and then else first
        )

    return choose


GPU = ("cuda", "9 bytes are needed of 10", False)


def test_auto_is_the_cpu_unless_a_gpu_is_wanted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed() -> int:
        raise AssertionError

    monkeypatch.delenv("H2O_CUDA_AUTO", raising=False)
    caplog.set_level(logging.INFO, "h2o_cpp")
    for name, opened in {"auto": "cpu", "cpu": "cpu", "cuda:1": "cuda:1"}.items():
        assert open_on_device(name, str, needed) == opened
    assert not caplog.records


@needs("no CUDA device", _core.cuda_device_count() == 0)
def test_auto_without_gpu_is_the_cpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2O_CUDA_AUTO", "1")
    caplog.set_level(logging.INFO, "h2o_cpp")
    assert open_on_device("auto", str, lambda: 1) == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cuda" in record.getMessage().lower()


def test_auto_is_the_gpu_if_model_and_cache_fit(
    core_chooses: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "h2o_cpp")
    core_chooses(GPU)
    assert open_on_device("auto", str, lambda: 9) == "cuda"
    assert open_on_device("cpu", str, lambda: 9) == "cpu"
    core_chooses(GPU, ("cpu", "11 bytes are needed, 10 are free on the GPU", True))
    assert open_on_device("auto", str, lambda: 11) == "cpu"
    core_chooses(("cpu", "[cuda] memory: the driver knows CUDA 12.2, this build needs 13.0", True))
    assert open_on_device("auto", str, lambda: 0) == "cpu"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "device='auto' is the GPU: 9 bytes are needed of 10"),
        ("WARNING", "device='auto' is the CPU: 11 bytes are needed, 10 are free on the GPU"),
        (
            "WARNING",
            "device='auto' is the CPU: [cuda] memory: the driver knows CUDA 12.2, this build needs"
            " 13.0",
        ),
    ]


def test_auto_is_the_cpu_if_the_gpu_fails(
    tiny_opt: Path, core_chooses: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    core_chooses(GPU)

    def open_on(name: str) -> Generator:
        if name == "cuda":
            raise ValueError("[cuda] weights in TQ1_0 are computed on the CPU only; use device=cpu")
        return Generator(tiny_opt, device=name, threads=1)

    with open_on_device("auto", open_on, lambda: 0) as generator:
        assert generator.stats().backend.startswith("cpu")
    assert "TQ1_0" in caplog.text


def backend_of_generator(path: Path) -> str:
    with Generator(path, threads=1, n_ctx=64) as generator:
        return generator.stats().backend


def backend_of_bench(path: Path) -> str:
    return measure(
        path, Workload(2, 2, 1, rounds=1), threads=1, cache=CacheOptions(n_ctx=64)
    ).backend


def backend_of_eval(path: Path) -> str:
    return BudgetedModel(path, threads=1, n_ctx=64)._model.backend


def backend_of_inspect(path: Path) -> str:
    """The options of the model that the command opens."""
    found = []

    def open_model(*args: Any, **options: Any) -> _core.Model:
        found.append(session.open_model(*args, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "open_model", open_model)
        assert main(["inspect", "A word", "-m", str(path), "--n-ctx", "64", "-t", "1"]) == 0
    return found[-1].backend


OPENED = [backend_of_generator, backend_of_bench, backend_of_eval, backend_of_inspect]


@pytest.mark.parametrize("backend_of", OPENED)
def test_every_use_of_auto_asks_the_core(
    tiny_opt: Path,
    backend_of: Callable[[Path], str],
    core_chooses: Choose,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []
    sizes = [tiny_opt.stat().st_size, 2 * tiny_opt.stat().st_size]

    def auto_device(n_bytes: int) -> tuple[str, str, bool]:
        asked.append(n_bytes)
        return ("cuda", "", False) if n_bytes == 0 else ("cpu", "too large", True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "auto_device", auto_device)
        assert backend_of(tiny_opt).startswith("cpu")
    assert asked[0] == 0
    assert sizes[0] < asked[1] < sizes[1]  # weights and a cache
    assert [record.getMessage() for record in caplog.records] == [
        "device='auto' is the CPU: too large"
    ]


@CUDA
@pytest.mark.parametrize("backend_of", OPENED)
def test_auto_is_cuda(
    tiny_opt: Path, backend_of: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2O_CUDA_AUTO", "1")
    assert backend_of(tiny_opt).startswith("cuda")


def test_bytes_of_model_and_cache(tiny_opt: Path) -> None:
    def needed(**options: Any) -> int:
        resident = options.pop("max_resident", 0)
        return model_and_cache_bytes(ModelFile.find(tiny_opt), CacheOptions(**options), resident)

    weights = tiny_opt.stat().st_size
    with Generator(tiny_opt, device="cpu", threads=1) as generator:
        cache = generator.stats().cache_bytes
    assert needed() == weights + cache
    assert weights < needed(hh=20) < needed(hh=20, kv_dtype="f32") < needed()
    assert needed(cache_memory="10%") <= weights + cache // 10
    assert needed(max_resident=1000) == 1000 + cache


def test_two_generators_on_one_device(tiny_opt: Path, device: str) -> None:
    """Their streams are read in turns."""
    expected = text_of(tiny_opt, device)
    with (
        Generator(tiny_opt, threads=1, device=device) as first,
        Generator(tiny_opt, hh=100, threads=1, device=device) as second,
    ):
        streams = [g.stream(PROMPT, **GREEDY) for g in (first, second)]
        texts = ["", ""]
        for pieces in zip(*streams, strict=True):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts[0] == expected
    assert len(streams[1].tokens) == len(streams[0].tokens)


def test_concurrent_threads(tiny_opt: Path, device: str) -> None:
    """Three threads share a Generator, and three have their own."""
    expected = text_of(tiny_opt, device)
    with Generator(tiny_opt, threads=1, device=device) as shared:
        calls = [Background(lambda: greedy(shared)) for _ in range(3)]
        calls += [Background(lambda: text_of(tiny_opt, device)) for _ in range(3)]
        assert [call.result() for call in calls] == [expected] * 6


def test_concurrent_processes(tiny_opt: Path, device: str) -> None:
    assert texts_of_processes(2, tiny_opt, device) == [text_of(tiny_opt, device)] * 2


def test_batched_prompts_are_reproducible(tiny_opt: Path, device: str) -> None:
    prompts = ["The captain", PROMPT, "A", "She said"]
    with Generator(tiny_opt, hh=20, max_sequences=3, threads=1, device=device) as generator:
        once, again = (
            generator.generate(prompts, temperature=0, max_tokens=30, ignore_eos=True)
            for _ in range(2)
        )
    assert [g.completion_tokens for g in once] == [30] * 4
    assert [g.text for g in once] == [g.text for g in again]
    assert len({g.text for g in once}) == 4


def test_rolling_positions_beyond_n_ctx(llama: Path, device: str) -> None:
    with Generator(llama, hh=16, threads=1, device=device) as generator:
        result = generator.generate([5, 6, 7], temperature=0, max_tokens=200, ignore_eos=True)
        assert result.completion_tokens == 200
        assert generator.stats().tokens_kept == 16


def test_logits_equal_cpu(tiny_opt: Path, device: str) -> None:
    with (
        Generator(tiny_opt, threads=1, device="cpu") as cpu,
        Generator(tiny_opt, threads=1, device=device) as generator,
    ):
        tokens = np.random.default_rng(1).integers(
            5, cpu.n_vocab, 600
        )  # several chunks, the last one partial
        expected, logits = cpu.logits(tokens), generator.logits(tokens)
    # The bound of test_logits.py: each of the 7 matrices of 6 layers and 2 more adds an error of
    # random sign of 2^-8, the precision to which its inputs are rounded.
    assert (
        np.abs(logits - expected).max() < 6 * 2.0**-8 * np.sqrt(7 * 6 + 2) * np.abs(expected).max()
    )
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.999


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [
        (head_dim, kv_dtype)
        for head_dim in (40, 64, 128)
        for kv_dtype in ("f32", "f16", "q8_0")
        if kv_dtype != "q8_0" or head_dim % 32 == 0  # blocks of 32
    ],
)
@pytest.mark.parametrize("rope", [None, Rope()], ids=["", "rope"])
def test_attention_equals_cpu(device: str, head_dim: int, kv_dtype: str, rope: Rope | None) -> None:
    text = Text(n_heads=6, n_kv_heads=2, head_dim=head_dim, chunks=[70, 1, 1, 40, 1], seed=1)
    for policy in (Policy.full(), Policy.sinks(4, 50)):  # whose evictions do not depend on rounding
        cpu, other = (text.cache(policy, kv_dtype, rope=rope, device=d) for d in ("cpu", device))
        expected, out = text.run(cpu), text.run(other)
        q, k, v = text.arrays()
        # The relative error of a probability is up to twice that of two logits. Logits of a chunk
        # may be f16 products, and so may probabilities times values. Other errors are smaller.
        norms = [np.sqrt((x.astype(np.float64) ** 2).sum(-1)).max() for x in (q, k)]
        logit = 2 * 2.0**-11 * norms[0] * norms[1] / np.sqrt(head_dim)
        bound = np.expm1(4 * logit) + 2 * 2.0**-11
        assert np.abs(out - expected).max() <= bound * np.abs(v).max()
        for g in range(2):
            assert cpu.positions(g).tolist() == other.positions(g).tolist()


@CUDA
class TestCudaMemory:
    def test_too_large_cache_is_memory_error(self, tiny_opt: Path) -> None:
        with Generator(tiny_opt, device="cuda") as before:
            expected = greedy(before)
            for _ in range(3):
                with pytest.raises(MemoryError, match=r"bytes|memory"):
                    KVCache(64, 64, 128, Policy.full(), max_tokens=2**27, device="cuda")
                with pytest.raises(MemoryError, match=r"bytes|memory"):
                    Generator(tiny_opt, max_sequences=60_000, device="cuda")
            assert greedy(before) == expected
        assert text_of(tiny_opt, "cuda") == expected
        cache = KVCache(2, 1, 64, Policy.window(8), device="cuda")
        ones = np.ones((3, 1, 64), np.float32)
        np.testing.assert_array_equal(cache.attend(np.ones((3, 2, 64)), ones, ones), 1)

    def test_no_memory_leaks(self, tiny_opt: Path) -> None:
        """After 30 models and caches, and as many failed allocations."""

        def use() -> None:
            text_of(tiny_opt, "cuda")
            cache = KVCache(8, 8, 64, Policy.h2o(500, 500), device="cuda")
            ones = np.ones((9, 8, 64), np.float32)
            cache.attend(ones, ones, ones)
            with pytest.raises(MemoryError):
                Generator(tiny_opt, max_sequences=60_000, device="cuda")

        use()
        before = free_bytes()
        for _ in range(30):
            use()
        # The weights of 30 models would be 150 MB; other processes may allocate meanwhile.
        assert before - free_bytes() < 64 * 2**20
