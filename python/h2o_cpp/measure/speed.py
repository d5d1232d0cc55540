"""The speed of a model, relative to the machine's limits."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.measure import machine
from h2o_cpp.measure.traffic import (
    decode_weight_bytes,
    experts_used,
    kv_bytes,
    prefill_flops,
    weights,
)
from h2o_cpp.model.arguments import KvDType, check_context, check_int, types_text
from h2o_cpp.model.cache_memory import ModelShape, choose_cache
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.session import Positions, open_model, open_session, read_tokens
from h2o_cpp.model.stored_budget import Budget, resolve_archive


@dataclass(frozen=True)
class Measurement:
    """The result of measure(). Rates are medians of the rounds; spreads are (slowest, fastest).

    Limits are of the CPU; None on a GPU, whose limits tools/bench/gpu measures.
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


def measure(
    path: str | os.PathLike[str],
    *,
    prompt: int,
    context: int,
    n: int,
    rounds: int = 3,
    device: str = "auto",
    threads: int | None = None,
    hh: Budget = None,
    recent: float | None = None,
    policy: str | None = None,
    n_ctx: int | None = None,
    n_batch: int = 512,
    positions: Positions = "auto",
    kv_dtype: KvDType | None = None,
) -> Measurement:
    """Measure a model.

    path: as for Generator.
    prompt: random tokens to read, in chunks as Generator reads a prompt.
    context: tokens read before n tokens are decoded.
    The rest as for Generator.

    Decoding a token reads all weights except lookup tables, and the kept K and V; what it recalls
    of an archive is not counted.
    read_bandwidth_fraction is this rate relative to reading an array with as many threads. Memory
    is that of this process.

    Raises FileNotFoundError, ValueError (a file or an option that is invalid, or more tokens than
    the context has) and MemoryError.
    """
    check_int("prompt", prompt, 1)
    check_int("context", context, 0)
    check_int("n", n, 1)
    check_int("rounds", rounds, 1)
    begun = perf_counter()
    path = find_model(path)

    cache: Any = {"hh": hh, "recent": recent, "policy": policy, "kv_dtype": kv_dtype}
    cache["positions"] = positions

    def open_on(name: str) -> tuple[_core.Model, str, KvDType, KvDType | None, _core.Session]:
        model = open_model(path, device=name, threads=threads)
        most = check_context(n_ctx, model.n_ctx_train)
        chosen, types = choose_cache(model.file, ModelShape.of(model), n_ctx=most, **cache)
        archive, pages, heads = resolve_archive(hh, None, None, None, model.file)
        session = open_session(
            model, chosen, n_ctx=most, n_batch=n_batch, kv_dtype=types, positions=positions,
            archive=archive, archive_pages=pages, archive_heads=heads,
        )  # fmt: skip
        return model, str(chosen), types, archive, session

    needed = partial(model_and_cache_bytes, path, n_ctx=n_ctx, **cache)
    model, chosen, types, archive, session = open_on_device(device, open_on, needed)
    load_seconds = perf_counter() - begun
    random = np.random.default_rng(0)
    prefill, decode = [], []
    for _ in range(rounds):
        tokens = random.integers(model.n_vocab, size=prompt, dtype=np.int32)
        prefill.append(prompt / prefill_seconds(session, tokens))
        tokens = random.integers(model.n_vocab, size=context + n, dtype=np.int32)
        decode.append(n / sum(decode_seconds(session, tokens, context)))
    rss = machine.peak_rss_bytes()  # before machine's limits are measured

    tensors = weights(_core.GgufShards(path).files)
    # The first decoded token sees the context and itself, the last n - 1 more, unless evicted.
    n_seen = context + (n + 1) / 2
    kept = sum(min(session.tokens_kept(0, layer), n_seen) for layer in range(model.n_layers))
    used = experts_used(model.file)
    weight_bytes = decode_weight_bytes(tensors, used)
    cached_bytes = round(kept * kv_bytes(model.n_kv_heads, model.head_dim, types))
    flops = prefill_flops(tensors, used)
    bandwidth, matmul_flops = _limits(model.backend)
    return Measurement(
        model=os.path.basename(path),
        architecture=model.architecture,
        types=dict(Counter(tensor.dtype for tensor in tensors)),
        version=_core.__version__,
        machine=machine.processor(),
        backend=model.backend,
        policy=chosen,
        kv_dtype=types_text(types),
        archive=None if archive is None else types_text(archive),
        n_ctx=session.n_ctx,
        n_batch=session.n_batch,
        rounds=rounds,
        prompt_tokens=prompt,
        prefill_tokens_per_second=median(prefill),
        prefill_spread=(min(prefill), max(prefill)),
        context_tokens=context,
        decode_tokens=n,
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
