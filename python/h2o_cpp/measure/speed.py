"""The speed of a model, relative to the machine's limits."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import check_int, types_text
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.measure import machine
from h2o_cpp.measure.traffic import (
    decode_weight_bytes,
    experts_used,
    kv_bytes,
    prefill_flops,
    weights,
)
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.model.session import open_model, read_tokens
from h2o_cpp.options import CacheOptions


@dataclass(frozen=True)
class Measurement:
    """The result of measure(). Rates are medians of the rounds; spreads are (slowest, fastest).

    Limits are of the CPU; None on a GPU, whose limits `tools/bench gpu` measures.
    """

    model: str
    architecture: str
    types: dict[str, int]  # number of tensors by type
    version: str
    machine: str
    backend: str
    policy: str
    kv_dtype: str
    archive: str | None  # its types, if hh="auto" has one
    n_ctx: int
    n_batch: int
    rounds: int

    prompt_tokens: int
    prefill_tokens_per_second: float
    prefill_spread: tuple[float, float]
    context_tokens: int
    decode_tokens: int
    decode_tokens_per_second: float
    decode_spread: tuple[float, float]

    load_seconds: float
    cache_bytes: int
    full_cache_bytes: int
    archive_bytes: int  # after the last token
    peak_rss_bytes: int | None  # None if unknown, as on Windows
    weight_bytes: int

    decode_weight_bytes: int  # read per token
    decode_kv_bytes: int  # read per token, mean
    read_bandwidth: float | None  # bytes per second
    read_bandwidth_fraction: float | None  # reached by decoding
    prefill_flops: int  # per token, in matrix products
    matmul_flops: float | None  # per second, numpy f32
    matmul_fraction: float | None  # reached by prefill; may exceed 1 with other types


@dataclass(frozen=True)
class Workload:
    """Random tokens to read and to decode."""

    prompt: int  # read at once, in chunks as Generator reads a prompt
    context: int  # read before n tokens are decoded
    n: int
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("context", 0), ("n", 1), ("rounds", 1)):
            check_int(name, getattr(self, name), least)


def measure(
    path: str | os.PathLike[str],
    work: Workload,
    *,
    device: str = "auto",
    threads: int | None = None,
    cache: CacheOptions | None = None,
) -> Measurement:
    """Measure a model.

    path: as for Generator.
    device, threads, cache: as for Generator.

    Decoding a token reads all weights except lookup tables, and the kept K and V; what it recalls
    of an archive is not counted.
    read_bandwidth_fraction is this rate relative to reading an array with as many threads. Memory
    is that of this process.

    Raises FileNotFoundError, ValueError (a file or an option that is invalid, or more tokens than
    the context has) and MemoryError.
    """
    begun = perf_counter()
    file, options = ModelFile.find(path), cache or CacheOptions()
    chosen = options.for_model(file)

    def open_on(name: str) -> tuple[_core.Model, _core.Session]:
        model = open_model(file, device=name, threads=threads)
        return model, _core.Session(model, chosen.core())

    needed = partial(model_and_cache_bytes, file, options)
    model, session = open_on_device(device, open_on, needed)
    load_seconds = perf_counter() - begun
    random = np.random.default_rng(0)
    prefill, decode = [], []
    for _ in range(work.rounds):
        tokens = random.integers(model.n_vocab, size=work.prompt, dtype=np.int32)
        prefill.append(work.prompt / prefill_seconds(session, tokens))
        tokens = random.integers(model.n_vocab, size=work.context + work.n, dtype=np.int32)
        decode.append(work.n / sum(decode_seconds(session, tokens, work.context)))
    rss = machine.peak_rss_bytes()  # before machine's limits are measured

    tensors = weights(file.shards.files)
    # The first decoded token sees the context and itself, the last work.n - 1 more, unless evicted.
    n_seen = work.context + (work.n + 1) / 2
    cached_bytes = round(
        sum(
            min(session.tokens_kept(0, layer), n_seen) * kv_bytes(*heads, chosen.types)
            for layer, heads in enumerate(model.layer_heads)
        )
    )
    used = experts_used(model.file)
    weight_bytes = decode_weight_bytes(tensors, used)
    flops = prefill_flops(tensors, used)
    bandwidth, matmul_flops = _limits(model.backend)
    return Measurement(
        model=os.path.basename(file.path),
        architecture=model.architecture,
        types=dict(Counter(tensor.dtype for tensor in tensors)),
        version=_core.__version__,
        machine=machine.processor(),
        backend=model.backend,
        policy=str(chosen.policies),
        kv_dtype=types_text(chosen.types),
        archive=None if chosen.archive is None else types_text(chosen.archive),
        n_ctx=session.n_ctx,
        n_batch=session.n_batch,
        rounds=work.rounds,
        prompt_tokens=work.prompt,
        prefill_tokens_per_second=median(prefill),
        prefill_spread=(min(prefill), max(prefill)),
        context_tokens=work.context,
        decode_tokens=work.n,
        decode_tokens_per_second=median(decode),
        decode_spread=(min(decode), max(decode)),
        load_seconds=load_seconds,
        cache_bytes=session.cache_bytes,
        full_cache_bytes=session.full_cache_bytes,
        archive_bytes=session.archive_bytes,
        peak_rss_bytes=rss,
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        decode_weight_bytes=weight_bytes,
        decode_kv_bytes=cached_bytes,
        read_bandwidth=bandwidth,
        read_bandwidth_fraction=_share((weight_bytes + cached_bytes) * median(decode), bandwidth),
        prefill_flops=flops,
        matmul_flops=matmul_flops,
        matmul_fraction=_share(flops * median(prefill), matmul_flops),
    )


def prefill_seconds(session: _core.Session, tokens: NDArray[np.int32]) -> float:
    """Seconds to read tokens [n] into an empty cache, in chunks as Generator reads a prompt."""
    session.reset(0)
    begun = perf_counter()
    read_tokens(session, tokens)
    return perf_counter() - begun


def decode_seconds(
    session: _core.Session, tokens: NDArray[np.int32], n_context: int
) -> list[float]:
    """Seconds per token of tokens[n_context:], decoded after the tokens before them."""
    prefill_seconds(session, tokens[:n_context])
    seconds = []
    for i in range(n_context, len(tokens)):
        begun = perf_counter()
        session.step([(0, tokens[i : i + 1])])
        seconds.append(perf_counter() - begun)
    return seconds


def _limits(backend: str) -> tuple[float | None, float | None]:
    """Bandwidth and operations per second of a back end such as "cpu (x86_64_v4, 2 threads)"."""
    cpu = re.fullmatch(r"cpu \(\w+, (\d+) threads?\)", backend)
    if cpu is None:
        return None, None
    return machine.read_bandwidth(int(cpu[1])), machine.matmul_flops(int(cpu[1]))


def _share(rate: float, limit: float | None) -> float | None:
    return None if limit is None else rate / limit
