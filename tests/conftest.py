"""Fixtures shared by the tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator, _core
from h2o_cpp.measure import machine
from h2o_cpp.model.tokenizer import Tokenizer
from support import not_collected
from support.background import greedy
from support.hub import Hub, local_hub
from support.needs import CUDA, SHARED, VULKAN
from support.random_search import load_profile
from support.shapes import SHAPES
from support.short_text import TEXT
from support.synthetic import write_model

ROOT = Path(__file__).resolve().parents[1]

load_profile()

# Tests must not see the user's pulled models.
os.environ["H2O_MODELS"] = str(ROOT / "build" / "no-models")

# Removes the user's options too: keys and proxies of servers, offline hubs, colors of help.
for _name in ("H2O_API_KEY", "HF_HUB_OFFLINE", "FORCE_COLOR"):
    os.environ.pop(_name, None)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

# numpy starts one thread of OpenBLAS per processor, which takes longer than the programs that the
# tests start; for this process it is too late, but not for the workers of pytest-xdist. Threads of
# PyTorch wait for each other in loops, which takes several times as long beside other workers.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# absl, which rouge_score imports, would log to pytest's file for stderr, and close that file where
# a server configures logging.
if importlib.util.find_spec("absl"):
    _absl = importlib.import_module("absl.logging")
    _absl.get_absl_handler().python_handler.stream = sys.__stderr__

# Background jobs of a shell ignore SIGINT; so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    # pytest_plugins would be too late.
    config.pluginmanager.register(not_collected)


def pytest_collection_finish() -> None:
    """Thousands of tests need no look at every garbage collection."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _small_machine_measurements() -> Iterator[None]:
    """`bench` compares with the machine's limits, of which no test needs a good value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_READ_BYTES", 1 << 20)
        patch.setattr(machine, "_MATMUL_WIDTH", 64)
        yield


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param("cuda", marks=CUDA),
        pytest.param("vulkan", marks=VULKAN),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    """The compute device."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", params=["cpu", pytest.param("vulkan", marks=VULKAN)])
def exact_device(request: pytest.FixtureRequest) -> str:
    """A device that rounds no factor of a product to fewer bits, so that float32 has its bounds."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def data() -> Path:
    """Small data files in the repository."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def tiny_opt() -> Path:
    """The bundled model."""
    return ROOT / "models" / "tiny-opt.gguf"


@pytest.fixture
def generator(tiny_opt: Path) -> Generator:
    """A new Generator with the bundled model."""
    return Generator(tiny_opt, threads=1)


@pytest.fixture(scope="session")
def expected(tiny_opt: Path) -> str:
    """The greedy output of a new Generator."""
    return greedy(Generator(tiny_opt, threads=1))


@pytest.fixture(scope="session")
def model(tiny_opt: Path) -> _core.Model:
    """The bundled model, loaded."""
    return _core.Model(tiny_opt, device="cpu", threads=1)


@pytest.fixture(scope="session")
def tokenizer(model: _core.Model) -> Tokenizer:
    """The bundled model's tokenizer."""
    return Tokenizer.of_model(model)


@pytest.fixture(scope="session")
def tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of TEXT."""
    return tokenizer.encode(TEXT)


@pytest.fixture(scope="session")
def llama(data: Path) -> Path:
    """A small model with rotary embeddings, whose generation is not limited to n_ctx."""
    return data / "golden" / "llama_gqa2_tied.gguf"


@pytest.fixture(scope="session")
def llama_model(llama: Path) -> _core.Model:
    """The model of `llama`, loaded."""
    return _core.Model(llama, device="cpu", threads=1)


@pytest.fixture(scope="session")
def whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer. Its rows are whole blocks of every type."""
    path = tmp_path_factory.mktemp("whole_blocks") / "model.gguf"
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    write_model(path, SHAPES["TinyLlama-1.1B"] | sizes | heads | {"vocab_size": 300}, "F32")
    return path


@pytest.fixture(scope="session")
def shared() -> Path:
    """Directory of checkpoints and texts that are too large for the repository."""
    return SHARED


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A mock of the Hugging Face Hub."""
    with local_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from support.page import chromium  # which needs the packages of the page's tests

    with chromium() as browser:
        yield browser
