"""Modified snapshots with valid checksums."""

import struct


def checksum(data: bytes) -> int:
    """FNV-1a over words of 8 bytes, as in ByteReader."""
    total = 14695981039346656037 ^ len(data)
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little")
        total = ((total ^ word) * 1099511628211) % 2**64
        total ^= total >> 29
    return total


def sealed(data: bytes) -> bytes:
    """With updated size and checksum."""
    return data[:12] + struct.pack("<QQ", len(data) - 28, checksum(data[28:])) + data[28:]
