"""What device="auto" is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from h2o_cpp import _core
from h2o_cpp.model.arguments import bytes_of, check_context
from h2o_cpp.model.cache_memory import fit_cache
from h2o_cpp.model.capacity import ModelShape, slab_bytes
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.policy import Policy, choose_policy
from h2o_cpp.model.session import Positions, check_positions
from h2o_cpp.model.stored_budget import Budget, resolve_budget, resolve_types

_log = logging.getLogger("h2o_cpp")

# Whether the CUDA back end has been measured on a GPU. Until then, "auto" is the CPU.
CUDA_IS_MEASURED = False

T = TypeVar("T")


def open_on_device(device: str, open_on: Callable[[str], T], needed: Callable[[], int]) -> T:
    """open_on(device). If that is "auto": on the GPU if there is one and `needed()` bytes are free
    there, else on the CPU, also if the GPU cannot be used. Logs what it chose.
    """
    if device != "auto" or not CUDA_IS_MEASURED:
        return open_on(device)
    try:
        free = _core.cuda_free_memory(0)
    except ValueError as error:  # no GPU, or built without CUDA
        _log.info("device='auto' is the CPU: %s", error)
        return open_on("cpu")
    except RuntimeError as error:  # such as a driver that is too old
        _log.warning("device='auto' is the CPU: %s", error)
        return open_on("cpu")
    try:
        n_bytes = needed()
        if n_bytes > free:
            raise MemoryError(
                f"the model and one cache take {n_bytes} bytes, {free} are free on the GPU"
            )
        opened = open_on("cuda")
    except (ValueError, MemoryError, RuntimeError) as error:
        _log.warning("device='auto' is the CPU: %s", error)
        return open_on("cpu")
    _log.info("device='auto' is the GPU: model and one cache take %d of %d bytes", n_bytes, free)
    return opened


def model_and_cache_bytes(
    path: str | os.PathLike[str],
    *,
    hh: Budget,
    cache_memory: float | str | None,
    recent: float | None,
    policy: str | Policy | Sequence[Policy] | None,
    n_ctx: int | None,
    kv_dtype: str | tuple[str, str] | None,
    positions: Positions,
    max_resident: int | str | None,
) -> int:
    """Bytes of a model's weights on a device, and of one sequence's cache. Arguments and errors as
    for Generator.
    """
    path = find_model(path)
    file = _core.GgufFile(path)
    shape = ModelShape.of_metadata(file.metadata())
    if shape is None:
        raise ValueError(f"{os.fspath(path)}: the size of its cache is not known before it is open")
    n_ctx = check_context(n_ctx, shape.n_ctx_train)
    positions = check_positions(positions)
    chosen: Policy | Sequence[Policy]
    if cache_memory is not None:
        name = policy if isinstance(policy, str) else None
        chosen, kv_dtype = fit_cache(
            shape, cache_memory, name, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions
        )
    else:
        kv_dtype = resolve_types(hh, kv_dtype, file)
        hh, policy = resolve_budget(hh, policy, file)
        chosen = choose_policy(hh, recent, policy, n_ctx)
    weights = sum(Path(shard.path).stat().st_size for shard in _core.GgufShards(path).files)
    if max_resident is not None:
        weights = min(weights, bytes_of("max_resident", max_resident))
    return weights + slab_bytes(shape, chosen, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions)
