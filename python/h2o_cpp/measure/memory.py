"""Memory of a process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def rss_bytes() -> int:
    """Memory that is resident in this process now, mapped files included."""
    return _status("VmRSS")


def peak_rss_bytes() -> int:
    """The most that was resident so far."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """What the kernel says of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
