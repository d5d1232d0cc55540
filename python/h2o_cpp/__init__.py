"""LLM inference with a bounded KV cache: the Heavy-Hitter Oracle (H2O, arXiv 2306.14048).

from h2o_cpp import Generator
for piece in Generator("opt.gguf", hh=0.2).stream(prompt):
    print(piece, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING

import h2o_cpp.main_interpreter  # noqa: F401  before the core
from h2o_cpp._core import __version__
from h2o_cpp.budget.policy import Policy
from h2o_cpp.cache import KVCache, Rope
from h2o_cpp.chat import Chat
from h2o_cpp.files.model_files import BUNDLED_MODEL
from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.prompt_memory import PromptMemory
from h2o_cpp.generation.record import Kept, Record, TokenLogprob
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stats import EngineStats, HeadStats, LayerStats, Stats
from h2o_cpp.generation.stream import Generation, Stream
from h2o_cpp.generator import Generator
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import capacity

if TYPE_CHECKING:
    from h2o_cpp.measure.advice import Advice, advise

__all__ = [
    "BUNDLED_MODEL",
    "Advice",
    "Chat",
    "Completion",
    "Engine",
    "EngineStats",
    "Generation",
    "Generator",
    "HeadStats",
    "KVCache",
    "Kept",
    "LayerStats",
    "Policy",
    "PromptMemory",
    "Record",
    "Rope",
    "Snapshot",
    "Stats",
    "Stream",
    "TokenLogprob",
    "Tokenizer",
    "__version__",
    "advise",
    "capacity",
]


def __getattr__(name: str) -> object:
    # Imported when first used, as it takes a part of the time to import the package.
    if name not in ("Advice", "advise"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("h2o_cpp.measure.advice"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
