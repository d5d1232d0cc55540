"""KVCache with arrays of other libraries, via DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import KVCache, Policy
from support.needs import packages

_CPU, _CUDA = 1, 2  # kDLCPU, kDLCUDA


class _DLPackArray:
    """An array that supports only DLPack."""

    def __init__(self, values: NDArray[np.float32], device: int) -> None:
        self._values, self._device = values, device
        self.requested_devices: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: Any) -> Any:
        self.requested_devices.append(options.get("dl_device"))
        return self._values.__dlpack__()


@pytest.mark.parametrize("device", [_CPU, _CUDA])
def test_dlpack_arrays(device: int) -> None:
    random = np.random.default_rng(1)
    policy = Policy.h2o(heavy=3, recent=2)
    ours, theirs = (
        KVCache(n_heads=4, n_kv_heads=2, head_dim=8, policy=policy, device="cpu") for _ in range(2)
    )
    for n in (1, 9, 1):
        q, k, v = (random.standard_normal((n, heads, 8), np.float32) for heads in (4, 2, 2))
        others = [_DLPackArray(x, device) for x in (q, k, v)]
        theirs_out = theirs.attend(others[0], others[1], others[2])
        np.testing.assert_array_equal(theirs_out, ours.attend(q, k, v))
        # Arrays on a GPU are requested as host copies.
        assert [other.requested_devices for other in others] == [
            [(_CPU, 0) if device == _CUDA else None]
        ] * 3


@packages("torch")
def test_torch_tensors() -> None:
    import torch

    cache = KVCache(n_heads=1, n_kv_heads=1, head_dim=4, policy=Policy.window(2), device="cpu")
    row = torch.ones(1, 1, 4)
    np.testing.assert_array_equal(cache.attend(row, row, row), np.ones((1, 1, 4)))
