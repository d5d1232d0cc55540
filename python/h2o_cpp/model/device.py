"""What device="auto" is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from h2o_cpp import _core
from h2o_cpp.model.arguments import KvDType, bytes_of, check_context
from h2o_cpp.model.cache_memory import ModelShape, choose_cache, slab_bytes
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import Positions, check_positions
from h2o_cpp.model.stored_budget import Budget

_log = logging.getLogger("h2o_cpp")

T = TypeVar("T")


def open_on_device(device: str, open_on: Callable[[str], T], needed: Callable[[], int]) -> T:
    """open_on(device). If that is "auto": on the GPU if the core chooses it and `needed()` bytes
    are free there, else on the CPU, also if the GPU cannot be used. Logs what it chose.
    """
    if device != "auto":
        return open_on(device)
    name, reason, warns = _core.auto_device(0)
    if name != "cpu":
        try:
            name, reason, warns = _core.auto_device(needed())
            if name != "cpu":
                opened = open_on(name)
                _log.info("device='auto' is the GPU: %s", reason)
                return opened
        except (ValueError, MemoryError, RuntimeError) as error:
            reason, warns = str(error), True
    if reason:
        _log.log(logging.WARNING if warns else logging.INFO, "device='auto' is the CPU: %s", reason)
    return open_on("cpu")


def model_and_cache_bytes(
    path: str | os.PathLike[str],
    *,
    hh: Budget = None,
    cache_memory: float | str | None = None,
    recent: float | None = None,
    policy: str | Policy | Sequence[Policy] | None = None,
    n_ctx: int | None = None,
    kv_dtype: KvDType | None = None,
    positions: Positions = "auto",
    max_resident: int | str | None = None,
) -> int:
    """Bytes of a model's weights on a device, and of one sequence's cache. Arguments and errors as
    for Generator.
    """
    path = find_model(path)
    file = _core.GgufFile(path)
    shape = ModelShape.of_file(path)
    n_ctx = check_context(n_ctx, shape.n_ctx_train)
    positions = check_positions(positions)
    chosen, kv_dtype = choose_cache(
        file, shape, hh=hh, cache_memory=cache_memory, recent=recent, policy=policy,
        n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions,
    )  # fmt: skip
    weights = sum(Path(shard.path).stat().st_size for shard in _core.GgufShards(path).files)
    if max_resident is not None:
        weights = min(weights, bytes_of("max_resident", max_resident))
    return weights + slab_bytes(shape, chosen, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions)
