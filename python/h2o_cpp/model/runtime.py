"""The runtime of a Generator."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from h2o_cpp import _core
from h2o_cpp.model.arguments import (
    KvDType,
    archive_arguments,
    bytes_of,
    check_context,
    check_int,
    directory_of,
    kv_dtypes,
    prefix_disk_bytes,
)
from h2o_cpp.model.cache_memory import ModelShape, choose_cache, slab_bytes
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import Positions, check_positions, core_policies, open_model
from h2o_cpp.model.stored_budget import Budget, resolve_archive
from h2o_cpp.model.tokenizer import Tokenizer

_log = logging.getLogger("h2o_cpp")

_MAX_ROWS = 65536  # rows of a session's batch
USEFUL_SEQUENCES = 16  # more at once hardly increase the speed on a CPU


class Runtime(NamedTuple):
    """A loaded model with its engine and tokenizer."""

    model: _core.Model
    engine: _core.Engine
    tokenizer: Tokenizer
    policy: Policy | Sequence[Policy]  # one for all layers, or one per layer
    n_sequences: int  # maximum at once


def open_runtime(
    path: str | os.PathLike[str],
    *,
    hh: Budget,
    cache_memory: float | str | None = None,
    recent: float | None,
    policy: str | Policy | Sequence[Policy] | None,
    n_ctx: int | None,
    positions: Positions,
    n_batch: int,
    kv_dtype: KvDType | None,
    device: str,
    threads: int | None,
    max_sequences: int | None,
    memory: int | str | None,
    max_resident: int | str | None,
    exact: bool = False,
    prefix_cache: int = 0,
    prefix_cache_disk: str | os.PathLike[str] | None = None,
    prefix_cache_disk_bytes: int | str | None = None,
    prefix_ends: bool = False,
    archive: KvDType | None = None,
    archive_pages: int | None = None,
    archive_dir: str | os.PathLike[str] | None = None,
    archive_heads: float | None = None,
) -> Runtime:
    """Load a model. Arguments and errors as for Generator."""
    n_batch = check_int("n_batch", n_batch, 1, _MAX_ROWS)
    disk_bytes = prefix_disk_bytes(prefix_cache_disk, prefix_cache_disk_bytes)
    archive_arguments(archive, archive_pages, archive_dir, archive_heads)  # checks them
    if archive is not None and hh is cache_memory is policy is None:
        raise ValueError(f"archive={archive!r} needs a budget such as hh=0.2, which evicts tokens")
    model = open_model(path, device=device, threads=threads, max_resident=max_resident, exact=exact)
    archive, archive_pages, archive_heads = resolve_archive(
        hh, archive, archive_pages, archive_heads, model.file
    )
    recall = archive_arguments(archive, archive_pages, archive_dir, archive_heads)
    if archive is not None and positions == "auto":
        positions = "original"  # as the core does with an archive
    n_ctx = check_context(n_ctx, model.n_ctx_train)
    positions = check_positions(positions)
    shape = ModelShape.of(model)
    policy, kv_dtype = choose_cache(
        model.file, shape, hh=hh, cache_memory=cache_memory, recent=recent, policy=policy,
        n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions,
    )  # fmt: skip
    if memory is not None and max_sequences is not None:
        raise ValueError("give either max_sequences or memory, not both")
    each = slab_bytes(shape, policy, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions)
    most = max(1, _MAX_ROWS - n_batch + 1)
    if memory is not None:
        n_sequences = allocated = min(bytes_of("memory", memory) // each, most)
        if n_sequences == 0:
            raise ValueError(f"memory={memory!r} is too small for the cache of one sequence")
    elif max_sequences is not None:
        n_sequences = allocated = check_int("max_sequences", max_sequences, 1)
        if n_sequences > most:
            raise ValueError(
                f"max_sequences={n_sequences}, expected at most {most} with n_batch={n_batch}"
            )
    else:  # allocated when needed
        n_sequences = max(1, min(USEFUL_SEQUENCES, _core.available_memory() // 2 // each, most))
        allocated = 1
    tokenizer = Tokenizer.of_model(model)
    engine = _core.Engine(
        model,
        tokenizer.core,
        policies=core_policies(policy),
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_sequences=allocated,
        max_sequences=n_sequences,
        **kv_dtypes(kv_dtype),
        positions=positions,
        prefix_bytes=prefix_cache,
        prefix_ends=prefix_ends,
        prefix_disk=directory_of("prefix_cache_disk", prefix_cache_disk),
        prefix_disk_bytes=disk_bytes,
        log=_log.warning,
        **recall,
    )
    return Runtime(model, engine, tokenizer, policy, n_sequences)
