"""What the driver says of a GPU's memory."""

from __future__ import annotations

import ctypes


def free_bytes() -> int:
    """Of device 0, beside every process."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for status in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        driver.cuCtxPushCurrent_v2(context),
        driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
        driver.cuDevicePrimaryCtxRelease_v2(device),
    ):
        assert status == 0
    return free.value
