"""Plans: how many sequences to decode at once, and which weights stay in memory (docs/plan.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from h2o_cpp import _core
from h2o_cpp.measure import machine
from h2o_cpp.measure.prediction import (
    MAX_SEQUENCES,
    Candidate,
    Experts,
    Job,
    Sizes,
    Speeds,
    candidates,
    choose,
    least_bytes,
    placements,
)
from h2o_cpp.measure.speed import prefill_seconds
from h2o_cpp.measure.traffic import decode_weight_bytes, kv_bytes, prefill_flops, weights
from h2o_cpp.model.arguments import KvDType, bytes_of, check_float, check_int, thread_count
from h2o_cpp.model.cache_memory import ModelShape, choose_cache, slab_bytes
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.model.stored_budget import Budget, resolve_archive

_MANY = 1024  # rows, so that the padding of arrays counts little


@dataclass(frozen=True)
class Plan:
    """The result of plan(); candidates are ordered by resident weights, then by sequences."""

    model: str
    memory: int
    sizes: Sizes
    job: Job
    speeds: Speeds
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    arguments: Mapping[str, Any]  # arguments of Generator
    why: str


def plan(
    path: str | os.PathLike[str],
    memory: int | str,
    *,
    prompt: int,
    n: int,
    sequences: int | None = None,
    hh: Budget = None,
    recent: float | None = None,
    policy: str | Policy | Sequence[Policy] | None = None,
    n_batch: int = 512,
    kv_dtype: str | tuple[str, str] | None = None,
    threads: int | None = None,
    memory_bandwidth: float | None = None,
    storage_bandwidth: float | None = None,
    flops: float | None = None,
) -> Plan:
    """Find the number of sequences and the resident weights that are fastest on the CPU.

    path: as for Generator.
    memory: for weights, caches and activations together, "4GiB" or bytes.
    prompt, n: tokens of each prompt and of each output.
    sequences: the most prompts at once; default: no limit.
    hh, recent, policy, n_batch, kv_dtype, threads: as for Generator, with n_ctx = prompt + n. hh:
        "auto" only without an archive.
    memory_bandwidth, storage_bandwidth: bytes per second; default: measured by reading an array,
        and the model's file without the page cache.
    flops: operations per second; default: measured by reading a short prompt.

    `Generator(path, **plan(path, ...).arguments)` carries it out.

    Raises FileNotFoundError, ValueError (invalid options, too little memory), OSError (a
    bandwidth cannot be measured) and MemoryError.
    """
    n_bytes = bytes_of("memory", memory)
    check_int("prompt", prompt, 1)
    check_int("n", n, 1)
    n_batch = check_int("n_batch", n_batch, 1)
    thread_count(threads)  # checks it
    most = MAX_SEQUENCES if sequences is None else check_int("sequences", sequences, 1)
    given = {
        "memory_bandwidth": memory_bandwidth,
        "storage_bandwidth": storage_bandwidth,
        "flops": flops,
    }
    for name, value in given.items():
        if value is not None and not 0 < check_float(name, value) < float("inf"):
            raise ValueError(f"{name}={value!r}, expected a positive number per second")
    file = find_model(path)
    model = _core.GgufShards(file)
    config = _core.Config(model)
    shape = ModelShape.of(config)
    if prompt + n > shape.n_ctx_train:
        raise ValueError(
            f"prompt={prompt} and n={n} are {prompt + n} tokens, "
            f"expected at most the trained {shape.n_ctx_train}"
        )
    if resolve_archive(hh, None, None, None, model.files[0])[0] is not None:
        raise ValueError(
            "hh='auto' includes an archive, whose memory is not counted, expected hh as a number"
        )
    chosen, kv_dtype = choose_cache(
        model.files[0], shape, hh=hh, recent=recent, policy=policy, n_ctx=prompt + n,
        kv_dtype=kv_dtype, positions="auto",
    )  # fmt: skip
    sizes = sizes_of(model, config)
    job = _job(shape, chosen, prompt, n, n_batch=n_batch, kv_dtype=kv_dtype)
    least = least_bytes(sizes, job)
    if n_bytes < least:
        raise ValueError(
            f"memory={memory!r} is {n_bytes} bytes, expected at least {least} for resident weights "
            "and one sequence"
        )
    speeds = Speeds(
        memory_bandwidth or machine.read_bandwidth(threads or machine.n_processors()),
        storage_bandwidth or _storage_bandwidth(file),
        flops or _flops(file, sizes, min(prompt, n_batch), n_bytes, threads),
    )
    found = candidates(sizes, job, speeds, n_bytes, most)
    best = choose(found)
    arguments: dict[str, Any] = {
        "device": "cpu",
        "n_ctx": prompt + n,
        "max_sequences": best.sequences,
    }
    defaults = {"n_batch": 512, "kv_dtype": "f16", "threads": None}
    own: dict[str, Any] = {"n_batch": n_batch, "kv_dtype": kv_dtype, "threads": threads}
    own |= {"hh": hh, "recent": recent, "policy": policy}
    arguments |= {key: value for key, value in own.items() if value != defaults.get(key)}
    if best.streams:
        arguments["max_resident"] = best.weight_bytes
    return Plan(
        model.files[0].path,
        n_bytes,
        sizes,
        job,
        speeds,
        tuple(found),
        best,
        arguments,
        _why(found, best, most),
    )


def _why(found: Sequence[Candidate], best: Candidate, most: int) -> str:
    """An explanation of the choice."""
    stay = [one for one in found if not one.streams]
    stream = [one for one in found if one.streams]
    experts = any(one.streamed_experts for one in found)
    what = "experts that are read when needed" if experts else "layers that take turns"
    why = []
    if not stay:
        how = "experts are read when needed" if experts else "layers take turns"
        why.append(f"All weights do not fit beside one sequence, so {how}.")
    elif best.streams:
        alone = max(stay, key=lambda one: one.tokens_per_second)
        why.append(
            f"With all weights in memory {alone.sequences} at once would fit, and give "
            f"{alone.tokens_per_second:.1f} tokens/s: {what} make room for more."
        )
    elif stream:
        other = max(stream, key=lambda one: one.tokens_per_second)
        why.append(
            f"{what.capitalize()} would make room for {other.sequences} at once, but give "
            f"{other.tokens_per_second:.1f} tokens/s."
        )
    parts = {
        "reading weights": best.weight_seconds,
        "arithmetic": best.arithmetic_seconds,
        "reading the cache": best.cache_seconds,
        "waiting for storage": best.storage_seconds,
    }
    shares = [f"{name} {part / best.pass_seconds:.0%}" for name, part in parts.items() if part]
    why.append(f"A pass takes {best.pass_seconds * 1e3:.1f} ms: {', '.join(shares)}.")
    same = [one for one in found if one.weight_bytes == best.weight_bytes]
    if best.sequences < max(one.sequences for one in same):
        why.append("More at once would fit, and gain less than 3%.")
    elif best.sequences == most:
        why.append("There are no more prompts.")
    else:
        why.append("More do not fit.")
    return " ".join(why)


def sizes_of(model: _core.GgufShards, config: _core.Config) -> Sizes:
    """The sizes of a model's tensors and of its activations."""
    tensors = weights(model.files)
    layers, of_experts = [0] * config.n_layers, [0] * config.n_layers
    others = 0
    for tensor in tensors:
        if tensor.layer < 0:
            others += tensor.nbytes
            continue
        layers[tensor.layer] += tensor.nbytes
        if tensor.has_experts:
            of_experts[tensor.layer] += tensor.nbytes
    (n_vocab, width), *_ = (t.shape for t in tensors if t.name == "token_embd.weight")
    metadata = model.files[0].metadata()
    n_experts = int(metadata.get(f"{config.architecture}.expert_count", 0))
    n_used = int(metadata.get(f"{config.architecture}.expert_used_count", 0))
    return Sizes(
        layers=tuple(layers),
        others=others,
        others_read=decode_weight_bytes(tensors) - sum(layers),
        layer_flops=prefill_flops(tensors, n_used / n_experts if n_experts else 1.0),
        output_flops=2 * n_vocab * width,
        row_bytes=config.activation_bytes(_MANY, 0) // _MANY,
        logits_bytes=config.activation_bytes(0, _MANY) // _MANY + 4 * n_vocab,  # and returned
        experts=Experts(n_experts, n_used, tuple(of_experts)) if n_experts else None,
    )


def _job(
    shape: ModelShape,
    policy: Policy | Sequence[Policy],
    prompt: int,
    n: int,
    *,
    n_batch: int,
    kv_dtype: KvDType,
) -> Job:
    policies = [policy] * shape.n_layers if isinstance(policy, Policy) else [*policy]
    states = shape.state_floats or (0,) * shape.n_layers
    seen = np.arange(prompt, prompt + n) + 1.0
    kept = sum(
        float(seen.mean() if one.budget is None else np.minimum(one.budget + 1, seen).mean())
        for one, state in zip(policies, states, strict=True)
        if state == 0
    )
    state_bytes = 4 * sum(states)
    return Job(
        prompt=prompt,
        n=n,
        n_batch=n_batch,
        slab_bytes=slab_bytes(shape, policy, n_ctx=prompt + n, kv_dtype=kv_dtype, positions="auto"),
        kv_read=kept * kv_bytes(shape.n_kv_heads, shape.head_dim, kv_dtype) + state_bytes,
    )


def _storage_bandwidth(file: str) -> float:
    try:
        return machine.storage_bandwidth(file)
    except OSError as error:
        raise OSError(f"{error}; give storage_bandwidth, bytes per second") from None


def _flops(file: str, sizes: Sizes, rows: int, memory: int, threads: int | None) -> float:
    """Operations per second of reading `rows` tokens, a second time with the weights loaded."""
    whole_size = sizes.others + sum(sizes.layers)
    resident = None if whole_size <= memory else min(size for _, size in placements(sizes))
    model = open_model(file, device="cpu", threads=threads, max_resident=resident)
    session = open_session(model, Policy.full(), n_ctx=rows, n_batch=rows)
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, rows, np.int32)
    prefill_seconds(session, tokens)
    return (rows * sizes.layer_flops + sizes.output_flops) / prefill_seconds(session, tokens)
