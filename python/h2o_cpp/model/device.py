"""The meaning of device="auto"."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from h2o_cpp import _core
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.options import CacheOptions

_log = visible_log("h2o_cpp")

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


def model_and_cache_bytes(file: ModelFile, cache: CacheOptions, max_resident: int = 0) -> int:
    """Bytes of a model's weights on a device, and of one sequence's cache.

    max_resident: the most bytes of weights; 0: no limit.
    """
    return min(file.n_bytes, max_resident or file.n_bytes) + cache.slab_bytes(file)
