"""How fast one model file is here, and how far that is from what the machine can do."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from h2o_cpp import __version__, _core
from h2o_cpp.bench import gpu_machine, machine
from h2o_cpp.bench.matmul_peak import matmul_peak
from h2o_cpp.bench.memory import peak_rss_bytes
from h2o_cpp.bench.traffic import decode_weight_bytes, kv_bytes, prefill_flops, weights
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.model_files import find_model
from h2o_cpp.peers.engines.h2o import H2o


class Spread(NamedTuple):
    """The slowest and the fastest round."""

    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """What `measure` found. Rates are medians of the rounds."""

    model: str
    architecture: str
    types: dict[str, int]  # how many tensors are of each
    version: str
    machine: str
    backend: str
    policy: str
    kv_dtype: str
    n_ctx: int
    n_batch: int
    rounds: int

    prompt_tokens: int
    prefill_tokens_per_second: float
    prefill_spread: Spread
    context_tokens: int
    decode_tokens: int
    decode_tokens_per_second: float
    decode_spread: Spread

    load_seconds: float
    import_seconds: float
    cache_bytes: int
    full_cache_bytes: int
    peak_rss_bytes: int
    weight_bytes: int

    decode_weight_bytes: int  # read for each token
    decode_kv_bytes: int  # read for each token, in the mean
    bandwidth_of: str  # "reading", or "copying" on a GPU
    read_bandwidth: float | None  # bytes per second; None on a GPU without PyTorch
    read_bandwidth_fraction: float | None  # that decoding reaches
    prefill_flops: int  # for each token, in the matrix products
    matmul_of: str  # "numpy, f32", or "torch, f16" on a GPU
    matmul_flops: float | None  # per second; None on a GPU without PyTorch
    matmul_fraction: float | None  # that prefill reaches; above 1 by other types


def measure(
    path: str | os.PathLike[str],
    *,
    prompt: int,
    context: int,
    n: int,
    rounds: int = 3,
    device: str = "auto",
    threads: int | None = None,
    **options: Any,
) -> Measurement:
    """Measure a model.

    path: as for a Generator.
    prompt: random tokens that are read at once, in chunks as a Generator reads them.
    context: tokens that have been read when n tokens are decoded, one at a time.
    device, threads: default: as a Generator's.
    options: hh, recent, policy, n_ctx, n_batch, positions and kv_dtype, as for a Generator.

    Decoding a token reads all weights but the tables that are looked up, and what the cache keeps
    of K and V: read_bandwidth_fraction is these bytes, times tokens per second, as a share of what
    as many threads read from an array in memory; on a GPU, of what it reads and writes when it
    copies one, by PyTorch. Memory is that of this process.

    Raises FileNotFoundError, ValueError (an invalid file or option, or more tokens
    than the context has) and MemoryError.
    """
    check_int("prompt", prompt, 1)
    check_int("context", context, 0)
    check_int("n", n, 1)
    check_int("rounds", rounds, 1)
    path = find_model(path)
    engine = H2o(path, device=device, threads=threads, **options)
    model, session = engine.model, engine.session
    prefill, decode = [], []
    for _ in range(rounds):
        prefill.append(prompt / sum(engine.prefill(prompt)))
        engine.reset()
        decode.append(n / sum(engine.decode(context, n)))
    rss = peak_rss_bytes()  # before the limits of the machine are measured

    tensors = weights(_core.GgufShards(path).files)
    kv_dtype = options.get("kv_dtype", "f16")
    # The first of the tokens finds the context and itself, the last n - 1 more: unless evicted.
    n_seen = context + (n + 1) / 2
    kept = sum(min(session.tokens_kept(0, layer), n_seen) for layer in range(model.n_layers))
    weight_bytes = decode_weight_bytes(tensors)
    cached_bytes = round(kept * kv_bytes(model.n_kv_heads, model.head_dim, kv_dtype))
    flops = prefill_flops(tensors)
    limits = _limits(model.backend, device)
    return Measurement(
        model=os.path.basename(path),
        architecture=model.architecture,
        types=dict(Counter(tensor.dtype for tensor in tensors)),
        version=__version__,
        machine=limits.machine,
        backend=model.backend,
        policy=str(engine.policy),
        kv_dtype=kv_dtype if isinstance(kv_dtype, str) else ",".join(kv_dtype),
        n_ctx=session.n_ctx,
        n_batch=session.n_batch,
        rounds=rounds,
        prompt_tokens=prompt,
        prefill_tokens_per_second=median(prefill),
        prefill_spread=_spread(prefill),
        context_tokens=context,
        decode_tokens=n,
        decode_tokens_per_second=median(decode),
        decode_spread=_spread(decode),
        load_seconds=engine.load_seconds,
        import_seconds=machine.import_seconds(),
        cache_bytes=session.cache_bytes,
        full_cache_bytes=session.full_cache_bytes,
        peak_rss_bytes=rss,
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        decode_weight_bytes=weight_bytes,
        decode_kv_bytes=cached_bytes,
        bandwidth_of=limits.bandwidth_of,
        read_bandwidth=limits.bandwidth,
        read_bandwidth_fraction=_share(
            (weight_bytes + cached_bytes) * median(decode), limits.bandwidth
        ),
        prefill_flops=flops,
        matmul_of=limits.matmul_of,
        matmul_flops=limits.matmul_flops,
        matmul_fraction=_share(flops * median(prefill), limits.matmul_flops),
    )


class _Limits(NamedTuple):
    machine: str
    bandwidth_of: str
    bandwidth: float | None
    matmul_of: str
    matmul_flops: float | None


def _limits(backend: str, device: str) -> _Limits:
    """Of what a back end that calls itself "cpu (x86_64_v4, 2 threads)" or "cuda (...)" runs on."""
    cpu = re.fullmatch(r"cpu \(\w+, (\d+) threads?\)", backend)
    if cpu:
        threads = int(cpu[1])
        flops = matmul_peak("numpy", threads)["f32"]
        read = machine.read_bandwidth(threads)
        return _Limits(machine.processor(), "reading", read, "numpy, f32", flops)
    device = "cuda" if device == "auto" else device
    name = gpu_machine.describe(device) or backend
    try:
        limits = gpu_machine.gpu_limits(device)
    except RuntimeError:
        limits = {}
    return _Limits(name, "copying", limits.get("copy"), "torch, f16", limits.get("f16"))


def _share(rate: float, limit: float | None) -> float | None:
    return None if limit is None else rate / limit


def _spread(rates: Sequence[float]) -> Spread:
    return Spread(min(rates), max(rates))
