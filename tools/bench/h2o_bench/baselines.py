"""The baselines for each model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h2o_bench.comparison import Baseline
from h2o_bench.engine_names import OURS
from h2o_bench.engine_process import EngineError
from h2o_bench.models import Models, config

_ENGINES = "h2o_bench.engines"


def ours(path: object, threads: int, *, name: str = OURS, **options: Any) -> Baseline:
    """This engine; options as for Generator."""
    options = {"path": str(path), "threads": threads, **options}
    return Baseline(name, f"{_ENGINES}.h2o", options)


def llama_cpp(
    path: object, threads: int, n_ctx: int, *, name: str = "llama.cpp", **options: Any
) -> Baseline:
    """llama.cpp, which does not support `opt`."""
    options = {"path": str(path), "threads": threads, "n_ctx": n_ctx, **options}
    return Baseline(name, f"{_ENGINES}.llama_cpp", options)


def ik_llama_cpp(path: object, program: Path, threads: int, *, repack: bool) -> Baseline:
    """ik_llama.cpp with or without repacked weights; program: its llama-bench."""
    name = "ik_llama.cpp, repacked" if repack else "ik_llama.cpp"
    options = {"path": str(path), "program": str(program), "threads": threads, "repack": repack}
    return Baseline(name, f"{_ENGINES}.ik_llama_cpp", options)


def openvino(path: object, threads: int, n_vocab: int, cache_tokens: int | None = None) -> Baseline:
    """OpenVINO GenAI, which reads architectures `llama` and `qwen2`."""
    name = "OpenVINO GenAI" if cache_tokens is None else f"OpenVINO GenAI, {cache_tokens} kept"
    options = {
        "path": str(path),
        "threads": threads,
        "n_vocab": n_vocab,
        "cache_tokens": cache_tokens,
    }
    return Baseline(name, f"{_ENGINES}.openvino", options)


def everyone(
    models: Models, shape: str, type_name: str, threads: int, n_ctx: int, ik: Path | None = None
) -> Iterator[Baseline | tuple[str, str]]:
    """The engines for a shape and a type; (name, reason) if a model cannot be made.

    transformers computes in f32 and bf16, so it is measured once, with F16; CTranslate2, with int8
    weights, with Q8_0. ik: ik_llama.cpp's llama-bench, if available.
    """
    path = models.gguf(shape, type_name)
    sizes = config(shape)
    yield ours(path, threads)
    if sizes["model_type"] != "opt":
        yield llama_cpp(path, threads, n_ctx)
        if ik is not None:
            for repack in (False, True):
                yield ik_llama_cpp(path, ik, threads, repack=repack)
    if sizes["model_type"] == "llama":
        yield openvino(path, threads, sizes["vocab_size"])
    if type_name == "F16":
        for dtype in ("bfloat16", "float32"):
            options = {"config": sizes, "threads": threads, "dtype": dtype}
            yield Baseline(f"transformers {dtype}", f"{_ENGINES}.transformers", options)
    if type_name == "Q8_0" and sizes["model_type"] == "opt":
        name = "CTranslate2 int8"
        try:
            directory = str(models.ctranslate2(shape))
        except EngineError as error:
            yield name, str(error)
            return
        options = {"path": directory, "threads": threads, "n_vocab": sizes["vocab_size"]}
        yield Baseline(name, f"{_ENGINES}.ctranslate2", options)
